"""Work that is spread unevenly, and what that costs: advice, never a fault of a device.

The cost is found by replaying the run with the work made even and all else as recorded; without a
timeline, by the busiest rank of each step. Pure.
"""

from dataclasses import dataclass, replace
from math import comb

import numpy as np
from scipy.stats import t as student

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.imbalance.experts import expert_spread, load_excess
from pacekeeper.predictor.imbalance.stages_and_microbatches import (
    ComputeRows,
    compute_rows,
    even_known,
    even_stages,
    even_work,
    shared_work,
)
from pacekeeper.predictor.imbalance.what_if import Replay, replay_of
from pacekeeper.predictor.offline.anomalies import Anomaly, AnomalyKind, WhatIf
from pacekeeper.predictor.offline.trace import ComputeTable, OpType, Trace, compute_of
from pacekeeper.predictor.stats.group_ids import grouped

WORTH_NAMING = 1.03  # the least cost that the authors of the what-if analysis look into
CONFIDENCE = 0.95
LEAST_STEPS = 3  # for an interval
REPLAYED_STEPS = 8  # or half of the run: fewer say less than the busiest ranks of all steps
CHANCE = 1e-3  # that unrelated noise passes for work: 1 of 1,000 runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """A run's computes, and how its step times follow from them."""

    rows: ComputeRows
    work: Array  # [rows, (tokens, sum of squared lengths, expert rows)], NaN where unknown
    replay: Replay | None
    experts: ComputeTable | None  # not part of the rows, as long as there is no timeline

    def step_times(self, factors: Array, expert_factors: Array) -> Array:
        """Step times [steps] if each compute took `factors` [rows] times as long, each expert
        layer `expert_factors` [rows of `experts`] times.
        """
        if self.replay is None:
            return self._busiest(self.rows.compute_s * factors, expert_factors)
        ops = self.replay.ops
        of_row = np.ones(len(ops.op))
        computes = np.flatnonzero(np.isin(ops.op, (OpType.FORWARD, OpType.BACKWARD)))
        of_row[computes[self.rows.kept]] = factors
        times_s = [
            graph.duration_s((graph.own_s * of_row[graph.rows])[:, None])[0]
            for graph in self.replay.graphs
        ]
        return np.array(times_s)

    def _busiest(self, compute_s: Array, expert_factors: Array) -> Array:
        """Compute time of the busiest rank in each step [steps]."""
        step, rank = self.rows.step, self.rows.rank
        if self.experts is not None:
            step = np.concatenate([step, self.experts.step])
            rank = np.concatenate([rank, self.experts.rank])
            expert_s = np.nan_to_num(self.experts.compute_s * expert_factors)
            compute_s = np.concatenate([compute_s, expert_s])
        (step, steps), (rank, ranks) = grouped(step), grouped(rank)
        shape = len(steps), len(ranks)
        busy = np.bincount(step * shape[1] + rank, compute_s, minlength=shape[0] * shape[1])
        busiest: Array = busy.reshape(shape).max(axis=1)
        return busiest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Suspect:
    """An imbalance that may be there: factors would make the work even."""

    kind: AnomalyKind
    reason: str
    factors: Array | None = None
    expert_factors: Array | None = None
    tier: Tier = Tier.PROBABLE
    stage: int | None = None


