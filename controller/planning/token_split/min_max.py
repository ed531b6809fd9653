"""Token shares over given replica ranks that minimise the slowest rank, all layers at once.

Each rank has one price u_j per layer; an expert splits over its replica ranks in proportion to
speed_j * exp(u_j). The prices minimise a smooth convex function whose optimum is the split with the
least sum of speed_j * (load_j / speed_j)^2; that split also has the least maximum (the
lexicographically least base of a polymatroid minimises every separable convex objective). Newton's
method with one small matrix per layer, over ranks or over experts with a choice, whichever are
fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.token_split.linear_program import exact_shares

Counts = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


NUMBER_BITS = 64


def unique_rows(rows: Flags) -> tuple[Counts, Counts]:
    """First index of each distinct row [kinds], and the kind of each row [rows]."""
    # Packed along the memory: a transposed view would be read flag by flag.
    packed = np.packbits(np.ascontiguousarray(rows), axis=1)
    if rows.shape[1] <= NUMBER_BITS:
        return _numbered(packed)
    number: dict[bytes, int] = {}
    first: list[int] = []
    kinds: list[int] = []
    for at, row in enumerate(packed):
        kind = number.setdefault(row.tobytes(), len(number))
        if kind == len(first):
            first.append(at)
        kinds.append(kind)
    return np.array(first, dtype=np.intp), np.array(kinds, dtype=np.intp)


def _numbered(packed: npt.NDArray[np.uint8]) -> tuple[Counts, Counts]:
    """The same of rows of at most 8 bytes."""
    whole = np.zeros((len(packed), NUMBER_BITS // 8), dtype=np.uint8)
    whole[:, : packed.shape[1]] = packed
    _, first, kind = np.unique(whole.view(np.uint64)[:, 0], return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.intp)
    place[order] = np.arange(len(order))
    return first[order], place[kind]


# How far a rank may lie off the even load, in parts of it per unit of price; from a soft aim to a
# sharp one, so that Newton's method never starts far off.
SOFTNESS = (1e-3, 3e-5)
MAX_STEPS = 40  # for each
SETTLED = 1e-4  # of the fluid: a largest gradient below it ends a stage
NUM_CUTS, CUT = 20, 0.3  # of a step that leads upwards
UNPROVEN = 1e-3  # a value this far above its bound is solved again, exactly
LEAST_SHARE = 1e-6  # smaller shares are none
DENSE_RANKS = 96  # with more, matrices over ranks are so empty that sparse ones are quicker
MAX_TOGETHER = 256  # ranks: with more, layers are solved one by one, each over groups of its own
MAX_ENTRIES = 2_000_000  # of matrices, at once: some tens of megabytes

Array = npt.NDArray[np.float64]
Hosts = tuple[Counts, ...]  # layer, expert and rank of every replica, in that order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinMaxSplit:
    """shares [layers, experts, ranks], of an expert 1 in all; `value` [layers] is the largest
    load_j / speed_j; `inside` [layers, ranks] a set of ranks and `bound` [layers] the rows that
    only these can take / their speed, at least the fluid: no shares over these replicas have a
    lower value than that.
    """

    shares: Array
    value: Array
    bound: Array
    inside: Flags

    def put(self, layers: Counts, other: "MinMaxSplit") -> None:
        """Takes these layers from `other`, in place."""
        for mine, theirs in (
            (self.shares, other.shares),
            (self.value, other.value),
            (self.bound, other.bound),
            (self.inside, other.inside),
        ):
            mine[layers] = theirs

    def of(self, layers: Counts) -> "MinMaxSplit":
        """The same of some layers only."""
        return MinMaxSplit(
            shares=self.shares[layers],
            value=self.value[layers],
            bound=self.bound[layers],
            inside=self.inside[layers],
        )


def min_max_split(
    loads: Array, replicas: Flags, speeds: Array, *, is_exact: bool = True
) -> MinMaxSplit:
    """Shares that minimise the largest load_j / speed_j of each layer, within a few 1e-4.

    Args:
        loads: [layers, experts] rows.
        replicas: [layers, experts, ranks]; each expert has at least one replica rank.
        speeds: [ranks], above 0.
        is_exact: solve layers exactly where Newton's method runs out of steps.

    Returns:
        Shares, values, and a lower bound with the set of ranks that proves it.
    """
    assert replicas.any(axis=2).all(), "an expert without replica"
    fluid = loads.sum(axis=1) / speeds.sum()
    rows = loads / np.where(fluid > 0.0, fluid, 1.0)[:, None]
    is_shared = replicas.sum(axis=2) > 1
    # Only experts with a choice take part; the others are a fixed load.
    fixed = np.einsum("le,ler->lr", np.where(is_shared, 0.0, rows), replicas.astype(np.float64))
    prices = np.empty_like(fixed)
    for part in _parts(replicas):
        pairs = _Pairs.of(np.where(is_shared[part], rows[part], 0.0), replicas[part], speeds)
        prices[part] = _prices(pairs, fixed[part], speeds)
    on = replicas.nonzero()
    shares, at_rank = _at_prices(rows, on, speeds, prices)
    value = at_rank.max(axis=1)
    inside, bound = _bottleneck(rows, on, speeds, at_rank)
    bound = np.maximum(bound, 1.0)
    # Newton's method may run out of steps where one bottleneck stands far above the rest.
    for at in (value > bound * (1.0 + UNPROVEN)).nonzero()[0].tolist() if is_exact else ():
        shares[at], value[at], bound[at], inside[at] = _exactly(rows[at], replicas[at], speeds)
    return MinMaxSplit(shares=shares, value=value * fluid, bound=bound * fluid, inside=inside)


def _at_prices(rows: Array, on: Hosts, speeds: Array, prices: Array) -> tuple[Array, Array]:
    """The shares [layers, experts, ranks] and the rows / speed [layers, ranks] they make."""
    layer, expert, rank = on
    owner = layer * rows.shape[1] + expert
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    logs = np.log(speeds)[rank] + prices[layer, rank]
    weights = np.exp(logs - np.maximum.reduceat(logs, first)[owner])
    part = weights / np.add.reduceat(weights, first)[owner]
    part[part < LEAST_SHARE] = 0.0
    part /= np.add.reduceat(part, first)[owner]
    shares = np.zeros((*rows.shape, len(speeds)))
    shares[layer, expert, rank] = part
    taken = rows[layer, expert] * part
    at = np.bincount(layer * len(speeds) + rank, taken, len(rows) * len(speeds))
    at_rank: Array = at.reshape(len(rows), -1) / speeds
    return shares, at_rank


def _parts(replicas: Flags) -> Iterator[slice]:
    """Layers in runs of at most MAX_ENTRIES entries of matrices (or one layer)."""
    num_ranks = replicas.shape[2]
    size = (replicas.sum(axis=2) ** 2).sum(axis=1) + num_ranks**2
    first, entries = 0, 0
    for layer, own in enumerate(size.tolist()):
        if entries + own > MAX_ENTRIES and layer > first:
            yield slice(first, layer)
            first, entries = layer, 0
        entries += own
    yield slice(first, len(replicas))


def _exactly(rows: Array, replicas: Flags, speeds: Array) -> tuple[Array, float, float, Flags]:
    """Shares [experts, ranks], value, bound and bottleneck of one layer, by a linear programme."""
    on = [np.flatnonzero(held).tolist() for held in replicas]
    split = exact_shares(rows.tolist(), on, dict(enumerate(speeds.tolist())))
    shares = np.zeros(replicas.shape)
    for expert, its_replicas in enumerate(split.replicas):
        for replica in its_replicas:
            shares[expert, replica.rank] = replica.share
    inside = np.zeros(len(speeds), dtype=np.bool_)
    inside[list(split.bound.bottleneck)] = True
    return shares, split.value, split.bound.value, inside


def shares_on_ranks(
    loads: Array, replicas: Flags, speeds: Array, *, is_exact: bool = True
) -> MinMaxSplit:
    """`min_max_split` over groups of ranks of equal experts; ranks of a group share by speed."""
    if replicas.shape[2] <= MAX_TOGETHER:
        return _over_groups(loads, replicas, speeds, is_exact)
    result: MinMaxSplit | None = None
    for layer in range(len(loads)):
        at = slice(layer, layer + 1)
        one = _over_groups(loads[at], replicas[at], speeds, is_exact)
        if result is None:
            result = one.of(np.zeros(len(loads), dtype=np.intp))
        result.put(np.array([layer]), one)
    assert result is not None, "at least one layer"
    return result


def _over_groups(loads: Array, replicas: Flags, speeds: Array, is_exact: bool) -> MinMaxSplit:
    first, group_of = unique_rows(replicas.reshape(-1, replicas.shape[2]).T)
    if len(first) == len(speeds):  # no two ranks are alike
        return min_max_split(loads, replicas, speeds, is_exact=is_exact)
    whole = np.bincount(group_of, weights=speeds).astype(np.float64)
    even = min_max_split(loads, replicas[:, :, first], whole, is_exact=is_exact)
    return MinMaxSplit(
        shares=even.shares[:, :, group_of] * (speeds / whole[group_of]),
        value=even.value,
        bound=even.bound,
        inside=even.inside[:, group_of],
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """The experts with a choice, and each of them with each of its replicas.

    layer, rows, first, number [experts]: `first` is where an expert's pairs begin, `number` counts
    them in its layer, `most` of them; expert, rank, log_weight [pairs].
    """

    num_layers: int
    num_ranks: int
    layer: Counts
    rows: Array
    first: Counts
    number: Counts
    most: int
    expert: Counts
    rank: Counts
    log_weight: Array

    @classmethod
    def of(cls, rows: Array, replicas: Flags, speeds: Array) -> "_Pairs":
        """rows [layers, experts], 0 where an expert takes no part."""
        layer, at = rows.nonzero()
        expert, rank = replicas[layer, at].nonzero()
        return cls._made(
            replicas.shape[0], len(speeds), layer, rows[layer, at], expert, rank, speeds
        )

    @classmethod
    def _made(
        cls,
        num_layers: int,
        num_ranks: int,
        layer: Counts,
        rows: Array,
        expert: Counts,
        rank: Counts,
        speeds: Array,
    ) -> "_Pairs":
        count = np.bincount(expert, minlength=len(layer))
        in_layer = np.bincount(layer, minlength=num_layers)
        return cls(
            num_layers=num_layers,
            num_ranks=num_ranks,
            layer=layer,
            rows=rows,
            first=np.cumsum(count) - count,
            number=np.arange(len(layer)) - (np.cumsum(in_layer) - in_layer)[layer],
            most=int(in_layer.max(initial=0)),
            expert=expert,
            rank=rank,
            log_weight=np.log(speeds)[rank],
        )

    def of_layers(self, layers: Counts, speeds: Array) -> "_Pairs":
        """Those of some layers, which are counted anew."""
        if len(layers) == self.num_layers:
            return self
        number = np.full(self.num_layers, -1)
        number[layers] = np.arange(len(layers))
        is_kept = number[self.layer] >= 0
        new = np.cumsum(is_kept) - 1
        pairs = is_kept[self.expert]
        return self._made(
            len(layers),
            self.num_ranks,
            number[self.layer[is_kept]],
            self.rows[is_kept],
            new[self.expert[pairs]],
            self.rank[pairs],
            speeds,
        )

    @property
    def place(self) -> Counts:
        """[pairs] into a flat [layers, ranks]."""
        flat: Counts = self.layer[self.expert] * self.num_ranks + self.rank
        return flat

    def split(self, prices: Array) -> tuple[Array, Array]:
        """The shares [pairs] at these prices, and each expert's log of all weights."""
        if len(self.layer) == 0:
            return np.zeros(0), np.zeros(0)
        logs = self.log_weight + prices.ravel()[self.place]
        top = np.maximum.reduceat(logs, self.first)
        weights = np.exp(logs - top[self.expert])
        total = np.add.reduceat(weights, self.first)
        return weights / total[self.expert], top + np.log(total)

    def value(self, prices: Array, log_total: Array, aim: "_Aim") -> Array:
        """[layers] sum over experts of rows * log sum exp, less speeds * prices, plus a soft
        square: what the prices minimise."""
        own = np.bincount(self.layer, self.rows * log_total, self.num_layers)
        linear = (prices * (aim.fixed - aim.speeds)).sum(axis=1)
        square = 0.5 * aim.softness * (aim.speeds * prices**2).sum(axis=1)
        result: Array = own + linear + square
        return result


