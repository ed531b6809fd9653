"""Applies the rules of live jobs to a recorded run: causes, late inputs, slow links.

The onset is the end of the step before the first slow one, on each node's own clock. As in live
jobs, samples count from a minute before the onset to a minute and a half after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import describe_cause
from pacekeeper.predictor.causes.evidence import NodeWindow, Seat, ThreadTime, peers_of, symptoms_of
from pacekeeper.predictor.causes.explain import examined_signals, explain, in_words
from pacekeeper.predictor.cost.features import Flags, StepSample
from pacekeeper.predictor.cost.model import log_ratios
from pacekeeper.predictor.detector.input_stall import Inputs, update_inputs
from pacekeeper.predictor.detector.state import Evidence, Judgement, begin, model_of, sigma_of
from pacekeeper.predictor.links.slow_links import transfer_sample, update_links
from pacekeeper.predictor.recorded.anomalies import (
    Anomaly,
    AnomalyKind,
    Episode,
    anomaly_of,
    episodes_of,
    steps_of,
)
from pacekeeper.predictor.recorded.trace import (
    NodeSamples,
    OwnInputTable,
    OwnTransferTable,
    ThreadTable,
    Trace,
)

BEFORE_S = 60.0
LOOK_AGAIN_S = 90.0  # after the onset


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
    config = DetectorConfig()
    inputs, judgements = _run_input_detector(config, trace, table)
    episodes = episodes_of(judgements)
    if not episodes:
        return ()
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    sigma = sigma_of(config, inputs.evidence)
    for episode in episodes:
        _record_input_ratios(episode, judgements)
    return tuple(anomaly_of(one, AnomalyKind.HOST, stage_of, sigma) for one in episodes)


def _run_input_detector(
    config: DetectorConfig, trace: Trace, table: OwnInputTable
) -> tuple[Inputs, list[Judgement]]:
    inputs, judgements = Inputs(), list[Judgement]()
    for step, rows in steps_of(table):
        inputs, judgement = update_inputs(
            config,
            inputs,
            step=step,
            generation=trace.generation_at(step),
            ranks=table.rank[rows].tolist(),
            duration_s=table.duration_s[rows],
            input_s=table.input_s[rows],
        )
        if judgement is not None:
            judgements.append(judgement)
    return inputs, judgements


def _record_input_ratios(episode: Episode, judgements: list[Judgement]) -> None:
    """Record the log ratios of an episode's steps.

    For a rank: the step time implied by its wait over that implied by the others' median wait. For
    all ranks together: the median over its level before the onset.
    """
    rank, before = episode.finding.rank, [0.0]
    for judgement in judgements:
        waits = np.log(judgement.observed_s)
        if rank is None:
            level = float(np.median(waits))
            if judgement.step < episode.finding.onset_step:
                before.append(level)
                continue
            ratio = level - float(np.median(before[1:] or before))
        elif rank in judgement.ranks:
            at = judgement.ranks.index(rank)
            ratio = float(waits[at] - np.median(np.delete(waits, at))) if len(waits) > 1 else 0.0
        else:
            continue
        if episode.holds(judgement.step):
            episode.steps.append(judgement.step)
            episode.ratios.append(ratio)


def slow_links(trace: Trace) -> tuple[Anomaly, ...]:
    """Return ranks with slow links, in order of detection; () without transfer times per rank.

    As in live jobs, a step in which a rank does not report its transfers is skipped.
    """
    config = DetectorConfig()
    table = trace.own_transfers
    if table is None:
        return ()
    node_of = {worker.rank: worker.node for worker in trace.workers}
    evidence, episodes = _run_link_detector(config, trace, table, node_of)
    if not episodes:
        return ()
    _record_link_ratios(evidence, _transfer_samples(trace, table), episodes)
    stage_of = {worker.rank: worker.stage for worker in trace.workers}
    sigma = sigma_of(config, evidence)
    return tuple(anomaly_of(episode, AnomalyKind.LINK, stage_of, sigma) for episode in episodes)


def _run_link_detector(
    config: DetectorConfig, trace: Trace, table: OwnTransferTable, node_of: Mapping[int, str]
) -> tuple[Evidence, list[Episode]]:
    evidence, judgements = begin(), list[Judgement]()
    for sample in _transfer_samples(trace, table):
        evidence, judgement = update_links(config, evidence, sample, node_of)
        judgements.append(judgement)
    return evidence, episodes_of(judgements)


def _transfer_samples(trace: Trace, table: OwnTransferTable) -> Iterator[StepSample]:
    """Yield the transfers of the steps in which all ranks that finished them reported theirs."""
    for step, rows in steps_of(table):
        sample = transfer_sample(
            step,
            trace.generation_at(step),
            table.rank[rows].tolist(),
            table.transfer_s[rows],
            table.num_bytes[rows],
        )
        if sample is not None:
            yield sample


def _record_link_ratios(
    evidence: Evidence, samples: Iterator[StepSample], episodes: Sequence[Episode]
) -> None:
    """Record the log ratios of the episodes' steps.

    For a rank: relative to its healthy peers. For all ranks together: relative to their healthy
    level.
    """
    model, charts = model_of(evidence), evidence.charts
    own_pace = dict(zip(charts.ranks, charts.baseline.tolist(), strict=True))
    for sample in samples:
        held = [episode for episode in episodes if episode.holds(sample.step)]
        if not held:
            continue
        slow = {episode.finding.rank for episode in held if episode.finding.rank is not None}
        ratios = log_ratios(model, sample, slow)
        for episode in held:
            rank = episode.finding.rank
            if rank is None and evidence.common is not None:
                late = np.log(sample.observed_s / model.expected_s(sample.features))
                ratio = float(np.median(late)) - evidence.common.reference
            elif rank in sample.ranks:
                ratio = float(ratios[sample.ranks.index(rank)]) - own_pace.get(rank, 0.0)
            else:
                continue
            episode.steps.append(sample.step)
            episode.ratios.append(ratio)
