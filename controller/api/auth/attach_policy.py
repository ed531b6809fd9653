"""Access control of agent streams: the interface that ingest uses, and its permissive default.

`AgentControl` calls an `AttachPolicy` at each stream and report; `AuthInterceptor` is the one that
checks. A rank belongs to the node whose agent attached it first in this run of the job, as long as
that agent is connected and the rank is alive. Runs without a number are distinguished by process
ids only, which an agent could invent: their reports are not rejected.
"""

import grpc

from pacekeeper.controller.api.auth.peer_identity import PeerIdentity
from pacekeeper.controller.api.auth.rbac import ALLOWED, AccessDecision, Principal, Role
from pacekeeper.controller.state.state import JobState, RankStatus, State
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport


class RejectedError(Exception):
    """A call or stream is rejected or ended: a status code and the reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class AttachPolicy:
    """Default policy without access control: accepts every agent and report."""

    async def authenticate(self, identity: PeerIdentity) -> Principal:
        """Identify the opener of an agent's stream. Raises RejectedError."""
        return Principal(name=Role.OPEN, role=Role.OPEN)

    def check_attach(self, principal: Principal, node: str, peer: str) -> AccessDecision:
        """Whether `principal`, calling from `peer`, may report for `node`."""
        return ALLOWED

    def check_report(self, principal: Principal, node: str, report: NodeReport) -> AccessDecision:
        """Whether a report of the agent of `node` is about ranks of that node only."""
        return ALLOWED


def find_foreign_rank(state: State, node: str, report: NodeReport) -> str:
    """Describe a rank of another node that a report mentions; empty: there is none."""
    for job in report.jobs:
        known = state.jobs.get(job.job)
        if known is not None and 0 < job.run_id == known.run_id:
            for rank in sorted(_reported_ranks(job)):
                owner = _owner(state, known, rank)
                if owner not in ("", node):
                    return f"rank {rank} of job {job.job} belongs to node {owner}"
    return ""


def _reported_ranks(job: JobReport) -> set[int]:
    ranks = {one.rank for one in job.attached} | {one.rank for one in job.records}
    return ranks.union(*(table.column("rank") for table in job.micro_batches))


def _owner(state: State, job: JobState, number: int) -> str:
    rank = job.ranks.get(number)
    if rank is None or rank.status is not RankStatus.ALIVE:
        return ""
    node = state.nodes.get(rank.node)
    return rank.node if node is not None and node.is_connected else ""