@dataclass(frozen=True, slots=True)
class _Aim:
    """fixed [layers, ranks]: rows that have no choice."""

    fixed: Array
    speeds: Array
    softness: float


def _prices(pairs: _Pairs, fixed: Array, speeds: Array) -> Array:
    prices = np.zeros_like(fixed)
    for softness in SOFTNESS:
        active, part = np.arange(len(prices)), pairs
        for _ in range(MAX_STEPS):
            aim = _Aim(fixed[active], speeds, softness)
            prices[active], is_settled = _newton(part, prices[active], aim)
            if is_settled.all():
                break
            if is_settled.any():
                part = part.of_layers((~is_settled).nonzero()[0], speeds)
                active = active[~is_settled]
    return prices


def _newton(pairs: _Pairs, prices: Array, aim: _Aim) -> tuple[Array, Flags]:
    """One step cut as often as it takes, by layer; and which need no other."""
    speeds = aim.speeds
    shares, log_total = pairs.split(prices)
    taken = pairs.rows[pairs.expert] * shares
    load = np.bincount(pairs.place, taken, prices.size).reshape(prices.shape)
    slope = load + aim.fixed - speeds + aim.softness * speeds * prices
    is_settled: Flags = np.abs(slope / speeds).max(axis=1) < SETTLED
    if is_settled.all():
        return prices, is_settled
    step = -_curved(pairs, shares, taken, load + aim.softness * speeds, slope)
    before = pairs.value(prices, log_total, aim)
    expected = (slope * step).sum(axis=1)
    length = np.where(is_settled, 0.0, 1.0)
    for _ in range(NUM_CUTS):
        trial = prices + length[:, None] * step
        after = pairs.value(trial, pairs.split(trial)[1], aim)
        is_worse = after > before + 1e-4 * length * expected + 1e-12
        if not is_worse.any():
            break
        length[is_worse] *= CUT
    else:
        length[is_worse] = 0.0
    return prices + length[:, None] * step, is_settled


