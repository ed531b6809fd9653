"""Even token shares over fixed hosts, all layers at once. Pure.

Every rank gets one price u_j per layer; an expert splits over its hosts in proportion to
speed_j * exp(u_j). The prices minimise a smooth convex function whose optimum is the split with the
least sum of speed_j * (load_j / speed_j)^2: among all splits that one also has the least maximum
(the base of a polymatroid that is lexicographically least serves every convex aim). Newton's
method, one small matrix per layer, all layers in one array.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.shares import exact_shares

# How far a rank may lie off the even load, in parts of it per unit of price; from a soft aim to a
# sharp one, so that Newton's method never starts far off.
SOFTNESS = (1e-3, 3e-5)
MAX_STEPS = 40  # for each
SETTLED = 1e-4  # of the fluid: a largest gradient below it ends a stage
NUM_CUTS, CUT = 20, 0.3  # of a step that leads upwards
UNPROVEN = 1e-3  # a value this far above its bound is solved again, exactly
LEAST_SHARE = 1e-6  # smaller shares are none

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvenShares:
    """shares [layers, experts, ranks], of an expert 1 in all; `value` [layers] is the largest
    load_j / speed_j; `inside` [layers, ranks] a set of ranks and `bound` [layers] the rows that
    only these can take / their speed, at least the fluid: no shares over these hosts have a lower
    value than that.
    """

    shares: Array
    value: Array
    bound: Array
    inside: Flags


def even_shares(loads: Array, hosts: Flags, speeds: Array) -> EvenShares:
    """loads [layers, experts] rows, hosts [layers, experts, ranks], each expert with one at least;
    speeds [ranks] > 0. The value is within a few 1e-4 of the least, and `bound` proves it.
    """
    assert hosts.any(axis=2).all(), "an expert without host"
    fluid = loads.sum(axis=1) / speeds.sum()
    unit = np.where(fluid > 0.0, fluid, 1.0)
    rows = loads / unit[:, None]
    is_shared = hosts.sum(axis=2) > 1
    order = np.argsort(~is_shared, axis=1, kind="stable")[:, : max(1, int(is_shared.sum(1).max()))]
    layer = np.arange(len(loads))[:, None]
    # Only experts with a choice take part; the others are a fixed load.
    chosen = np.where(is_shared[layer, order], rows[layer, order], 0.0)
    fixed = np.einsum("le,ler->lr", np.where(is_shared, 0.0, rows), hosts.astype(np.float64))
    log_weight = np.where(hosts[layer, order], np.log(speeds), -np.inf)
    prices = _prices(chosen, log_weight, fixed, speeds)
    shares = hosts.astype(np.float64)
    shares[layer, order] = _split(log_weight, prices)[0]
    shares[shares < LEAST_SHARE] = 0.0
    shares /= shares.sum(axis=2, keepdims=True)
    at_rank = np.einsum("le,ler->lr", rows, shares) / speeds
    value = at_rank.max(axis=1)
    inside, bound = _witness(rows, hosts, speeds, at_rank)
    bound = np.maximum(bound, 1.0)
    # Newton's method may run out of steps where one witness stands far above the rest.
    for at in (value > bound * (1.0 + UNPROVEN)).nonzero()[0].tolist():
        shares[at], value[at], bound[at], inside[at] = _exactly(rows[at], hosts[at], speeds)
    return EvenShares(shares=shares, value=value * fluid, bound=bound * fluid, inside=inside)


def _exactly(rows: Array, hosts: Flags, speeds: Array) -> tuple[Array, float, float, Flags]:
    """Shares [experts, ranks], value, bound and witness of one layer, by a linear programme."""
    on = [np.flatnonzero(held).tolist() for held in hosts]
    split = exact_shares(rows.tolist(), on, dict(enumerate(speeds.tolist())))
    shares = np.zeros(hosts.shape)
    for expert, its_hosts in enumerate(split.hosts):
        for host in its_hosts:
            shares[expert, host.rank] = host.share
    inside = np.zeros(len(speeds), dtype=np.bool_)
    inside[list(split.bound.witness)] = True
    return shares, split.value, split.bound.value, inside


def grouped(hosts: Flags) -> tuple[tuple[tuple[int, ...], ...], Flags]:
    """Ranks that hold the same experts in all layers, and hosts [layers, experts, groups] of these.

    hosts [layers, experts, ranks]. Such ranks share alike by speed, so they are solved as one.
    """
    columns = np.packbits(hosts.reshape(-1, hosts.shape[2]), axis=0).T
    _, first, group_of = np.unique(columns, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(group_of.ravel(), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(group_of.ravel()))[:-1])
    return tuple(tuple(part.tolist()) for part in parts), hosts[:, :, first]


def shares_of_layer(loads: Array, hosts: Flags, speeds: Array) -> EvenShares:
    """Of one layer: loads [experts], hosts [experts, ranks]; solved over groups."""
    groups, on_groups = grouped(hosts[None])
    group_of = np.empty(len(speeds), dtype=np.intp)
    for group, ranks in enumerate(groups):
        group_of[list(ranks)] = group
    whole = np.bincount(group_of, weights=speeds).astype(np.float64)
    even = even_shares(loads[None], on_groups, whole)
    return EvenShares(
        shares=even.shares[:, :, group_of] * (speeds / whole[group_of]),
        value=even.value,
        bound=even.bound,
        inside=even.inside[:, group_of],
    )


def joined(layers: Iterable[EvenShares]) -> EvenShares:
    """Several solutions as one."""
    parts = list(layers)
    return EvenShares(
        shares=np.concatenate([part.shares for part in parts]),
        value=np.concatenate([part.value for part in parts]),
        bound=np.concatenate([part.bound for part in parts]),
        inside=np.concatenate([part.inside for part in parts]),
    )


def _split(log_weight: Array, prices: Array) -> tuple[Array, Array]:
    """The shares [layers, experts, ranks] at these prices, and each expert's log of all weights."""
    logs = log_weight + prices[:, None, :]
    top = logs.max(axis=2, keepdims=True)
    weights = np.exp(logs - top)
    total = weights.sum(axis=2, keepdims=True)
    return weights / total, (top + np.log(total))[:, :, 0]


