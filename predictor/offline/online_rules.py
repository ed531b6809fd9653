"""Why the slow ranks of a recorded run were slow: the rules of live jobs on what was sampled. Pure.

The onset is the end of the step before the first slow one, on each node's own clock. As live, a
cause is looked for from a minute before it to a minute and a half after it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.predictor.causes.evidence import ThreadTime
from pacekeeper.predictor.causes.explain import explain, in_words
from pacekeeper.predictor.causes.witnesses import NodeWindow, Seat, peers_of, symptoms_of
from pacekeeper.predictor.cost.features import Flags
from pacekeeper.predictor.offline.trace import NodeSamples, ThreadTable, Trace
from pacekeeper.predictor.offline.verdict import Trouble, TroubleKind

BEFORE_S = 60.0
LOOK_AGAIN_S = 90.0  # after the onset


def with_causes(trace: Trace, troubles: Sequence[Trouble]) -> tuple[Trouble, ...]:
    """The troubles, those of single ranks with their cause in words; all as they are where the
    source tells nothing of threads, devices and hosts.
    """
    if trace.threads is None:
        return tuple(troubles)
    seats = {
        worker.rank: Seat(role=str(worker.stage), node=worker.node, device_uuid=worker.device_uuid)
        for worker in trace.workers
    }
    slow = [t for t in troubles if t.rank in seats and t.kind in _OF_A_RANK]
    named = [
        replace(t, cause=_cause(trace, trace.threads, seats, t, slow)) if t in slow else t
        for t in troubles
    ]
    return tuple(named)


_OF_A_RANK = (TroubleKind.COMPUTE, TroubleKind.HOST)


def _cause(
    trace: Trace,
    table: ThreadTable,
    seats: dict[int, Seat],
    trouble: Trouble,
    slow: Sequence[Trouble],
) -> str:
    assert trouble.rank is not None
    last = np.inf if trouble.last_step is None else trouble.last_step
    during = (table.step >= trouble.first_step) & (table.step <= last)
    alive = set(np.unique(table.rank[during]).tolist())
    suspects = {t.rank for t in slow if _overlap(t, trouble)}
    peers = peers_of(
        seats[trouble.rank],
        ((rank, seats[rank]) for rank in sorted(alive - suspects) if rank in seats),
    )
    involved = {trouble.rank, *peers}
    nodes: dict[str, NodeWindow] = {}
    for samples in trace.samples:
        own = np.isin(table.rank, [rank for rank in involved if seats[rank].node == samples.node])
        window = _window(samples, table, own, during, trouble.first_step)
        if window is not None:
            nodes[samples.node] = window
            recent = table.ended_s <= window.onset_s + LOOK_AGAIN_S
            during = during & (~own | recent | ~np.isfinite(table.ended_s))
    threads = {
        rank: time for rank in involved if (time := _thread(table, during & (table.rank == rank)))
    }
    symptoms = symptoms_of(
        trouble.rank, peers, seats=seats, nodes=nodes, threads=threads, slowdown=trouble.slowdown
    )
    return in_words(explain(symptoms))


def _overlap(one: Trouble, other: Trouble) -> bool:
    """In time; a trouble without a last step lasts."""
    ends = [np.inf if t.last_step is None else t.last_step for t in (one, other)]
    return bool(one.first_step <= ends[1] and other.first_step <= ends[0])


def _window(
    samples: NodeSamples, table: ThreadTable, own: Flags, during: Flags, first_step: int
) -> NodeWindow | None:
    """The node's samples around the onset; None where no rank told the time of its steps there."""
    before = own & (table.step < first_step) & np.isfinite(table.ended_s)
    after = own & during & np.isfinite(table.ended_s)
    if before.any():
        onset_s = float(table.ended_s[before].max())
    elif after.any():
        onset_s = float(table.ended_s[after].min())  # slow from the first step told
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


def _thread(table: ThreadTable, rows: Flags) -> ThreadTime | None:
    """Where a rank's thread spent these steps, all together; what a step does not tell is None."""
    if not rows.any():
        return None
    sums = [float(column[rows].sum()) for column in (table.run_queue_s, table.stall_s)]
    run_queue_s, stall_s = (None if np.isnan(value) else value for value in sums)
    return ThreadTime(
        compute_s=float(table.compute_s[rows].sum()), run_queue_s=run_queue_s, stall_s=stall_s
    )