def _curved(pairs: _Pairs, shares: Array, taken: Array, own: Array, slope: Array) -> Array:
    """The slope [layers, ranks] over the curvature: own [layers, ranks] on the diagonal, less
    rows * shares x shares of every expert. With fewer experts than ranks by Woodbury's formula.
    """
    num = pairs.num_ranks
    if pairs.most < num:
        root = np.zeros((pairs.num_layers, pairs.most, num))
        at = (pairs.layer * pairs.most + pairs.number)[pairs.expert] * num + pairs.rank
        root.ravel()[at] = taken / np.sqrt(pairs.rows)[pairs.expert]
        over = root / own[:, None, :]
        inner = np.eye(pairs.most) - over @ root.transpose(0, 2, 1)
        mixed = np.linalg.solve(inner, over @ slope[:, :, None])
        result: Array = slope / own + (mixed * over).sum(axis=1)
        return result
    count = np.diff(pairs.first, append=len(pairs.expert))[pairs.expert]  # partners of each pair
    left = np.repeat(np.arange(len(pairs.expert)), count)
    turn = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
    right = pairs.first[pairs.expert[left]] + turn
    product, place = -taken[left] * shares[right], pairs.place
    if num <= DENSE_RANKS:
        entries = np.bincount(place[left] * num + pairs.rank[right], product, own.size * num)
        curve: Array = entries.astype(np.float64).reshape(*own.shape, num)
        curve[:, np.arange(num), np.arange(num)] += own
        return np.linalg.solve(curve, slope[:, :, None])[:, :, 0].astype(np.float64)
    from scipy.sparse import csc_array  # not at start-up
    from scipy.sparse.linalg import splu

    at_own = np.arange(own.size)
    rows, columns = np.concatenate([place[left], at_own]), np.concatenate([place[right], at_own])
    values = np.concatenate([product, own.ravel()])
    whole = csc_array((values, (rows, columns)), shape=(own.size, own.size))
    factors = splu(whole, diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    result = factors.solve(slope.ravel()).reshape(own.shape)
    return result


def _bottleneck(rows: Array, on: Hosts, speeds: Array, at_rank: Array) -> tuple[Flags, Array]:
    """[layers, ranks] the densest set of most loaded ranks, and its rows / speed."""
    num_layers, num_ranks = at_rank.shape
    order = np.argsort(-at_rank, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    # An expert lies inside the first k ranks once its last replica is among them.
    at_layer, at_expert, rank = on
    first = np.flatnonzero(np.diff(at_layer * rows.shape[1] + at_expert, prepend=-1))
    last = np.maximum.reduceat(place[at_layer, rank], first).reshape(rows.shape)
    layer = np.arange(num_layers)
    flat = layer[:, None] * num_ranks + last
    by_last = np.bincount(flat.ravel(), weights=rows.ravel(), minlength=num_layers * num_ranks)
    density = by_last.reshape(num_layers, num_ranks).cumsum(axis=1)
    density /= speeds[order].cumsum(axis=1)
    best = density.argmax(axis=1)
    inside: Flags = place <= best[:, None]
    result: Array = density[layer, best]
    return inside, result
