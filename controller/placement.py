"""Who should hold which expert replica, given loads, speeds and slots. Pure.

Every layer is filled towards one target for all ranks, the least that any hosts could reach: the
expert that keeps most rows on ranks above the target gets hosts on ranks below it. Few, useful
changes from the present hosts; ties go to the lowest index.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.eplb_form import rebalance_experts as rebalance_experts
from pacekeeper.controller.shares import Split, token_shares
from pacekeeper.controller.slot_bound import least_value
from pacekeeper.controller.spread_floor import NO_FLOOR, SpreadFloor, Standing
from pacekeeper.core.layout import ExpertHosts, Layout

TOLERANCE = 0.02  # of the least value: a layer within it is left alone
WORTH_A_CHANGE = 0.005  # of a layer's value: smaller improvements are not worth moving state
AIM, CLOSE = 0.003, 0.01  # above the least: aimed at, so that last pieces fit; near enough
NEARLY_EVEN = 0.05  # of all rows above the target: exact shares may well even it out
# In one call, shared out over the layers: they bound the time at any cluster size. A solve is one
# exact split, after which fewer changes go further; a round looks for one expert's new hosts.
MAX_SOLVES, MAX_ROUNDS = 64, 16384
MAX_TARGETS, MAX_SOURCES = 2, 2  # ranks with most room, hosts with most excess, in one look
MAX_STUCK = 2  # experts in vain: then all that were left would be

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


def _positions(chosen: Flags) -> Counts:
    found: Counts = chosen.nonzero()[0]
    return found


@dataclass(slots=True, kw_only=True)
class _Replicas:
    """One layer's replicas: of `expert` on `rank` (positions), now computing `rows` [replicas]."""

    expert: Counts
    rank: Counts
    rows: Array

    def copy(self) -> "_Replicas":
        return _Replicas(expert=self.expert.copy(), rank=self.rank.copy(), rows=self.rows.copy())

    def of(self, expert: int) -> Counts:
        return _positions(self.expert == expert)

    def on(self, rank: int) -> Counts:
        return _positions(self.rank == rank)

    def add(self, expert: int, ranks: Counts) -> None:
        """Replicas without rows."""
        self.expert = np.append(self.expert, np.full(len(ranks), expert))
        self.rank = np.append(self.rank, ranks)
        self.rows = np.append(self.rows, np.zeros(len(ranks)))


@dataclass(slots=True, kw_only=True)
class _Fill:
    """One layer on its way to `target` [ranks] rows per rank.

    `least_rows`: fewer are not worth a change. `free` [ranks]: slots without a replica; `spare`
    [experts]: hosts an expert could lose; `standing`: and which of them, for its spread.
    """

    replicas: _Replicas
    least_value: float
    target: Array
    least_rows: float
    free: Counts
    spare: Counts
    standing: Standing
    num_moved: int = 0

    def room(self, replicas: _Replicas) -> Array:
        """Rows missing to the target, by rank; negative above it."""
        load = np.bincount(replicas.rank, weights=replicas.rows, minlength=len(self.target))
        room: Array = self.target - load
        return room