def imbalances(
    trace: Trace, what_if: WhatIf | None, *, replay: Replay | None = None
) -> tuple[Anomaly, ...]:
    """Uneven work in a trace, the costliest first; each costs 3 % or more with 95 % confidence.

    `what_if` (and `replay`, to save its making): of the same trace, None where it has no timeline;
    then costs are those of the busiest rank. Faults are left as they are. Where imbalances hide
    each other, each gets its mean share (Shapley value of the log of the step time): the shares
    multiply to the whole.
    """
    compute = trace.compute if trace.ops is None else compute_of(trace.ops)
    if compute is None:
        return _uneven_loads(trace)
    rows = compute_rows(compute, trace.workers)
    if len(np.unique(rows.step)) < LEAST_STEPS:
        return ()
    if what_if is not None:
        replay = replay or replay_of(trace)
    run = _Run(
        rows=rows,
        work=_work_of(trace, rows),
        replay=replay if replay is not None and _stands_for(replay, rows) else None,
        experts=trace.expert_compute,
    )
    found = [_sequence_imbalance(run), _expert_imbalance(run, trace)]
    suspects = [suspect for suspect in found if suspect is not None]
    if (heavy := _stage_imbalance(_without_known_work(run, suspects))) is not None:
        suspects.append(heavy)
    costs = _costs(run, suspects)
    anomalies = [
        Anomaly(
            kind=suspect.kind,
            rank=None,
            stage=suspect.stage,
            slowdown=slowdown,
            low=low,
            high=high,
            first_step=int(rows.step.min()),
            tier=suspect.tier,
            reason=suspect.reason,
        )
        for suspect, (slowdown, low, high) in zip(suspects, costs, strict=True)
        if low >= WORTH_NAMING
    ]
    return tuple(sorted(anomalies, key=lambda anomaly: -anomaly.slowdown))


def _stands_for(replay: Replay, rows: ComputeRows) -> bool:
    """Are enough of the steps whole, so that what they cost is told by their timelines?"""
    num_steps = len(np.unique(rows.step))
    return len(replay.graphs) >= min(REPLAYED_STEPS, num_steps / 2)


def _uneven_loads(trace: Trace) -> tuple[Anomaly, ...]:
    """Experts' loads without any times: how much longer the expert layers must take."""
    loads = trace.expert_loads
    if loads is None:
        return ()
    excess = load_excess(loads)
    if len(excess) < LEAST_STEPS:
        return ()
    mean, reach = float(excess.mean()), _reach(excess)
    if mean - reach < WORTH_NAMING:
        return ()
    reason = (
        f"a layer's busiest expert gets {mean:.1f} times the mean rows: the slowdown of the "
        "expert layers if each expert has one rank to itself; nothing was timed"
    )
    return (
        Anomaly(
            kind=AnomalyKind.EXPERT_IMBALANCE,
            rank=None,
            stage=None,
            slowdown=mean,
            low=mean - reach,
            high=mean + reach,
            first_step=int(loads.step.min()),
            tier=Tier.SUSPECTED,
            reason=reason,
        ),
    )


def _reach(values: Array) -> float:
    """Half the confidence interval of the mean of independent steps."""
    free = len(values) - 1
    if free < 1:
        return float("inf")
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, free))
    return quantile * float(values.std(ddof=1)) / float(np.sqrt(len(values)))


def _without_known_work(run: _Run, suspects: list[_Suspect]) -> _Run:
    """The run with the work that its source tells made even: what is left may be the stages'."""
    compute_s = run.rows.compute_s
    for suspect in suspects:
        if suspect.factors is not None and np.isfinite(run.work[:, :2]).all():
            compute_s = compute_s * suspect.factors
    return replace(run, rows=replace(run.rows, compute_s=compute_s))


def _stage_imbalance(run: _Run) -> _Suspect | None:
    if run.rows.num_stages < 2:
        return None
    factors, heaviness = even_stages(run.rows)
    if not heaviness:
        return None
    heaviest = max(heaviness, key=lambda stage: heaviness[stage])
    alone = run.rows.num_dps == 1
    reason = (
        f"stage {heaviest} has {heaviness[heaviest]:.2f} times the mean work of the stages, on "
        f"{'its one rank' if alone else 'most of its ranks'}: spread the layers evenly"
    )
    if alone:
        reason += "; a device that is slow throughout would look the same"
    return _Suspect(
        kind=AnomalyKind.STAGE_IMBALANCE,
        factors=factors,
        stage=heaviest,
        tier=Tier.SUSPECTED if alone else Tier.PROBABLE,
        reason=reason,
    )


