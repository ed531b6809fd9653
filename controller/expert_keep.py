"""Candidates that stay near the present hosts of experts, with the price of their copies. Pure.

The present hosts with few changes; layers that stay uneven are planned anew where that pays. And
any plan from scratch, its ranks in the places that need fewest copies.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.even_shares import even_shares, grouped, joined, shares_of_layer
from pacekeeper.controller.expert_drafts import Draft, Task, cheapest, checked
from pacekeeper.controller.expert_moves import nearest_ranks
from pacekeeper.controller.expert_update import NEAR, evened, mended

COPIED_PART = 0.5  # of all replicas, by a plan from scratch
MAX_TOGETHER = 128  # groups: with more, layers are solved one by one, each with groups of its own

Flags = npt.NDArray[np.bool_]


def moved_near(draft: Draft, present: Flags, task: Task) -> Draft:
    """The draft with ranks in other places, and the copies in its price."""
    place = nearest_ranks(draft.on_ranks(), present, task.cluster)
    groups = tuple(tuple(sorted(place[list(ranks)].tolist())) for ranks in draft.groups)
    return _with_copies(replace(draft, groups=groups), present, task)


def _with_copies(draft: Draft, present: Flags, task: Task) -> Draft:
    num_copies = int((draft.on_ranks() & ~present).sum())
    price_s = draft.price_s + num_copies * task.prices.move_s
    return replace(draft, num_copies=num_copies, price_s=price_s)


def scratch_s(task: Task, num_layers: int) -> float:
    """What the copies of a plan from scratch cost, roughly: one is made where it may save that."""
    return task.prices.move_s * COPIED_PART * sum(task.cluster.slots) * num_layers


def updated(task: Task, present: Flags, max_copies: int) -> Draft | None:
    """The present hosts after few changes; None where they can not be mended in so many copies."""
    hosts = mended(present, task)
    if hosts is None:
        return None
    left = max_copies - int((hosts & ~present).sum())
    best = _draft(task, hosts, present) if left >= 0 else None
    if best is None:
        return None
    bad = (best.value > (1.0 + NEAR) * task.fluid).nonzero()[0]
    if len(bad) == 0:
        return best
    evened(hosts, task, bad, left)
    best = _draft(task, hosts, present)
    assert best is not None, "changes keep the floors"
    bad = (best.value > (1.0 + NEAR) * task.fluid).nonzero()[0]
    wait_s = task.wait_s(np.where(np.isin(np.arange(len(hosts)), bad), best.value, 0.0))
    if wait_s <= scratch_s(task, len(bad)):
        return best
    part = cheapest(replace(task, loads=task.loads[bad]), None, saved_s=0.0, adapt=lambda d: d)
    if part is None:
        return best
    hosts[bad] = part.on_ranks()
    anew = _draft(task, hosts, present)
    if anew and anew.num_copies <= max_copies and anew.price_s < best.price_s:
        return anew
    return best


def _draft(task: Task, hosts: Flags, present: Flags) -> Draft | None:
    """hosts [layers, experts, ranks], which stay the caller's."""
    groups, on_groups = grouped(hosts)
    if len(groups) <= MAX_TOGETHER:
        even = even_shares(task.loads, on_groups, task.group_speeds(groups))
    else:
        groups, on_groups = tuple((rank,) for rank in range(hosts.shape[2])), hosts.copy()
        even = joined(
            shares_of_layer(rows, on, task.speeds)
            for rows, on in zip(task.loads, hosts, strict=True)
        )
    drafts = checked(task, "present hosts, changed", groups, on_groups, even.value)
    return replace(_with_copies(drafts[0], present, task), even=even) if drafts else None
