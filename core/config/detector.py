"""Settings of the detector, table `[detector]`: when evidence becomes a finding."""

import ast
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from pacekeeper.core.config.base import parsed, reject, settings

Slowdown = Annotated[float, Field(ge=1.0)]


def parse_cost_model(text: str) -> tuple[str, dict[str, Any]]:
    """The dotted name of a regressor's class and its parameters, which are literals.

    Example:
        >>> parse_cost_model("sklearn.linear_model.HuberRegressor(max_iter=200)")
        ('sklearn.linear_model.HuberRegressor', {'max_iter': 200})

    Raises:
        ValueError: the text is no such name.
    """
    expected = (
        "expected the dotted name of a class, with literal keywords if any, such as "
        f"sklearn.linear_model.HuberRegressor(max_iter=200), got {text!r:.200}"
    )
    try:
        found = ast.parse(text, mode="eval").body
        params = {}
        if isinstance(found, ast.Call):
            if found.args or any(keyword.arg is None for keyword in found.keywords):
                raise ValueError(expected)
            params = {str(word.arg): ast.literal_eval(word.value) for word in found.keywords}
            found = found.func
        path = ast.unparse(found)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(expected) from error
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(expected)
    return path, params


Regressor = Annotated[str, parsed(parse_cost_model, is_optional=True)]


@settings
class DetectorConfig:
    """When evidence becomes a finding. z = log(observed / expected) / sigma."""

    # Steps before the cost model is fitted and ranks are judged. It is fitted again after twice as
    # many, and so on; until then thresholds are higher, as the noise is known less well.
    warmup_steps: Annotated[int, Field(ge=3)] = 3
    # Steps not judged at the start of a job (allocators, caches, first-touch), and only learnt from
    # where they took about what the next ones take.
    skip_steps: NonNegativeInt = 2
    # Most recent healthy steps kept for a refit.
    history_steps: int = 256
    # Class of a regressor by scikit-learn's conventions in place of the built-in linear cost model:
    # "sklearn.ensemble.HistGradientBoostingRegressor(max_iter=50)". Empty: the built-in one. The
    # controller imports and runs it. Layouts are priced by the built-in one all the same.
    cost_model: Regressor = ""
    # Least noise assumed of a step (log of observed / expected, one sigma).
    sigma_floor: PositiveFloat = 0.002
    # False findings per day of a healthy job. Thresholds follow at each fit from the ranks, the
    # length of a step, and how far the charts of the job's own ranks rose in health: at first they
    # are as high as a healthy MoE job with bouts of noise asks for. Ten times fewer cost a small
    # slowdown some steps and a large one nothing. The first 32 steps count as a tenth of a day.
    false_alarms_per_job_day: PositiveFloat = 0.1
    # Last steps that must agree on a slowdown; twice as many with a noisy clock.
    min_steps: PositiveInt = 2
    # Sigma above which a clock counts as noisy (shared CPU cores; devices stay far below: with 2 %
    # jitter and three peers a log ratio has 0.025, and an unlucky warm-up makes it 0.04).
    noisy_sigma: PositiveFloat = 0.05
    # Of a noisy clock, and of all ranks together, a slowdown must stand this many standard errors
    # (sigma / sqrt(steps that agree)) above health, too: the noise of hosts is not normal.
    min_sigmas: PositiveFloat = 6.0
    # An open incident closes below this slowdown, and below half of its own, held for
    # `recover_steps` steps.
    recover_slowdown: Slowdown = 1.05
    recover_steps: PositiveInt = 3
    # Steps over which the slowdown of an open incident is measured (median).
    measure_steps: PositiveInt = 5
    # Steps for which the smallest visible slowdown is stated: more show a smaller one, later.
    see_within_steps: PositiveInt = 10
    # A watch that would miss this slowdown for so long is blind, not healthy: half the speed.
    blind_slowdown: float = 2.0
    # Steps between two canaries: a made-up slow rank, in a copy, that must be found in time. While
    # one is under way (`see_within_steps` at most) judging costs twice as much. 0: none.
    canary_period_steps: NonNegativeInt = 200

    def __post_init__(self) -> None:
        reject(
            self.blind_slowdown <= self.recover_slowdown
            and "blind_slowdown: expected above recover_slowdown",
            self.history_steps < self.warmup_steps
            and "history_steps: expected at least warmup_steps",
        )
