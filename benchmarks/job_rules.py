"""The rules of others on step times of a whole job: how often each would call it slow.

Those that compare ranks can say nothing of a single series and are not here. ResiHP's gate asks
what a step should take: the median of the other runs at that step, the best that is to be had.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.baselines import Greyhound, NvrxIndividual, ResiHp, Rule, ScoutTemporal
from benchmarks.step_runs import Run
from pacekeeper.predictor.cost.features import Array, Flags

SKIPPED_STEPS = 20  # the first steps of a run compile and fill caches
NO_RANK_RULES = ("nvrx", "nvrx by role", "sniff test", "dlrover")

# Steps [steps] in which a rule calls the job slow; None where it lacks what it asks for.
JobRule = Callable[[Run, Array], Flags | None]


def above_the_beginning(run: Run, took_s: Array) -> Flags:
    """A mean of 50 steps above 1.10 x the mean of the first 200."""
    means = np.convolve(took_s, np.ones(50) / 50, "valid")
    return _ended(took_s, means > 1.10 * took_s[:200].mean())


def above_the_window_before(run: Run, took_s: Array) -> Flags:
    """A window of 50 steps above 1.10 x the window before it."""
    means = took_s[: took_s.size // 50 * 50].reshape(-1, 50).mean(axis=1)
    is_above = np.zeros(took_s.size, dtype=np.bool_)
    windows = 1 + np.flatnonzero(means[1:] > 1.10 * means[:-1])
    is_above[50 * (windows + 1) - 1] = True  # known at its end
    return is_above


def _ended(took_s: Array, windows: Flags) -> Flags:
    """Flags of windows as flags of the steps that end them."""
    return np.concatenate([np.zeros(took_s.size - windows.size, dtype=np.bool_), windows])


def greyhound(run: Run, took_s: Array) -> Flags:
    """The change point with its floor of 10 %; who is slow is not asked."""
    everything = np.ones(took_s.size, dtype=np.bool_)
    return _any(Greyhound().slow_steps(took_s, everything))


def resihp(run: Run, took_s: Array) -> Flags | None:
    """The same change point behind the gate."""
    expected_s = _expected(run)
    if expected_s is None:
        return None
    rule = ResiHp()
    is_followed = took_s > rule.gate * expected_s[: took_s.size]
    return _any(rule.detector.slow_steps(took_s, is_followed))


def _any(slow: list[list[int]]) -> Flags:
    return np.array([bool(steps) for steps in slow], dtype=np.bool_)


def _expected(run: Run) -> Array | None:
    """The other runs' median time of each step after the skipped ones."""
    assert run.trace.steps is not None
    step = run.trace.steps.step[SKIPPED_STEPS:]
    paces = [
        np.interp(step, other.steps.step, other.steps.duration_s)
        for other in run.replicates
        if other.steps is not None and other.steps.step.size
    ]
    return np.median(paces, axis=0) if paces else None


def _alone(rule: Rule) -> JobRule:
    """A rule that looks at each rank's own past, with the job as its one rank."""

    def judged(run: Run, took_s: Array) -> Flags:
        return rule.flags(took_s[:, None], [0])[:, 0]

    return judged


JOB_RULES: dict[str, JobRule] = {
    "any 50 steps > 1.10 x the first 200": above_the_beginning,
    "50 steps > 1.10 x the 50 before": above_the_window_before,
    "nvrx own best": _alone(NvrxIndividual()),
    "greyhound": greyhound,
    "resihp, given the other runs": resihp,
    "scout temporal": _alone(ScoutTemporal()),
}


def alarms_of(rule: JobRule, run: Run, duration_s: Array) -> list[tuple[int, int]] | None:
    """[first, end) of each stretch called slow, in rows of the run; None: not asked."""
    flags = rule(run, duration_s[SKIPPED_STEPS:])
    if flags is None:
        return None
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)) + SKIPPED_STEPS
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
