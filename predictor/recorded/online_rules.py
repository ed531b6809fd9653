"""Applies the rules of live jobs to a recorded run: causes, late inputs, slow links.

The onset is the end of the step before the first slow one, on each node's own clock. As in live
jobs, samples count from a minute before the onset to a minute and a half after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log, sqrt

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding, describe_cause
from pacekeeper.predictor.causes.evidence import NodeWindow, Seat, ThreadTime, peers_of, symptoms_of
from pacekeeper.predictor.causes.explain import examined_signals, explain, in_words
from pacekeeper.predictor.cost.features import Flags, Positions
from pacekeeper.predictor.detector.input_stall import Inputs, update_inputs
from pacekeeper.predictor.detector.state import Evidence, Judgement, begin, sigma_of
from pacekeeper.predictor.links.slow_links import transfer_sample, update_links
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.trace import (
    NodeSamples,
    OwnInputTable,
    OwnTransferTable,
    ThreadTable,
    Trace,
)
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, ratio_interval

BEFORE_S = 60.0
LOOK_AGAIN_S = 90.0  # after the onset
STILL_SLOW = 0.5  # of a slowdown: steps below are counted as recovered


def with_causes(trace: Trace, anomalies: Sequence[Anomaly]) -> tuple[Anomaly, ...]:
    """Attach a cause to the anomalies of single ranks.

    The others remain unchanged, and so do all if the source has no thread times.
    """
    if trace.threads is None:
        return tuple(anomalies)
    seats = {
        worker.rank: Seat(role=str(worker.stage), node=worker.node, device_uuid=worker.device_uuid)
        for worker in trace.workers
    }
    slow = [t for t in anomalies if t.rank in seats and t.kind in _OF_A_RANK]
    named = [
        replace(t, cause=_cause(trace, trace.threads, seats, t, slow)) if t in slow else t
        for t in anomalies
    ]
    return tuple(named)


_OF_A_RANK = (AnomalyKind.COMPUTE, AnomalyKind.HOST)


def _cause(
    trace: Trace,
    table: ThreadTable,
    seats: dict[int, Seat],
    anomaly: Anomaly,
    slow: Sequence[Anomaly],
) -> str:
    assert anomaly.rank is not None
    last = np.inf if anomaly.last_step is None else anomaly.last_step
    during = (table.step >= anomaly.first_step) & (table.step <= last)
    alive = set(np.unique(table.rank[during]).tolist())
    suspects = {t.rank for t in slow if _overlap(t, anomaly)}
    peers = peers_of(
        seats[anomaly.rank],
        ((rank, seats[rank]) for rank in sorted(alive - suspects) if rank in seats),
    )
    involved = {anomaly.rank, *peers}
    nodes: dict[str, NodeWindow] = {}
    for samples in trace.samples:
        own = np.isin(table.rank, [rank for rank in involved if seats[rank].node == samples.node])
        window = _node_window(samples, table, own, during, anomaly.first_step)
        if window is not None:
            nodes[samples.node] = window
            recent = table.ended_s <= window.onset_s + LOOK_AGAIN_S
            during = during & (~own | recent | ~np.isfinite(table.ended_s))
    threads = {
        rank: time
        for rank in involved
        if (time := _thread_time(table, during & (table.rank == rank)))
    }
    symptoms = symptoms_of(
        anomaly.rank, peers, seats=seats, nodes=nodes, threads=threads, slowdown=anomaly.slowdown
    )
    causes = explain(symptoms)
    return describe_cause(in_words(causes), *examined_signals(causes))


def _overlap(one: Anomaly, other: Anomaly) -> bool:
    """Return whether two anomalies overlap in time; one without a last step lasts to the end."""
    ends = [np.inf if t.last_step is None else t.last_step for t in (one, other)]
    return bool(one.first_step <= ends[1] and other.first_step <= ends[0])


def _node_window(
    samples: NodeSamples, table: ThreadTable, own: Flags, during: Flags, first_step: int
) -> NodeWindow | None:
    """The node's samples around the onset; None if no rank recorded the end of its steps there."""
    before = own & (table.step < first_step) & np.isfinite(table.ended_s)
    after = own & during & np.isfinite(table.ended_s)
    if before.any():
        onset_s = float(table.ended_s[before].max())
    elif after.any():
        onset_s = float(table.ended_s[after].min())  # slow from the first recorded step
    else:
        return None
    ended_s = float(table.ended_s[after].max()) if after.any() else onset_s
    until_s = min(ended_s, onset_s + LOOK_AGAIN_S)

    def is_near(sampled_s: float) -> bool:
        return onset_s - BEFORE_S <= sampled_s <= until_s

    return NodeWindow(
        onset_s=onset_s,
        devices={
            uuid: [s for s in own_samples if is_near(s.sampled_s)]
            for uuid, own_samples in samples.devices.items()
        },
        host=[s for s in samples.host if is_near(s.sampled_s)],
        pids=samples.pids,
    )


def _thread_time(table: ThreadTable, rows: Flags) -> ThreadTime | None:
    """Sums over a rank's steps of its thread's times; None for a time that a step lacks."""
    if not rows.any():
        return None
    sums = [float(column[rows].sum()) for column in (table.run_queue_s, table.stall_s)]
    run_queue_s, stall_s = (None if np.isnan(value) else value for value in sums)
    return ThreadTime(
        compute_s=float(table.compute_s[rows].sum()), run_queue_s=run_queue_s, stall_s=stall_s
    )


