"""Outcomes of several seeds in one row per policy: rates with their confidence, uses of time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.simulator.cluster.history import History
from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.policies.base import Use

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over seeds; `_95`: half the width of the 95 % interval of the mean (Student's), None
    of one seed, which does not tell. `ratio`: of the first policy's samples on the same seed; 0
    where it has none. `fluid`: of the samples of all nodes that were there, at full pace all the
    time. `spent`: parts of the time, adding up to 1. `needless_restarts` of all seeds.
    """

    policy: str
    num_seeds: int
    samples: float
    samples_per_s: float
    samples_per_s_95: float | None
    ratio: float
    ratio_95: float | None
    fluid: float
    fluid_95: float | None
    restarts: float
    needless_restarts: int
    reconfigurations: float
    copied_bytes: float
    spent: dict[Use, float]


def summarize(found: Mapping[str, Sequence[SimulationResult]]) -> tuple[Summary, ...]:
    """One for each policy, in their order; each with as many outcomes."""
    base = next(iter(found.values()))
    return tuple(_summary(name, outcomes, base) for name, outcomes in found.items())


def with_interval(half_width: float | None, mean: float, form: str) -> str:
    """A mean and its interval, if that is known, both in this form."""
    return f"{mean:{form}}" + ("" if half_width is None else f" +- {half_width:{form}}")


def rates(outcome: SimulationResult, num_windows: int) -> list[tuple[float, float]]:
    """(middle of a window in seconds, samples trained per second in it), rolled back ones too."""
    edges = np.linspace(0.0, outcome.duration_s, num_windows + 1)
    times = np.array([at_s for at_s, _ in outcome.points])
    gained = np.maximum(np.diff([samples for _, samples in outcome.points]), 0.0)
    trained = np.concatenate([[0.0], np.cumsum(gained)])
    at_edges = np.interp(edges, times, trained)
    rate = np.diff(at_edges) / np.diff(edges)
    return list(zip(((edges[1:] + edges[:-1]) / 2.0).tolist(), rate.tolist(), strict=True))


def mean_pace(history: History, num_windows: int) -> list[float]:
    """Nodes that are there, each as its speed, in the mean of each window as of `rates`."""
    steps = (*history.pace(), (history.duration_s, 0.0))
    times = np.array([at_s for at_s, _ in steps])
    pace = np.array([speed for _, speed in steps])
    node_s: Array = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(times))])
    edges = np.linspace(0.0, history.duration_s, num_windows + 1)
    means: list[float] = (np.diff(np.interp(edges, times, node_s)) / np.diff(edges)).tolist()
    return means


def _summary(
    name: str, outcomes: Sequence[SimulationResult], base: Sequence[SimulationResult]
) -> Summary:
    rate, rate_95 = _mean([o.samples_per_s for o in outcomes])
    pairs = list(zip(outcomes, base, strict=True))
    ratio, ratio_95 = _mean([_part(o.samples, b.samples) for o, b in pairs])
    fluid, fluid_95 = _mean([_part(o.samples, o.fluid_samples) for o in outcomes])
    return Summary(
        policy=name,
        num_seeds=len(outcomes),
        samples=_mean([o.samples for o in outcomes])[0],
        samples_per_s=rate,
        samples_per_s_95=rate_95,
        ratio=ratio,
        ratio_95=ratio_95,
        fluid=fluid,
        fluid_95=fluid_95,
        restarts=_mean([o.restarts for o in outcomes])[0],
        needless_restarts=sum(o.needless_restarts for o in outcomes),
        reconfigurations=_mean([o.reconfigurations for o in outcomes])[0],
        copied_bytes=_mean([o.copied_bytes for o in outcomes])[0],
        spent={use: _mean([o.spent_s[use] / o.duration_s for o in outcomes])[0] for use in Use},
    )


def _part(samples: float, whole: float) -> float:
    return samples / whole if whole > 0.0 else 0.0


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    from scipy.stats import t  # slow to import: not at start-up

    if len(values) < 2:
        return float(values[0]), None
    spread = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(np.mean(values)), float(t.ppf(0.975, len(values) - 1)) * spread