def _prices(rows: Array, log_weight: Array, fixed: Array, speeds: Array) -> Array:
    prices = np.zeros_like(fixed)
    for softness in SOFTNESS:
        active = np.arange(len(rows))
        for _ in range(MAX_STEPS):
            here = _Aim(rows[active], log_weight[active], fixed[active], speeds, softness)
            moved, is_settled = here.newton(prices[active])
            prices[active] = moved
            active = active[~is_settled]
            if len(active) == 0:
                break
    return prices


@dataclass(frozen=True, slots=True)
class _Aim:
    """Sum over experts of rows * log sum exp, less speeds * prices, plus a soft square."""

    rows: Array
    log_weight: Array
    fixed: Array
    speeds: Array
    softness: float

    def value(self, prices: Array, log_total: Array) -> Array:
        linear = (prices * (self.fixed - self.speeds)).sum(axis=1)
        square: Array = 0.5 * self.softness * (self.speeds * prices**2).sum(axis=1)
        result: Array = (self.rows * log_total).sum(axis=1) + linear + square
        return result

    def newton(self, prices: Array) -> tuple[Array, Flags]:
        """One step cut as often as it takes, by layer; and which need no other."""
        shares, log_total = _split(self.log_weight, prices)
        taken = self.rows[:, :, None] * shares
        load = taken.sum(axis=1)
        slope = load + self.fixed - self.speeds + self.softness * self.speeds * prices
        is_settled: Flags = np.abs(slope / self.speeds).max(axis=1) < SETTLED
        if is_settled.all():
            return prices, is_settled
        curve = -np.matmul(shares.transpose(0, 2, 1), taken)
        ranks = np.arange(len(self.speeds))
        curve[:, ranks, ranks] += load + self.softness * self.speeds
        step = -np.linalg.solve(curve, slope[:, :, None])[:, :, 0]
        before = self.value(prices, log_total)
        expected = (slope * step).sum(axis=1)
        length = np.where(is_settled, 0.0, 1.0)
        worse = (~is_settled).nonzero()[0]
        for _ in range(NUM_CUTS):
            after = self._at(worse, prices[worse] + length[worse, None] * step[worse])
            worse = worse[after > (before + 1e-4 * length * expected + 1e-12)[worse]]
            if len(worse) == 0:
                break
            length[worse] *= CUT
        length[worse] = 0.0
        return prices + length[:, None] * step, is_settled

    def _at(self, layers: npt.NDArray[np.intp], prices: Array) -> Array:
        part = replace(
            self,
            rows=self.rows[layers],
            log_weight=self.log_weight[layers],
            fixed=self.fixed[layers],
        )
        return part.value(prices, _split(part.log_weight, prices)[1])


def _witness(rows: Array, hosts: Flags, speeds: Array, at_rank: Array) -> tuple[Flags, Array]:
    """The densest of the sets "ranks at least so loaded", by layer, and its rows / speed."""
    num_layers, num_ranks = at_rank.shape
    order = np.argsort(-at_rank, axis=1, kind="stable")
    place = np.argsort(order, axis=1)
    # An expert lies inside the first k ranks once its last host is among them.
    last = np.where(hosts, place[:, None, :], -1).max(axis=2)
    layer = np.arange(num_layers)
    flat = layer[:, None] * num_ranks + last
    by_last = np.bincount(flat.ravel(), weights=rows.ravel(), minlength=num_layers * num_ranks)
    density = by_last.reshape(num_layers, num_ranks).cumsum(axis=1)
    density /= speeds[order].cumsum(axis=1)
    best = density.argmax(axis=1)
    inside: Flags = place <= best[:, None]
    result: Array = density[layer, best]
    return inside, result
