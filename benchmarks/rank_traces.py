"""What the benchmarks of slow ranks share: cutting and slowing traces, and the rules of others.

RULES are run on the same record as ours: seconds of compute per step and rank. ResiHP's rule also
asks what the steps should take: it is given the truth, which no predictor could better.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from benchmarks.baselines import (
    DlRover,
    Greyhound,
    NvrxIndividual,
    NvrxRelative,
    ResiHp,
    Rule,
    ScoutTemporal,
    SniffTest,
)
from benchmarks.recorded_as_live import accused_live
from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.trace import ComputeTable, Trace

OURS = "pacekeeper"
LIVE = "pacekeeper live"  # the detector of running jobs on the same record, without hindsight
RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        NvrxRelative(),
        NvrxRelative(name="nvrx by role", by_role=True),
        NvrxIndividual(),
        Greyhound(),
        ResiHp(),
        SniffTest(),
        ScoutTemporal(),
        DlRover(),
    )
}
PLAYED = (OURS, LIVE, *RULES)


def compute(trace: Trace) -> ComputeTable:
    assert trace.compute is not None
    return trace.compute


def steps_of(trace: Trace) -> Positions:
    return np.unique(compute(trace).step)


def only(trace: Trace, kept: Flags) -> Trace:
    """The trace with these rows of its compute table and no timeline."""
    table = compute(trace)
    rows = {name: getattr(table, name)[kept] for name in ComputeTable.__slots__}
    return replace(trace, compute=ComputeTable(**rows), ops=None)


def until(trace: Trace, last_step: int) -> Trace:
    """What was recorded up to and with `last_step`: what a detector has seen by then."""
    return only(trace, compute(trace).step <= last_step)


def slowed(trace: Trace, rank: int, first_step: int, factor: float, *, every: int = 1) -> Trace:
    """The rank's compute times multiplied from this step on, in one of `every` steps."""
    table = compute(trace)
    since = table.step - first_step
    hit = (table.rank == rank) & (since >= 0) & (since % every == 0)
    return replace(
        trace, compute=replace(table, compute_s=np.where(hit, factor, 1.0) * table.compute_s)
    )


def matrix(trace: Trace) -> tuple[Array, list[int], list[int]]:
    """(compute seconds [steps, ranks], their stages, the ranks); steps that lack one left out."""
    table = compute(trace)
    ranks, rank = np.unique(table.rank, return_inverse=True)
    steps, step = np.unique(table.step, return_inverse=True)
    seconds = np.zeros((len(steps), len(ranks)))
    np.add.at(seconds, (step, rank), table.compute_s)
    stage = {worker.rank: worker.stage for worker in trace.workers}
    whole = seconds[(seconds > 0.0).all(axis=1)]
    return whole, [stage[r] for r in ranks.tolist()], ranks.tolist()


def accused(trace: Trace, rule: str = OURS, *, healthy: Trace | None = None) -> set[int]:
    """The ranks that a rule names, given all that was recorded.

    Others' rules: whom they flag in any step. healthy: the same record before it was slowed.
    """
    if rule == OURS:
        return {trouble.rank for trouble in rank_faults(trace) if trouble.rank is not None}
    if rule == LIVE:
        return accused_live(trace)
    times_s, stages, ranks = matrix(trace)
    expected_s = times_s if healthy is None else matrix(healthy)[0]
    flags = RULES[rule].flags(times_s, stages, expected_s=expected_s.max(axis=1))
    return {ranks[i] for i in np.flatnonzero(flags.any(axis=0))}


def share(hits: Collection[bool]) -> float:
    """Of hits that are True; NaN where there are none."""
    return round(sum(hits) / len(hits), 4) if hits else float("nan")