def place(
    layout: Layout,
    *,
    splits: Sequence[Split],
    loads: Sequence[Sequence[float]],
    speeds: Mapping[int, float],
    slots_per_rank: int,
    min_hosts: int,
    spread: SpreadFloor = NO_FLOOR,
    move_cost: float = 0.0,
) -> tuple[Split, ...]:
    """Hosts and token shares of every layer, from the present hosts by few, useful changes.

    `splits`: the best shares over the present hosts (`shares.split_layers`); layers that need no
    change keep theirs, as do those whose value falls by less than `move_cost` for each replica
    that has to be copied. A rank with room gets a replica in a free slot; in that of an expert
    with more than `min_hosts` hosts, or of one that finds a slot elsewhere; or two replicas swap
    their ranks. No expert gets narrower than `spread` asks for, or than it is. No rank takes on an
    expert it holds, or more than `slots_per_rank` replicas of a layer. loads[layer][expert] in
    token rows.
    """
    hot = [i for i, split in enumerate(splits) if _is_above(split, split.bound.fluid)]
    result = list(splits)
    for layer in hot:
        at = {rank: speeds[rank] for rank in layout.stage_of(layer).ranks}
        result[layer] = _improved(
            splits[layer],
            loads[layer],
            at,
            slots=slots_per_rank,
            min_hosts=min_hosts,
            spread=spread,
            move_cost=move_cost,
            num_solves=max(1, MAX_SOLVES // len(hot)),
            num_rounds=max(1, MAX_ROUNDS // len(hot)),
        )
    return tuple(result)


def _is_above(split: Split, least: float) -> bool:
    return split.bound.value > least * (1.0 + TOLERANCE)


def _improved(
    before: Split,
    loads: Sequence[float],
    speeds: Mapping[int, float],
    *,
    slots: int,
    min_hosts: int,
    spread: SpreadFloor,
    move_cost: float,
    num_solves: int,
    num_rounds: int,
) -> Split:
    """The best of the splits on the way: each some changes further than the one before."""
    split = best = before
    least_price = before.bound.value * (1.0 - WORTH_A_CHANGE)
    for _ in range(num_solves):
        fill = _begin(split.hosts, loads, speeds, slots, min_hosts, spread)
        if not _is_above(split, fill.least_value):
            break
        _run(fill, num_rounds, max_moved=-(-len(speeds) // num_solves))
        if fill.num_moved == 0:
            break
        hosts = _hosts(fill.replicas, split, speeds)
        left = _excess(fill.room(fill.replicas)) / float(fill.target.sum())
        split = token_shares(loads, hosts, speeds, is_even=left < NEARLY_EVEN)
        price = split.bound.value + move_cost * _num_copied(before, split)
        if price < least_price:
            best, least_price = split, price
    return best


def _num_copied(old: Split, new: Split) -> int:
    return sum(
        len({host.rank for host in now} - {host.rank for host in then})
        for then, now in zip(old.hosts, new.hosts, strict=True)
    )


def _begin(
    experts: Sequence[ExpertHosts],
    loads: Sequence[float],
    speeds: Mapping[int, float],
    slots: int,
    min_hosts: int,
    spread: SpreadFloor,
) -> _Fill:
    position = {rank: i for i, rank in enumerate(sorted(speeds))}
    pairs = [(e, position[host.rank], host.share) for e, on in enumerate(experts) for host in on]
    expert = np.array([e for e, _, _ in pairs], dtype=np.intp)
    rank = np.array([at for _, at, _ in pairs], dtype=np.intp)
    rows = np.array([share * loads[e] for e, _, share in pairs])
    used = np.bincount(rank, minlength=len(position))
    hosts = np.bincount(expert, minlength=len(loads))
    floor = np.minimum(hosts, min_hosts)
    room = np.maximum(used, slots)
    least = least_value(loads, speeds, num_slots=int(room.sum()), min_hosts=floor.tolist())
    target = least * (1.0 + AIM) * np.array([speeds[r] for r in position])
    return _Fill(
        replicas=_Replicas(expert=expert, rank=rank, rows=rows),
        least_value=least,
        target=target,
        least_rows=WORTH_A_CHANGE * float(target.mean()),
        free=room - used,
        spare=hosts - floor,
        standing=Standing.of(
            expert, rank, num_experts=len(loads), ranks=list(position), floor=spread
        ),
    )


def _hosts(replicas: _Replicas, before: Split, speeds: Mapping[int, float]) -> list[list[int]]:
    ranks = sorted(speeds)
    hosts: list[list[int]] = [[] for _ in before.hosts]
    for expert, at in zip(replicas.expert.tolist(), replicas.rank.tolist(), strict=True):
        hosts[expert].append(ranks[at])
    return [sorted(on) for on in hosts]


def _run(fill: _Fill, num_rounds: int, max_moved: int) -> None:
    """Round by round the expert with most rows above the target, until no change is useful."""
    num_experts = len(fill.spare)
    is_stuck = np.zeros(num_experts, dtype=np.bool_)
    for _ in range(num_rounds):
        replicas = fill.replicas
        room = fill.room(replicas)
        if is_stuck.sum() >= MAX_STUCK or (room >= -CLOSE * fill.target).all():
            return
        above = np.minimum(replicas.rows, np.maximum(-room, 0.0)[replicas.rank])
        by_expert = np.bincount(replicas.expert, weights=above, minlength=num_experts)
        by_expert[is_stuck] = 0.0
        expert = int(by_expert.argmax())
        needed, left = float(by_expert[expert]), max_moved - fill.num_moved
        if needed <= fill.least_rows or left <= 0:
            return
        is_stuck[expert] = not (
            _pour(fill, replicas, expert, room) > 0.0
            or _widen(fill, expert, room, needed=needed, max_moved=left)
            or _make_room(fill, expert, room)
        )


def _pour(fill: _Fill, replicas: _Replicas, expert: int, room: Array) -> float:
    """Rows of an expert from its hosts above the target to those below it; 0: hardly any."""
    own = replicas.of(expert)
    at = room[replicas.rank[own]]
    given = np.maximum(at, 0.0)
    taken = np.minimum(replicas.rows[own], given - at)
    in_all, out_all = float(given.sum()), float(taken.sum())
    amount = min(in_all, out_all)
    if amount <= fill.least_rows:
        return 0.0
    replicas.rows[own] += given * (amount / in_all) - taken * (amount / out_all)
    return amount


def _widen(fill: _Fill, expert: int, room: Array, *, needed: float, max_moved: int) -> bool:
    """New hosts in free slots, those with most room first, as many as it takes."""
    targets = _targets(fill, expert, room)
    targets = targets[fill.free[targets] > 0]
    before = np.cumsum(room[targets]) - room[targets]
    if not fill.standing.is_wide(expert):
        max_moved = 1  # two may stand in one domain
    targets = targets[before < needed - fill.least_rows][:max_moved]
    if len(targets) == 0:
        return False
    fill.replicas.add(expert, targets)
    fill.free[targets] -= 1
    fill.spare[expert] += len(targets)
    fill.num_moved += len(targets)
    fill.standing.recount((expert,), fill.replicas.expert, fill.replicas.rank)
    _pour(fill, fill.replicas, expert, room)
    return True


def _targets(fill: _Fill, expert: int, room: Array) -> Counts:
    """Ranks with room that do not hold the expert, those with most room first.

    Of an expert that stands in too few domains only those that add one.
    """
    has_room = room > fill.least_rows
    if not fill.standing.is_wide(expert):
        has_room &= ~fill.standing.is_covered(expert)
    has_room[fill.replicas.rank[fill.replicas.of(expert)]] = False
    targets = _positions(has_room)
    return targets[np.argsort(-room[targets], kind="stable")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Change:
    """Replicas after a change, and what it takes."""

    replicas: _Replicas
    num_moved: int
    experts: tuple[int, int]  # whose hosts are others now
    loses: int | None = None  # an expert with one host less
    gains: int | None = None  # an expert with one host more
    fills: int | None = None  # a rank with one free slot less


def _make_room(fill: _Fill, expert: int, room: Array) -> bool:
    """A host for the expert on a full rank: the first change that takes rows below the target."""
    excess = _excess(room)
    for target in _targets(fill, expert, room)[:MAX_TARGETS].tolist():
        for change in _changes(fill, expert, target, room):
            after = fill.room(change.replicas)
            poured = _pour(fill, change.replicas, expert, after)
            gain = excess - _excess(after) + poured
            if gain <= fill.least_rows * change.num_moved:
                continue
            fill.replicas = change.replicas
            fill.num_moved += change.num_moved
            fill.standing.recount(change.experts, fill.replicas.expert, fill.replicas.rank)
            if change.loses is not None:
                fill.spare[change.loses] -= 1
            if change.gains is not None:
                fill.spare[change.gains] += 1
            if change.fills is not None:
                fill.free[change.fills] -= 1
            return True
    return False


def _excess(room: Array) -> float:
    """Rows above the target, all ranks together: what has to become less."""
    return float(np.maximum(room, 0.0).sum() - room.sum())


def _changes(fill: _Fill, expert: int, target: int, room: Array) -> Iterator[_Change]:
    """Ways to have the expert on the full rank `target`, cheapest first."""
    replicas, standing = fill.replicas, fill.standing
    guests = replicas.on(target)
    guests = guests[np.argsort(replicas.rows[guests], kind="stable")]  # fewest rows first
    owners = replicas.expert[guests]
    spare = guests[(fill.spare[owners] > 0) & standing.may_leave(owners, target)]
    if len(spare):
        changed, guest = replicas.copy(), int(spare[0])
        owner = int(replicas.expert[guest])
        changed.expert[guest], changed.rows[guest] = expert, 0.0
        rest = changed.of(owner)
        weight = np.maximum(room[changed.rank[rest]], 0.0) + 1e-9
        changed.rows[rest] += replicas.rows[guest] * weight / weight.sum()
        yield _Change(
            replicas=changed, num_moved=1, experts=(owner, expert), loses=owner, gains=expert
        )
    if len(guests):
        guest, owner = int(guests[0]), int(owners[0])
        others = (fill.free > 0) & standing.may_go(owner, target, np.arange(len(room)))
        others[replicas.rank[replicas.of(owner)]] = False
        if others.any():
            changed = replicas.copy()
            other = int(np.where(others, room, -np.inf).argmax())
            changed.rank[guest] = other
            changed.add(expert, np.array([target]))
            yield _Change(
                replicas=changed, num_moved=2, experts=(owner, expert), gains=expert, fills=other
            )
    own = replicas.of(expert)
    above = np.minimum(replicas.rows[own], np.maximum(-room[replicas.rank[own]], 0.0))
    for source in own[np.argsort(-above, kind="stable")][:MAX_SOURCES].tolist():
        left = int(replicas.rank[source])
        is_held = np.zeros(len(fill.spare), dtype=np.bool_)
        is_held[replicas.expert[replicas.on(left)]] = True
        free = guests[~is_held[owners] & standing.may_go(owners, target, left)]
        if room[left] >= 0.0 or len(free) == 0 or not standing.may_go(expert, left, target):
            continue
        # The guest whose rows leave as much behind as is too much here, or as there is room.
        wanted = replicas.rows[source] - min(-room[left], room[target])
        guest = int(free[np.abs(replicas.rows[free] - wanted).argmin()])
        changed = replicas.copy()
        changed.rank[source], changed.rank[guest] = target, left
        owner = int(replicas.expert[guest])
        yield _Change(replicas=changed, num_moved=2, experts=(owner, expert))
