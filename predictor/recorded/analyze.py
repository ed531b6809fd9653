"""Analyzes a recorded run: runs each detector on the tables that it can use."""

from collections.abc import Sequence
from dataclasses import replace

from pacekeeper.predictor.imbalance.analyze import imbalances
from pacekeeper.predictor.imbalance.what_if import replayed, what_if_of
from pacekeeper.predictor.job_level.detect import judge_job
from pacekeeper.predictor.job_level.global_slowdown import global_slowdowns
from pacekeeper.predictor.recorded.anomalies import Anomaly, TraceReport
from pacekeeper.predictor.recorded.collective_stragglers import collective_stragglers, link_faults
from pacekeeper.predictor.recorded.online_rules import slow_inputs, slow_links, with_causes
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.trace import Trace


def analyze(trace: Trace, replicates: Sequence[Trace] = ()) -> TraceReport:
    """Find what was slow in a recorded run, and what it cost.

    Ranks are judged individually if the trace has usable compute times. Otherwise the job is judged
    as a whole by its step times.

    Args:
        trace: the run.
        replicates: other runs of the same recipe, which the step times are compared with.

    Returns:
        Anomalies, the largest slowdown first, what-if costs (None without a timeline), and notes.
    """
    trace = _drop_unusable_times(trace)
    anomalies: list[Anomaly] = [*link_faults(trace), *slow_links(trace)]
    inputs = slow_inputs(trace)
    anomalies += inputs
    replay, left_out = replayed(trace)
    costs = None if replay is None else what_if_of(replay)
    notes = [*trace.notes, *left_out]
    if trace.compute is not None:
        slow = rank_faults(trace)
        named = {(anomaly.kind, anomaly.rank) for anomaly in (*slow, *inputs)}
        late = (one for one in collective_stragglers(trace) if (one.kind, one.rank) not in named)
        ranks = {anomaly.rank for anomaly in slow if anomaly.rank is not None}
        together = global_slowdowns(trace, slow=ranks)
        anomalies += [*with_causes(trace, [*slow, *late]), *together.anomalies]
        notes += together.notes
    elif trace.steps is not None:
        job = judge_job(trace, replicates=replicates, schedule=trace.steps.work_class)
        anomalies += job.anomalies
        notes += job.notes
    anomalies += imbalances(trace, replay)
    anomalies.sort(key=lambda t: (-t.slowdown, -1 if t.rank is None else t.rank))
    return TraceReport(anomalies=tuple(anomalies), what_if=costs, notes=tuple(notes))


def _drop_unusable_times(trace: Trace) -> Trace:
    """Drop a compute table without any usable row, and add a note."""
    if trace.compute is None or trace.compute.usable(w.rank for w in trace.workers).any():
        return trace
    note = "no compute time of a known rank that can be used"
    return replace(trace, compute=None, notes=(*trace.notes, note))
