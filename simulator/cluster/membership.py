"""Which nodes of a history a job has, that asked for fewer than there are.

The job keeps the nodes it got until they are lost. What else is there belongs to others: a node is
replaced by one that joins later, not by one of theirs.
"""

from collections.abc import Collection

import numpy as np

from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
)


def first_nodes(history: History) -> tuple[int, ...]:
    """The nodes that join before the first loss, in the order in which they do."""
    found: list[int] = []
    for change in history.changes:
        match change:
            case NodesJoined():
                found += change.nodes
            case NodesLost():
                break
            case SpeedChanged():
                pass
    return tuple(found)


def capped(history: History, *, max_nodes: int, seed: int, always: Collection[int] = ()) -> History:
    """The history of a job that has at most `max_nodes` at a time.

    Its first ones are drawn evenly from `first_nodes`, with all of `always` among them; later ones
    are taken as they join, while it has fewer. Raises ValueError for more in `always` than it may
    have, or others than those of `first_nodes`.
    """
    first = first_nodes(history)
    if len(set(always)) > max_nodes or not set(always) <= set(first):
        raise ValueError(
            f"always: expected at most {max_nodes} of the nodes before the first loss, got "
            f"{sorted(set(always))}"
        )
    others = [node for node in first if node not in set(always)]
    num_drawn = min(max_nodes - len(set(always)), len(others))
    draw = np.random.default_rng(seed)
    chosen = set(always) | {int(node) for node in draw.choice(others, num_drawn, replace=False)}
    strangers = set(first) - chosen
    mine: set[int] = set()
    changes: list[Change] = []
    for change in history.changes:
        match change:
            case NodesLost():
                # A stranger that was lost may come back as anybody's.
                strangers -= set(change.nodes)
                lost = tuple(node for node in change.nodes if node in mine)
                mine -= set(lost)
                if lost:
                    changes.append(NodesLost(at_s=change.at_s, nodes=lost))
            case NodesJoined():
                free = [node for node in change.nodes if node not in strangers]
                taken = tuple(free[: max_nodes - len(mine)])
                mine |= set(taken)
                if taken:
                    changes.append(NodesJoined(at_s=change.at_s, nodes=taken))
            case SpeedChanged():
                if change.node in mine:
                    changes.append(change)
    return History(
        name=f"{history.name}, at most {max_nodes} nodes",
        num_nodes=history.num_nodes,
        duration_s=history.duration_s,
        changes=tuple(changes),
        notes=history.notes,
    )