def slow_inputs(trace: Trace) -> tuple[Anomaly, ...]:
    """Return ranks with late input, and stretches in which all inputs were late, as detected.

    () if no rank reports input waits. As in live jobs, a step in which a rank does not report its
    wait is skipped.
    """
    table = trace.own_inputs
    if table is None:
        return ()
    inputs, judgements = Inputs(), list[Judgement]()
    for step, rows in _steps_of(table):
        inputs, judgement = update_inputs(
            DetectorConfig(),
            inputs,
            step=step,
            generation=trace.generation_at(step),
            ranks=table.rank[rows].tolist(),
            duration_s=table.duration_s[rows],
            input_s=table.input_s[rows],
        )
        if judgement is not None:
            judgements.append(judgement)
    return _anomalies(trace, AnomalyKind.HOST, judgements, inputs.evidence)


def slow_links(trace: Trace) -> tuple[Anomaly, ...]:
    """Return ranks with slow links, in order of detection; () without transfer times per rank.

    As in live jobs, a step in which a rank does not report its transfers is skipped.
    """
    table = trace.own_transfers
    if table is None:
        return ()
    node_of = {worker.rank: worker.node for worker in trace.workers}
    evidence, judgements = begin(), list[Judgement]()
    for step, rows in _steps_of(table):
        ranks = table.rank[rows].tolist()
        sample = transfer_sample(
            step, trace.generation_at(step), ranks, table.transfer_s[rows], table.num_bytes[rows]
        )
        if sample is not None:
            evidence, judgement = update_links(DetectorConfig(), evidence, sample, node_of)
            judgements.append(judgement)
    return _anomalies(trace, AnomalyKind.LINK, judgements, evidence)


def _steps_of(table: OwnInputTable | OwnTransferTable) -> Iterator[tuple[int, Positions]]:
    """Yield each step of the table with the positions of its rows; steps and ranks ascend."""
    order = np.lexsort((table.rank, table.step))
    steps, first = np.unique(table.step[order], return_index=True)
    yield from zip(steps.tolist(), np.split(order, first[1:]), strict=True)


def _anomalies(
    trace: Trace, kind: AnomalyKind, judgements: Sequence[Judgement], evidence: Evidence
) -> tuple[Anomaly, ...]:
    """Return the anomalies of the findings in these judgements, in order of detection."""
    found, ends, at = list[Finding](), dict[int, int](), dict[int | None, int]()
    for judgement in judgements:
        common = judgement.common
        for finding in (*judgement.findings, *([common.found] if common.found else [])):
            at[finding.rank] = len(found)
            found.append(finding)
        for rank in (*judgement.recovered, *([None] if common.is_over else [])):
            ends[at.pop(rank)] = judgement.step
    if not found:
        return ()
    sigma = sigma_of(DetectorConfig(), evidence)
    stages: dict[int | None, int] = {worker.rank: worker.stage for worker in trace.workers}
    measured = [_measured(one, ends.get(i), judgements, sigma) for i, one in enumerate(found)]
    return tuple(replace(one, kind=kind, stage=stages.get(one.rank)) for one in measured)


def _measured(
    finding: Finding, closed_step: int | None, judgements: Sequence[Judgement], sigma: float
) -> Anomaly:
    """Return the anomaly of a finding, with the median slowdown of its steps.

    The slowdown is relative to the level before the onset: of the rank beside the median of the
    others, or of the median of all ranks. Steps at the end in which it had recovered, but the
    detector had not closed it yet, are left out. `sigma`: of the log ratio of one step.
    """
    rank, before, steps, levels = finding.rank, list[float](), list[int](), list[float]()
    for judgement in judgements:
        if not judgement.expected_s or not (rank is None or rank in judgement.ranks):
            continue
        late = np.log(np.divide(judgement.observed_s, judgement.expected_s))
        level = float(np.median(late))
        if rank is not None:
            i = judgement.ranks.index(rank)
            level = float(late[i] - np.median(np.delete(late, i))) if len(late) > 1 else 0.0
        if judgement.step < finding.onset_step:
            before.append(level)
        elif closed_step is None or judgement.step <= closed_step:
            steps.append(judgement.step)
            levels.append(level)
    ratios = np.array(levels) - (np.median(before) if before else 0.0)
    count, last_step, until = len(ratios), None, "to the end of the record"
    if closed_step is not None:
        is_slow = np.flatnonzero(ratios > STILL_SLOW * log(finding.slowdown))
        count = int(is_slow[-1]) + 1 if len(is_slow) else count
        last_step = steps[count - 1]
        until = f"to step {last_step}, and recovered"
    level, error = float(np.median(ratios[:count])), MEDIAN_ERROR * sigma / sqrt(count)
    slowdown, low, high = ratio_interval(level, error)
    return Anomaly(
        kind=AnomalyKind.HOST,
        rank=rank,
        stage=None,
        slowdown=slowdown,
        low=low,
        high=high,
        first_step=finding.onset_step,
        last_step=last_step,
        tier=finding.tier,
        reason=f"{finding.reason}; x{slowdown:.2f} over {count} steps, {until}",
    )
