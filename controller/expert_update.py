"""Few changes to the present hosts of experts: mend floors, then even out what drifted. Pure.

A layer that is still even keeps its hosts. In one that is not, an expert of the densest ranks
trades its slot with one elsewhere (or takes a free slot there), as long as that helps; a layer that
stays uneven is left to the caller, who may plan it anew.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.even_shares import EvenShares, shares_of_layer
from pacekeeper.controller.expert_drafts import Task

NEAR = 0.01  # above the fluid: a layer so near is left alone
MAX_ROUNDS = 8  # of changes, in each layer
NUM_RANKS = 4  # targets looked at in a round
NUM_TRIED = 8  # trades with each of them
LEAST_GAIN = 1e-4  # of the value, for a change
NOBODY = -1  # in the place of a guest: a free slot

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """`expert` leaves `source` for `target`; `guest` the other way, or None: a slot was free."""

    expert: int
    source: int
    target: int
    guest: int | None

    @property
    def num_copies(self) -> int:
        return 1 if self.guest is None else 2

    def apply(self, hosts: Flags) -> None:
        """To hosts [experts, ranks], in place. Into a free slot the expert goes as one more."""
        hosts[self.expert, self.target] = True
        if self.guest is not None:
            hosts[self.expert, self.source] = False
            hosts[self.guest, [self.source, self.target]] = True, False


def mended(hosts: Flags, task: Task) -> Flags | None:
    """Hosts [layers, experts, ranks] with the floors and slots kept, by few more replicas.

    Replicas beyond the slots go first, those of experts with most hosts. A missing one takes a
    free slot, else that of an expert that can spare it. None where neither is found, and where an
    expert has no host left.
    """
    result = hosts.copy()
    slots = np.array(task.cluster.slots)
    for layer in result:
        for rank in (layer.sum(axis=0) > slots).nonzero()[0].tolist():
            _thin(layer, rank, int(slots[rank]))
        for expert in task.below_floors(layer).nonzero()[0].tolist():
            while task.below_floors(layer[expert]):
                if not layer[expert].any() or not _mend(layer, expert, slots, task):
                    return None
    return result


def _thin(layer: Flags, rank: int, slots: int) -> None:
    held = layer[:, rank].nonzero()[0]
    by_number = held[np.argsort(layer[held].sum(axis=1), kind="stable")]
    layer[by_number[slots:], rank] = False


def _mend(layer: Flags, expert: int, slots: npt.NDArray[np.intp], task: Task) -> bool:
    nodes, racks = np.array(task.cluster.nodes), np.array(task.cluster.racks)
    own = layer[expert]
    is_new = ~np.isin(nodes, nodes[own])
    if len(np.unique(nodes[own])) >= task.floors.nodes:
        is_new = ~np.isin(racks, racks[own])  # of racks there are too few
    free = slots - layer.sum(axis=0)
    new_rack = ~np.isin(racks, racks[own])
    for rank in sorted(is_new.nonzero()[0].tolist(), key=lambda r: (-free[r], not new_rack[r], r)):
        if free[rank] > 0:
            layer[expert, rank] = True
            return True
        guests = layer[:, rank].nonzero()[0]
        for guest in guests[np.argsort(-layer[guests].sum(axis=1), kind="stable")].tolist():
            rest = layer[guest].copy()
            rest[rank] = False
            if not task.below_floors(rest):
                layer[guest, rank], layer[expert, rank] = False, True
                return True
    return False


def evened(hosts: Flags, task: Task, layers: npt.NDArray[np.intp], max_copies: int) -> None:
    """Makes useful changes to hosts [layers, experts, ranks] of some layers, in place.

    Until each is within NEAR of the fluid; at most `max_copies` replicas are copied.
    """
    aim = (1.0 + NEAR) * task.fluid
    for layer in layers.tolist():
        now = shares_of_layer(task.loads[layer], hosts[layer], task.speeds)
        for _ in range(MAX_ROUNDS):
            if now.value[0] <= aim[layer]:
                break
            change = _best_change(hosts[layer], task, layer, now, float(aim[layer]))
            if change is None or change.num_copies > max_copies:
                break
            trial = hosts[layer].copy()
            change.apply(trial)
            after = shares_of_layer(task.loads[layer], trial, task.speeds)
            if after.value[0] >= now.value[0] * (1.0 - LEAST_GAIN):
                break
            hosts[layer], now = trial, after
            max_copies -= change.num_copies


def _best_change(
    hosts: Flags, task: Task, layer: int, shares: EvenShares, aim: float
) -> _Change | None:
    """The change that comes nearest to taking out what is too much inside the densest ranks."""
    rows, inside = task.loads[layer], shares.inside[0]
    at_rank = (rows[:, None] * shares.shares[0]).sum(axis=0)
    excess = float(shares.bound[0] - aim) * float(task.speeds[inside].sum())
    own = ((rows > 0.0) & ~(hosts & ~inside).any(axis=1)).nonzero()[0]
    outside = (~inside).nonzero()[0]
    targets = outside[np.argsort((at_rank / task.speeds)[outside], kind="stable")][:NUM_RANKS]
    free = np.array(task.cluster.slots) - hosts.sum(axis=0)
    found: list[tuple[float, int, int, int]] = []
    for target in targets.tolist():
        guests = hosts[:, target].nonzero()[0]
        if free[target] > 0:
            guests = np.append(guests, NOBODY)
        experts = own[~hosts[own, target]]
        miss = _misses(
            rows[experts],
            hosts[experts].sum(axis=1) > 1,
            np.where(guests == NOBODY, 0.0, rows[guests]),
            excess=excess,
            room=aim * float(task.speeds[target]) - float(at_rank[target]),
        )
        order = np.argsort(miss, axis=None, kind="stable")[:NUM_TRIED]
        for i, k in zip(*np.unravel_index(order, miss.shape), strict=True):
            found.append((float(miss[i, k]), target, int(experts[i]), int(guests[k])))
    for _, target, expert, guest in sorted(found):
        sources = hosts[expert] & inside & ((guest == NOBODY) | ~hosts[guest])
        for source in sources.nonzero()[0].tolist():
            change = _Change(
                expert=expert,
                source=source,
                target=target,
                guest=None if guest == NOBODY else guest,
            )
            if _is_allowed(hosts, task, change):
                return change
    return None


def _misses(
    rows: Array, has_more: Flags, guest_rows: Array, *, excess: float, room: float
) -> Array:
    """[experts, guests] how far each trade is from taking `excess` rows to a rank with `room`.

    An expert with more hosts than the one that leaves sends as many rows out as are wanted.
    """
    moved = rows[:, None] - guest_rows
    sent = np.where(has_more[:, None], np.minimum(moved, excess), moved)
    result: Array = np.abs(excess - sent) + np.maximum(sent - room, 0.0)
    return np.where(moved > 0.0, result, np.inf)


def _is_allowed(hosts: Flags, task: Task, change: _Change) -> bool:
    trial = hosts.copy()
    change.apply(trial)
    touched = [change.expert] if change.guest is None else [change.expert, change.guest]
    return not task.below_floors(trial[touched]).any()
