"""Compares iterations of a running pipelined job with what their step program explains. Pure.

An iteration = the longest path through its chunks (`cost/iteration.py`) + what it takes beyond them
in health. Two paths, two answers. Through the *expected* chunks: what the iteration should take,
with an interval; what of it a heavy stage or uneven micro-batches cost is advice. Through the
*measured* chunks: what all ranks' computing explains, slow or not; what remains is evidence of
something that no rank computes (messages, hosts, the exchange of gradients), and it is judged by
the rules for step times of whole jobs (`online.py`), with the path as the work of the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.text import format_s
from pacekeeper.predictor.cost.iteration import IterationPaths
from pacekeeper.predictor.cost.regression import LEAST_SPREAD
from pacekeeper.predictor.detector.global_slowdown import NO_NEWS, GlobalSlowdownChange
from pacekeeper.predictor.job_level.online import (
    DEFAULT,
    JobLevelState,
    JobStep,
    update_job_level,
)
from pacekeeper.predictor.stats.robust import SIGMAS_95, robust_scale

LEARNT_STEPS = 64  # newest steps that say what an iteration takes beyond its chunks
LEAST_STEPS = 8  # before anything is predicted
WORTH_SHOWING = 0.01  # of the iteration
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """One iteration: what it took, should have taken (95 % interval), and what explains it.

    Seconds. `beyond_s`: what is usual beyond the chunks; `stages_s`, `microbatches_s`: what uneven
    work costs, `slow_s` what slower or faster computing than expected does; `unexplained_s`: the
    rest. Stages and micro-batches are numbered from 0.
    """

    step: int
    duration_s: float
    expected_s: float
    least_s: float
    most_s: float
    beyond_s: float
    stages_s: float
    microbatches_s: float
    slow_s: float
    unexplained_s: float
    heaviest_stage: int
    longest_microbatch: int

    def __str__(self) -> str:
        return "; ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield (
            f"step {self.step} took {format_s(self.duration_s)}, expected "
            f"{format_s(self.expected_s)} ({format_s(self.least_s)} to {format_s(self.most_s)}) "
            "by its schedule and work"
        )
        heavy, longest = self.heaviest_stage, self.longest_microbatch
        for seconds, text in (
            (self.stages_s, f"stage {heavy} has more work than the mean of the stages"),
            (self.microbatches_s, f"micro-batches differ in work, number {longest} has the most"),
            (self.slow_s, "ranks computed slower than expected"),
            (-self.slow_s, "ranks computed faster than expected"),
            (self.beyond_s, "messages, gradients and optimizer as usual"),
            (self.unexplained_s, "not explained by computing"),
        ):
            if seconds >= WORTH_SHOWING * self.duration_s:
                yield f"{format_s(seconds)}: {text}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterationState:
    """The state of the iterations of one layout, newest last.

    `beyond_s`: what each took beyond its measured chunks. `log_errors`: of the predictions.
    `pace`: the evidence. `newest`: None before anything is predicted.
    """

    generation: int = 0
    beyond_s: tuple[float, ...] = ()
    log_errors: tuple[float, ...] = ()
    pace: JobLevelState = field(default_factory=JobLevelState)
    newest: IterationReport | None = None


def update_iteration(
    state: IterationState,
    paths: IterationPaths,
    *,
    step: int,
    generation: int,
    duration_s: float,
    is_explained: bool,
    config: DetectorConfig = DEFAULT,
) -> tuple[IterationState, GlobalSlowdownChange]:
    """Take in one complete iteration.

    Args:
        state: of the iterations before.
        paths: the longest paths of this one.
        step: its number.
        generation: of its layout; another one is measured anew.
        duration_s: what it took.
        is_explained: an open finding of links, input or all ranks together explains what it takes
            beyond its chunks: it is shown, and is neither learnt from nor evidence.
        config: the rate of false alarms that is asked for.
    """
    if generation != state.generation:
        state = IterationState(generation=generation, pace=state.pace)
    report = None
    if len(state.beyond_s) >= LEAST_STEPS:
        report = _report(state, paths, step, duration_s)
        state = replace(state, newest=report)
    if is_explained:
        return state, NO_NEWS
    if not state.pace.is_open:
        state = replace(
            state, beyond_s=(*state.beyond_s, duration_s - paths.observed_s)[-LEARNT_STEPS:]
        )
        if report is not None:
            error = float(np.log(duration_s / report.expected_s))
            state = replace(state, log_errors=(*state.log_errors, error)[-LEARNT_STEPS:])
    pace, news = update_job_level(
        state.pace,
        JobStep(
            step=step,
            generation=generation,
            duration_s=duration_s,
            tokens=max(1, round(paths.observed_s * MICROSECONDS)),
            sum_len_squared=0,
        ),
        config,
    )
    if pace.is_open and news.found is not None:
        # What was learnt since its onset is the fault's; at least the oldest steps are kept.
        healthy = -(step - news.found.onset_step + 1)
        state = replace(
            state,
            beyond_s=state.beyond_s[:healthy] or state.beyond_s[:LEAST_STEPS],
            log_errors=state.log_errors[:healthy],
        )
        report = _report(state, paths, step, duration_s)
        state = replace(state, newest=report)
    if news.found is not None and report is not None:
        reason = (
            f"iterations take x{news.found.slowdown:.2f} of what their schedule and the measured "
            f"computing of all ranks explain, since step {news.found.onset_step}: messages, hosts "
            f"or the exchange of gradients, and no rank's computing; {report}"
        )
        news = replace(news, found=replace(news.found, reason=reason))
    return replace(state, pace=pace), news


def _report(
    state: IterationState, paths: IterationPaths, step: int, duration_s: float
) -> IterationReport:
    beyond_s = float(np.median(state.beyond_s))
    expected_s = max(paths.expected_s + beyond_s, 1e-9)
    factor = np.exp(SIGMAS_95 * max(LEAST_SPREAD, robust_scale(np.array(state.log_errors))))
    return IterationReport(
        step=step,
        duration_s=duration_s,
        expected_s=expected_s,
        least_s=expected_s / factor,
        most_s=expected_s * factor,
        beyond_s=beyond_s,
        stages_s=max(0.0, paths.expected_s - paths.even_stages_s),
        microbatches_s=max(0.0, paths.expected_s - paths.even_microbatches_s),
        slow_s=paths.observed_s - paths.expected_s,
        unexplained_s=duration_s - paths.observed_s - beyond_s,
        heaviest_stage=paths.heaviest_stage,
        longest_microbatch=paths.longest_microbatch,
    )
