"""A job of as many ranks as are asked for, eight on a node, whose nodes are killed one by one."""

from pacekeeper.controller.machine.reports import ingest_report
from pacekeeper.controller.state.events import Command
from pacekeeper.controller.state.state import JobState, RankState, RankStatus, State
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import RankExitRecord
from support.machine_driver import JOB

PER_NODE = 8
NOW_S = 100.0


def job(num_ranks: int, *, dead: int = 0) -> JobState:
    """So many ranks, eight on a node, of which the first ones are dead."""
    return JobState(
        name=JOB,
        ranks={
            rank: RankState(
                attachment=Attachment(job=JOB, rank=rank, world_size=num_ranks, pid=1000 + rank),
                node=f"node-{rank // PER_NODE:04d}",
                status=RankStatus.DEAD if rank < dead else RankStatus.ALIVE,
            )
            for rank in range(num_ranks)
        },
    )


def killed(state: State, node: int) -> tuple[State, list[Command]]:
    """All ranks of a node end by SIGTERM, and its agent says so."""
    records = tuple(
        RankExitRecord(rank=rank, pid=1000 + rank, exit_code=0, signal=15)
        for rank in range(node * PER_NODE, (node + 1) * PER_NODE)
    )
    report = JobReport(job=JOB, records=records)
    return ingest_report(state, f"node-{node:04d}", report, NOW_S)
