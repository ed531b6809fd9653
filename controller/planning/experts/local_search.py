"""Local search on the present placement of uneven layers.

Replicates overloaded experts into free or evictable slots, then swaps experts between the most and
the least loaded ranks. Keeps the cheapest prefix of the changes of each layer.
"""

import heapq
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.certificate import lower_bound
from pacekeeper.controller.planning.experts.objective import PlacementProblem
from pacekeeper.controller.planning.experts.repair import SpreadRequirements, keeps_spread
from pacekeeper.controller.planning.token_split.min_max import (
    UNPROVEN,
    MinMaxSplit,
    shares_on_ranks,
)

NEAR = 0.01  # above the fluid: a layer so near is left alone
MAX_ROUNDS = 12  # of trades, in each layer
FAR_OFF = 4.0  # times the aim: what stands so high is no matter of trades
MAX_FAILED = 3  # of them in vain
NUM_RANKS = 4  # targets looked at in a round
NUM_TRIED = 8  # trades with each of them
LEAST_GAIN = 1e-4  # of the value, for a change
FREE_SLOT = -1  # in the place of a guest: a free slot

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

    def apply(self, replicas: Flags) -> None:
        """To replicas [experts, ranks], in place. Into a free slot the expert goes as one more."""
        replicas[self.expert, self.target] = True
        if self.guest is not None:
            replicas[self.expert, self.source] = False
            replicas[self.guest, [self.source, self.target]] = True, False


@dataclass(slots=True, kw_only=True, eq=False)
class _LayerSearch:
    """Search state of one layer: its replicas, the cheapest so far, and changes without effect."""

    layer: int
    aim: float
    replicas: Flags
    num_copies: int
    num_before: int
    best: Flags
    shares: MinMaxSplit
    price_s: float
    failed: set[_Change] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Trial:
    way: _LayerSearch
    replicas: Flags
    num_copies: int
    change: _Change | None = None


def local_search(
    replicas: Flags,
    task: PlacementProblem,
    needs: SpreadRequirements,
    even: MinMaxSplit,
    max_copies: int,
) -> tuple[Flags, MinMaxSplit]:
    """Even out the layers that are more than NEAR above the lower bound, as far as it pays.

    Args:
        replicas: [layers, experts, ranks].
        task: loads, cluster, floors and prices.
        needs: spread below which no expert may fall.
        even: shares and values of `replicas`.
        max_copies: the most replicas to copy.

    Returns:
        The new placement and its shares.
    """
    result, split = replicas.copy(), even.of(np.arange(len(replicas)))
    ways = [
        _LayerSearch(
            layer=layer,
            aim=aim,
            replicas=replicas[layer].copy(),
            num_copies=0,
            num_before=int(replicas[layer].sum()),
            best=replicas[layer].copy(),
            shares=even.of(np.array([layer])),
            price_s=float(task.waits_s(even.value)[layer]),
        )
        for layer in (even.value > (1.0 + NEAR) * task.fluid).nonzero()[0].tolist()
        if even.value[layer] > (aim := _aim(replicas[layer], task, layer, needs))
    ]
    trials: list[_Trial] = []
    for way in ways:
        if found := _replicate_overloaded(way, task, needs, split, max_copies):
            trials.append(found)
            max_copies -= found.num_copies
    for turn in range(MAX_ROUNDS + 1):
        max_copies += _try(trials, task, split)
        trials = []
        for way in ways if turn < MAX_ROUNDS else ():
            change = None
            is_near = way.aim < split.value[way.layer] <= FAR_OFF * way.aim
            # Even if one copy more made the layer even, it has to be cheaper than the best so far.
            may_pay = (way.num_copies + 1) * task.prices.move_s < way.price_s
            if is_near and may_pay and len(way.failed) < MAX_FAILED:
                change = _best_change(way, task, needs, split)
            if change is not None and change.num_copies <= max_copies:
                max_copies -= change.num_copies
                trial = way.replicas.copy()
                change.apply(trial)
                trials.append(
                    _Trial(way=way, replicas=trial, num_copies=change.num_copies, change=change)
                )
        if not trials:
            break
    for way in ways:
        result[way.layer] = way.best
        split.put(np.array([way.layer]), way.shares)
    rough = (split.value > split.bound * (1.0 + UNPROVEN)).nonzero()[0]
    if len(rough):
        split.put(rough, shares_on_ranks(task.loads[rough], result[rough], task.speeds))
    return result, split


