"""Whether a report is of the node that sends it. Pure.

A rank belongs to the node whose agent attached it first in this life of the job, as long as that
agent is there and the rank lives. Lives without numbers are told apart by pids alone, which an
agent could name as it likes: of them nothing is refused.
"""

from pacekeeper.controller.state.state import JobState, RankLife, State
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport


def find_foreign_rank(state: State, node: str, report: NodeReport) -> str:
    """Which rank of another node this report speaks of, in words; empty: of none."""
    for job in report.jobs:
        known = state.jobs.get(job.job)
        if known is not None and 0 < job.life == known.life:
            for rank in sorted(_told(job)):
                owner = _owner(state, known, rank)
                if owner not in ("", node):
                    return f"rank {rank} of job {job.job} is of node {owner}"
    return ""


def _told(job: JobReport) -> set[int]:
    told = {one.rank for one in job.attached} | {one.rank for one in job.records}
    return told.union(*(table.column("rank") for table in job.micro_batches))


def _owner(state: State, job: JobState, number: int) -> str:
    rank = job.ranks.get(number)
    if rank is None or rank.life is not RankLife.ALIVE:
        return ""
    node = state.nodes.get(rank.node)
    return rank.node if node is not None and node.is_connected else ""
