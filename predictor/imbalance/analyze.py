"""Finds unevenly distributed work in a recorded run and its cost: advice, never a fault.

The cost is found by replaying the run with even work and all else as recorded; without a timeline,
from the busiest rank of each step.
"""

from dataclasses import dataclass, replace
from math import comb, prod

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
from pacekeeper.predictor.imbalance.what_if import Replay
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.trace import ComputeTable, OpType, Trace
from pacekeeper.predictor.stats.group_ids import grouped

WORTH_NAMING = 1.03  # the smallest cost examined by the authors of the what-if analysis
CONFIDENCE = 0.95
LEAST_STEPS = 3  # for an interval
REPLAYED_STEPS = 8  # or half of the run: with fewer, the busiest ranks of all steps are used
Factors = Array | float  # of compute times [rows]; 1.0: unchanged
CHANCE = 1e-3  # p-value: unrelated noise is taken for work in 1 of 1,000 runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """A run's compute rows, and the relation of step times to them."""

    rows: ComputeRows
    work: Array  # [rows, (tokens, sum of squared lengths, expert rows)], NaN where unknown
    replay: Replay | None
    experts: ComputeTable | None  # expert layers, not part of the rows; used without a timeline

    def step_times(self, factors: Factors, expert_factors: Factors) -> Array:
        """Step times [steps] with scaled compute times.

        Args:
            factors: of the compute rows.
            expert_factors: of the rows of `experts`.
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

    def _busiest(self, compute_s: Array, expert_factors: Factors) -> Array:
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
    """A possible imbalance; multiplication by its factors makes the work even."""

    kind: AnomalyKind
    reason: str
    factors: Factors = 1.0
    expert_factors: Factors = 1.0
    tier: Tier = Tier.PROBABLE
    stage: int | None = None


def imbalances(trace: Trace, replay: Replay | None) -> tuple[Anomaly, ...]:
    """Find uneven work in a trace; each costs at least 3 % of the step time with 95 % confidence.

    Faults are left as recorded. Where imbalances mask each other, each gets its mean share (Shapley
    value of the log of the step time): the slowdowns multiply to the total.

    Args:
        trace: the run.
        replay: of the same trace; None if it has no timeline: costs then follow from the busiest
            rank.

    Returns:
        Anomalies, the largest cost first.
    """
    compute = trace.compute
    if compute is None:
        return _uneven_loads(trace)
    rows = compute_rows(compute, trace.workers)
    if len(np.unique(rows.step)) < LEAST_STEPS:
        return ()
    run = _Run(
        rows=rows,
        work=_work_of(compute, rows),
        replay=replay if replay is not None and _is_representative(replay, rows) else None,
        experts=trace.expert_compute,
    )
    found = [_sequence_imbalance(run), _expert_imbalance(run, trace)]
    suspects = [suspect for suspect in found if suspect is not None]
    if (heavy := _stage_imbalance(_even_out_known_work(run, suspects))) is not None:
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


def _is_representative(replay: Replay, rows: ComputeRows) -> bool:
    """Return whether enough steps can be replayed to price the run by their timelines."""
    num_steps = len(np.unique(rows.step))
    return len(replay.graphs) >= min(REPLAYED_STEPS, num_steps / 2)


def _uneven_loads(trace: Trace) -> tuple[Anomaly, ...]:
    """Slowdown of the expert layers from the experts' loads, for a trace without any times."""
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
    """Half the width of the confidence interval of the mean of independent steps."""
    free = len(values) - 1
    if free < 1:
        return float("inf")
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, free))
    return quantile * float(values.std(ddof=1)) / float(np.sqrt(len(values)))


def _even_out_known_work(run: _Run, suspects: list[_Suspect]) -> _Run:
    """Even out the recorded work of the run, so that the rest can be attributed to stages."""
    if not np.isfinite(run.work[:, :2]).all():
        return run
    compute_s = run.rows.compute_s * prod(suspect.factors for suspect in suspects)
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
    suspect = _Suspect(
        kind=AnomalyKind.SEQUENCE_IMBALANCE,
        reason="micro-batches of a step differ in tokens and lengths, and times follow: "
        "re-spread the sequences",
    )
    if np.isfinite(run.work[:, :2]).all():
        factors = even_known(run.rows, np.nan_to_num(run.work), [0, 1])
        return None if factors is None else replace(suspect, factors=factors)
    shared = shared_work(run.rows)
    if shared is None or shared[1].p_value > CHANCE:
        return None
    log_work, found = shared
    by_stages = run.rows.num_stages > 1
    witnesses = "stages" if by_stages else "forward and backward"
    return replace(
        suspect,
        factors=even_work(run.rows, log_work),
        tier=Tier.PROBABLE if by_stages else Tier.SUSPECTED,
        reason=f"{witnesses} agree on which micro-batches are long (correlation "
        f"{found.correlation:.2f} within a dp rank's step): re-spread the sequences",
    )


def _expert_imbalance(run: _Run, trace: Trace) -> _Suspect | None:
    suspect = _Suspect(
        kind=AnomalyKind.EXPERT_IMBALANCE,
        reason="ranks of a step differ in the rows of their experts, and times follow: place the "
        "busy experts' replicas anew",
    )
    if np.isfinite(run.work).all():
        factors = even_known(run.rows, run.work, [2])
        return None if factors is None else replace(suspect, factors=factors)
    if trace.expert_compute is None or run.replay is not None:
        return None
    spread = expert_spread(trace.expert_compute, trace.workers, trace.groups)
    if spread is None or spread[1].p_value > CHANCE:
        return None
    factors, found = spread
    return replace(
        suspect,
        expert_factors=factors,
        reason=f"{found.num_views} groups of different devices agree on which expert layers are "
        f"slow in which steps (correlation {found.correlation:.2f}, beside the other layers): "
        "routing; this much, or more, above the evenest steps: place the busy experts' replicas "
        "anew",
    )


def _costs(run: _Run, suspects: list[_Suspect]) -> list[tuple[float, float, float]]:
    """Return for each suspect its slowdown with the confidence interval over steps.

    The slowdown is the step time over that without the imbalance, averaged over the subsets of the
    other suspects (Shapley value).
    """
    count = len(suspects)
    times_s = {}
    for evened in range(1 << count):
        chosen = [suspect for at, suspect in enumerate(suspects) if evened >> at & 1]
        times_s[evened] = run.step_times(
            prod(suspect.factors for suspect in chosen),
            prod(suspect.expert_factors for suspect in chosen),
        )
    costs = []
    for at in range(count):
        others = [evened for evened in times_s if not evened >> at & 1]
        log_cost, errors = 0.0, np.zeros(len(times_s[0]))
        for evened in others:
            size = evened.bit_count()
            weight = 1.0 / (count * comb(count - 1, size))
            upper, lower = times_s[evened], times_s[evened | 1 << at]
            log_cost += weight * float(np.log(upper.mean() / lower.mean()))
            errors += weight * (upper / upper.mean() - lower / lower.mean())
        reach = _reach(errors)
        low, high = np.exp(log_cost - reach), np.exp(min(log_cost + reach, 700.0))
        costs.append((float(np.exp(log_cost)), float(low), float(high)))
    return costs


def _work_of(table: ComputeTable, rows: ComputeRows) -> Array:
    """Recorded work of each row [rows, 3], NaN where unknown."""
    columns = (table.tokens, table.sum_len_squared, table.expert_rows)
    return np.stack([column[rows.kept] for column in columns], axis=1)