def _aim(replicas: Flags, task: PlacementProblem, layer: int, needs: SpreadRequirements) -> float:
    """A little above what no replicas in so many slots can beat."""
    num_slots = max(sum(task.cluster.slots), int(replicas.sum()))
    least = lower_bound(
        task.loads[layer].tolist(),
        dict(enumerate(task.cluster.speeds)),
        num_slots=num_slots,
        min_hosts=needs.ranks[layer].tolist(),
    )
    return (1.0 + NEAR) * least


def _try(trials: list[_Trial], task: PlacementProblem, split: MinMaxSplit) -> int:
    """All trials at once; how many copies those would have made that do not help."""
    if not trials:
        return 0
    layers = np.array([trial.way.layer for trial in trials])
    after = shares_on_ranks(
        task.loads[layers],
        np.stack([trial.replicas for trial in trials]),
        task.speeds,
        is_exact=False,
    )
    helps = after.value < split.value[layers] * (1.0 - LEAST_GAIN)
    given_back = 0
    for at, trial in enumerate(trials):
        way = trial.way
        if not helps[at]:
            given_back += trial.num_copies
            if trial.change is not None:
                way.failed.add(trial.change)
            continue
        way.replicas = trial.replicas
        way.num_copies += trial.num_copies
        way.failed.clear()
        split.put(np.array([way.layer]), after.of(np.array([at])))
        price_s = float(task.waits_s(split.value)[way.layer])
        price_s += way.num_copies * task.prices.move_s
        price_s += (int(way.replicas.sum()) - way.num_before) * task.prices.hold_s
        if price_s < way.price_s:
            way.best, way.price_s = way.replicas, price_s
            way.shares = split.of(np.array([way.layer]))
    return given_back


class _Replication:
    """A layer to which replicas of overloaded experts are added, one after the other.

    No split gets below rows / (sum of speeds of its replica ranks) of an expert.

    Attributes:
        replicas: [experts, ranks], with the replicas added so far.
        densities: heap of (-rows per speed, expert) of the experts above the aim.
    """

    def __init__(
        self,
        way: _LayerSearch,
        task: PlacementProblem,
        needs: SpreadRequirements,
        split: MinMaxSplit,
    ) -> None:
        self._layer, self._aim, self._task, self._needs = way.layer, way.aim, task, needs
        self._rows, self._shares = task.loads[way.layer], split.shares[way.layer]
        self.replicas = way.replicas.copy()
        self._carried = self.replicas @ task.speeds
        self._at_rank = self._rows @ self._shares
        self._free = np.array(task.cluster.slots) - self.replicas.sum(axis=0)
        overloaded = (self._rows > self._aim * self._carried).nonzero()[0].tolist()
        self.densities = [(-self._rows[e] / self._carried[e], e) for e in overloaded]
        heapq.heapify(self.densities)

    @property
    def value(self) -> float:
        """The best value that a split of these replicas may have."""
        return max(self._aim, -self.densities[0][0]) if self.densities else self._aim

    def replicate_densest(self) -> bool:
        """Add a replica of the densest expert; False where no rank has room."""
        expert = self.densities[0][1]
        target = self._room_for(expert)
        if target is None:
            return False
        rank, guest = target
        rows, speed = self._rows, self._task.speeds[rank]
        if guest is None:
            self._free[rank] -= 1
        else:
            self.replicas[guest, rank] = False
            self._carried[guest] -= speed
            self._at_rank[rank] -= rows[guest] * self._shares[guest, rank]
        excess = rows[expert] - self._aim * self._carried[expert]
        self.replicas[expert, rank] = True
        self._carried[expert] += speed
        self._at_rank[rank] += max(0.0, min(excess, self._aim * speed - self._at_rank[rank]))
        dense = rows[expert] / self._carried[expert]
        if dense > self._aim:
            heapq.heapreplace(self.densities, (-dense, expert))
        else:
            heapq.heappop(self.densities)
        return True

    def _room_for(self, expert: int) -> tuple[int, int | None] | None:
        """The emptiest rank with a free slot, else one where an expert with few rows can go.

        (rank, expert that leaves it); None where there is none.
        """
        task, needs, aim = self._task, self._needs, self._aim
        is_open = needs.open_ranks(self.replicas[expert], task.cluster, task.floors)
        height = np.where(is_open, self._at_rank / task.speeds, np.inf)
        open_height = np.where(self._free > 0, height, np.inf)
        rank = int(open_height.argmin())
        if open_height[rank] < aim:
            return rank, None
        may = needs.may_leave(self.replicas, self._layer, task.cluster, task.floors) & is_open
        left = self._carried[:, None] - task.speeds
        may &= self._rows[:, None] <= aim * np.maximum(left, 0.0)
        may &= height < aim
        if not may.any():
            return None
        density = self._rows[:, None] / self._carried[:, None]
        piece = np.where(may, density * task.speeds, np.inf)
        guest, place = divmod(int(piece.argmin()), piece.shape[1])
        return place, guest


