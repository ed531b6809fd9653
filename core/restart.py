"""Whether the launchers of a job start everything again, once the ranks of a node have all ended.

Pure. The last rung: deaths that the living outlive are no reason, nor is a side that lost the
others from sight: those may go on. All launchers come to the same answer from the same notices.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum

from pacekeeper.core.errors import ExitCode

RESTARTABLE = frozenset({ExitCode.LOST_STATE, ExitCode.INTERNAL})
LONGEST_BACK_OFF_S = 60.0


class Next(StrEnum):
    """What a launcher does whose ranks have ended."""

    WAIT = "wait"  # other nodes train on
    AGAIN = "again"
    END = "end"


def next_move(
    nodes: Collection[int], ended: Mapping[int, int], gone: Collection[int]
) -> tuple[Next, str]:
    """What to do, and why.

    `nodes`: those the job began with, and those that joined and have a part in it; the others went
    on without any other one. `ended`: with which exit code each node's ranks ended, where they did;
    `gone`: nodes whose launcher does not answer.
    """
    for node in sorted(set(nodes).intersection(ended)):
        if ended[node] not in RESTARTABLE:
            return Next.END, f"node {node} ended with code {ended[node]}"
    lost = sorted(set(nodes).intersection(gone).difference(ended))
    if lost:
        return Next.END, f"the launchers of nodes {lost} are gone"
    living = sorted(set(nodes).difference(ended))
    if living:
        return Next.WAIT, f"nodes {living} train on"
    return Next.AGAIN, "all ranks of all nodes have ended"


def back_off_s(restart: int) -> float:
    """Seconds to wait before restart number 1, 2, ...: what ends at once must not spin."""
    return min(LONGEST_BACK_OFF_S, 2.0 ** (restart - 1))
