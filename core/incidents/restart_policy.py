"""Whether the launchers of a job restart it after all ranks of a node have ended.

A restart is the last resort: it is not used for deaths that the other ranks survive, nor on a side
that lost contact with the rest, which may continue. All launchers reach the same result from the
same notices. The job restarts on the nodes whose launchers still answer.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

from pacekeeper.core.errors import ExitCode

RESTARTABLE = frozenset({ExitCode.LOST_STATE, ExitCode.INTERNAL})
MAX_BACK_OFF_S = 60.0


class RestartAction(StrEnum):
    """The next action of a launcher after its ranks have ended."""

    WAIT = "wait"  # other nodes train on
    AGAIN = "again"
    END = "end"


def decide_restart(
    nodes: Collection[int], ended: Mapping[int, int], gone: Collection[int]
) -> tuple[RestartAction, str]:
    """The action of a launcher whose ranks have ended, and the reason.

    Args:
        nodes: the nodes known to take part in the job. Nodes outside continued without none of
            these: they were removed by a quorum and cannot train.
        ended: node -> exit code of its ranks, for nodes whose ranks have ended.
        gone: nodes whose launcher does not answer.
    """
    for node in sorted(set(nodes).intersection(ended)):
        if ended[node] not in RESTARTABLE:
            return RestartAction.END, f"node {node} ended with code {ended[node]}"
    lost = sorted(set(nodes).intersection(gone).difference(ended))
    if lost:
        return RestartAction.END, f"the launchers of nodes {lost} are gone"
    living = sorted(set(nodes).difference(ended))
    if living:
        return RestartAction.WAIT, f"nodes {living} train on"
    return RestartAction.AGAIN, "all ranks of all nodes have ended"


def restart_nodes(
    began: Collection[int], nodes: Collection[int], ended: Mapping[int, int], gone: Collection[int]
) -> tuple[int, ...]:
    """The nodes of the next run, ascending, once all `nodes` have ended.

    Args:
        began: the nodes that started the job; the result is a subset.
        nodes: the nodes that took part in the job.
        ended: node -> exit code; it must allow a restart.
        gone: nodes whose launcher does not answer.

    Returns:
        The nodes; none if they are no majority of those that took part (or half of them without the
        lowest), because the others may have restarted without this side.
    """
    able = {node for node in began if ended.get(node) in RESTARTABLE}.difference(gone)
    voters = set(began).intersection(nodes) or set(began)
    lead = 2 * len(able & voters) - len(voters)
    if lead < 0 or (lead == 0 and min(voters) not in able):
        return ()
    return tuple(sorted(able))


def back_off_s(restart: int) -> float:
    """Seconds to wait before restart number 1, 2, ..., so that a failing job does not spin."""
    return min(MAX_BACK_OFF_S, 2.0 ** (restart - 1))