def _replicate_overloaded(
    way: _LayerSearch,
    task: PlacementProblem,
    needs: SpreadRequirements,
    split: MinMaxSplit,
    max_copies: int,
) -> _Trial | None:
    """Add replicas for experts that their ranks cannot carry, densest first, as many as pay."""
    trial, chosen, num_chosen = _Replication(way, task, needs, split), way.replicas, 0
    even = (1.0 + task.prices.even) * float(task.fluid[way.layer])
    least_s = way.price_s
    for number in range(1, max_copies + 1):
        if not trial.densities or not trial.replicate_densest():
            break
        price_s = task.row_s * max(0.0, trial.value - even) + number * task.prices.move_s
        price_s += (int(trial.replicas.sum()) - way.num_before) * task.prices.hold_s
        if price_s < least_s:
            least_s, chosen, num_chosen = price_s, trial.replicas.copy(), number
    return _Trial(way=way, replicas=chosen, num_copies=num_chosen) if num_chosen else None


def _best_change(
    way: _LayerSearch, task: PlacementProblem, needs: SpreadRequirements, split: MinMaxSplit
) -> _Change | None:
    """The change that comes nearest to taking out what is too much inside the densest ranks."""
    replicas, layer, aim = way.replicas, way.layer, way.aim
    rows, inside = task.loads[layer], split.inside[layer]
    at_rank = rows @ split.shares[layer]
    excess = float(split.bound[layer] - aim) * float(task.speeds[inside].sum())
    own = ((rows > 0.0) & ~(replicas & ~inside).any(axis=1)).nonzero()[0]
    outside = (~inside).nonzero()[0]
    targets = outside[np.argsort((at_rank / task.speeds)[outside], kind="stable")][:NUM_RANKS]
    free = np.array(task.cluster.slots) - replicas.sum(axis=0)
    has_more = replicas.sum(axis=1) > 1
    found: list[tuple[float, int, int, int]] = []
    for target in targets.tolist():
        guests = replicas[:, target].nonzero()[0]
        if free[target] > 0:
            guests = np.append(guests, FREE_SLOT)
        experts = own[~replicas[own, target]]
        miss = _misses(
            rows[experts],
            has_more[experts],
            np.where(guests == FREE_SLOT, 0.0, rows[guests]),
            excess=excess,
            room=aim * float(task.speeds[target]) - float(at_rank[target]),
        )
        order = np.argsort(miss, axis=None, kind="stable")[:NUM_TRIED]
        for i, k in zip(*np.unravel_index(order, miss.shape), strict=True):
            found.append((float(miss[i, k]), target, int(experts[i]), int(guests[k])))
    for _, target, expert, guest in sorted(found):
        sources = replicas[expert] & inside & ((guest == FREE_SLOT) | ~replicas[guest])
        for source in sources.nonzero()[0].tolist():
            change = _Change(
                expert=expert,
                source=source,
                target=target,
                guest=None if guest == FREE_SLOT else guest,
            )
            if change not in way.failed and _is_allowed(replicas, task, needs, change):
                return change
    return None


def _misses(
    rows: Array, has_more: Flags, guest_rows: Array, *, excess: float, room: float
) -> Array:
    """[experts, guests] how far each trade is from taking `excess` rows to a rank with `room`.

    An expert with more replicas than the one that leaves sends as many rows out as are wanted.
    """
    moved = rows[:, None] - guest_rows
    sent = np.where(has_more[:, None], np.minimum(moved, excess), moved)
    result: Array = np.abs(excess - sent) + np.maximum(sent - room, 0.0)
    return np.where(moved > 0.0, result, np.inf)


def _is_allowed(
    replicas: Flags, task: PlacementProblem, needs: SpreadRequirements, change: _Change
) -> bool:
    if change.guest is None:
        is_open = needs.open_ranks(replicas[change.expert], task.cluster, task.floors)
        return bool(is_open[change.target])
    before = replicas[[change.expert, change.guest]]
    after = before.copy()
    replace(change, expert=0, guest=1).apply(after)
    return keeps_spread(before, after, task.cluster, task.floors)
