"""Whether the launchers of a job start everything again, once the ranks of a node have all ended.

Pure. The last rung: deaths that the living outlive are no reason, nor is a side that lost the
others from sight: those may go on. All launchers come to the same answer from the same notices.
What is started again is the job on the nodes that are left: those whose launchers still answer.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

from pacekeeper.core.errors import ExitCode

RESTARTABLE = frozenset({ExitCode.LOST_STATE, ExitCode.INTERNAL})
MAX_BACK_OFF_S = 60.0


class RestartAction(StrEnum):
    """What a launcher does whose ranks have ended."""

    WAIT = "wait"  # other nodes train on
    AGAIN = "again"
    END = "end"


def decide_restart(
    nodes: Collection[int], ended: Mapping[int, int], gone: Collection[int]
) -> tuple[RestartAction, str]:
    """What to do, and why.

    `nodes`: those with a part in the job, as far as is known; the others went on without any other
    one, by a quorum, so that it can not train on. `ended`: with which exit code each node's ranks
    ended, where they did; `gone`: nodes whose launcher does not answer.
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
    """The nodes of the next life, ascending, once all `nodes` with a part in the job have ended.

    Of those that `began` the job: who ended in a way that allows it, and whose launcher answers. An
    empty one where these are no majority of those with a part (or half with the lowest): the others
    may have started again without this side, and no longer answer for that reason.
    """
    able = {node for node in began if ended.get(node) in RESTARTABLE}.difference(gone)
    voters = set(began).intersection(nodes) or set(began)
    lead = 2 * len(able & voters) - len(voters)
    if lead < 0 or (lead == 0 and min(voters) not in able):
        return ()
    return tuple(sorted(able))


def back_off_s(restart: int) -> float:
    """Seconds to wait before restart number 1, 2, ...: what ends at once must not spin."""
    return min(MAX_BACK_OFF_S, 2.0 ** (restart - 1))