def _sequence_imbalance(run: _Run) -> _Suspect | None:
    if np.isfinite(run.work[:, :2]).all():
        known = even_known(run.rows, np.nan_to_num(run.work), [0, 1])
        return (
            known
            if known is None
            else _Suspect(
                kind=AnomalyKind.SEQUENCE_IMBALANCE,
                factors=known,
                reason="micro-batches of a step differ in tokens and lengths, and times follow: "
                "re-spread the sequences",
            )
        )
    shared = shared_work(run.rows)
    if shared is None or shared.p_value > CHANCE:
        return None
    by_stages = run.rows.num_stages > 1
    witnesses = "stages" if by_stages else "forward and backward"
    return _Suspect(
        kind=AnomalyKind.SEQUENCE_IMBALANCE,
        factors=even_work(run.rows, shared.log_work),
        tier=Tier.PROBABLE if by_stages else Tier.SUSPECTED,
        reason=f"{witnesses} agree on which micro-batches are long (correlation "
        f"{shared.correlation:.2f} within a dp rank's step): re-spread the sequences",
    )


def _expert_imbalance(run: _Run, trace: Trace) -> _Suspect | None:
    if np.isfinite(run.work).all():
        known = even_known(run.rows, run.work, [2])
        return (
            known
            if known is None
            else _Suspect(
                kind=AnomalyKind.EXPERT_IMBALANCE,
                factors=known,
                reason="ranks of a step differ in the rows of their experts, and times follow: "
                "place the busy experts' replicas anew",
            )
        )
    if trace.expert_compute is None or run.replay is not None:
        return None
    spread = expert_spread(trace.expert_compute, trace.workers, trace.groups)
    if spread is None or spread.p_value > CHANCE:
        return None
    return _Suspect(
        kind=AnomalyKind.EXPERT_IMBALANCE,
        expert_factors=spread.factors,
        reason=f"{spread.num_groups} groups of different devices agree on which expert layers are "
        f"slow in which steps (correlation {spread.correlation:.2f}, beside the other layers): "
        "routing; this much, or more, above the evenest steps: place the busy experts' replicas "
        "anew",
    )


def _costs(run: _Run, suspects: list[_Suspect]) -> list[tuple[float, float, float]]:
    """Of each suspect: step time over that without it, with its confidence interval over steps."""
    count = len(suspects)
    times_s = {}
    for mended in range(1 << count):
        factors = np.ones(len(run.rows.step))
        expert_factors = np.ones(0 if run.experts is None else len(run.experts.step))
        for at, suspect in enumerate(suspects):
            if mended >> at & 1 and suspect.factors is not None:
                factors = factors * suspect.factors
            if mended >> at & 1 and suspect.expert_factors is not None:
                expert_factors = expert_factors * suspect.expert_factors
        times_s[mended] = run.step_times(factors, expert_factors)
    costs = []
    for at in range(count):
        others = [mended for mended in times_s if not mended >> at & 1]
        log_cost, errors = 0.0, np.zeros(len(times_s[0]))
        for mended in others:
            size = mended.bit_count()
            weight = 1.0 / (count * comb(count - 1, size))
            upper, lower = times_s[mended], times_s[mended | 1 << at]
            log_cost += weight * float(np.log(upper.mean() / lower.mean()))
            errors += weight * (upper / upper.mean() - lower / lower.mean())
        reach = _reach(errors)
        low, high = np.exp(log_cost - reach), np.exp(min(log_cost + reach, 700.0))
        costs.append((float(np.exp(log_cost)), float(low), float(high)))
    return costs


def _work_of(trace: Trace, rows: ComputeRows) -> Array:
    """What the source tells of each row's work: columns of `trace.compute`, NaN where unknown."""
    table = trace.compute
    if table is None or len(table.step) <= (rows.kept.max() if len(rows.kept) else -1):
        return np.full((len(rows.kept), 3), np.nan)
    columns = (table.tokens, table.sum_len_squared, table.expert_rows)
    return np.stack([column[rows.kept] for column in columns], axis=1)
