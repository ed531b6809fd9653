"""Who should hold which expert replica, and who computes which share, given speeds. Pure.

For fixed hosts the best split of one layer's tokens is a linear programme: minimise the largest
load_j / speed_j. Its value has a closed form, max over rank sets S of (load that only S can take) /
(speed of S); the set that attains it is the witness that says why a placement is stuck.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout import ExpertHosts, Host, Layout

TOLERANCE = 0.02  # of the fluid bound: a layer within it is left alone
TIE_BREAK = 0.02  # of the fluid value: what it may cost to stay near speed-proportional shares
MIN_SHARE = 1e-4  # smaller shares are none
MAX_MOVES_PER_LAYER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One layer's token shares with its certificate, all in token rows per unit of speed.

    `value`: the largest load_j / speed_j; `fluid`: total load / total speed, a lower bound for any
    placement; `witness`: the ranks at the value.
    """

    hosts: tuple[ExpertHosts, ...]
    value: float
    fluid: float
    witness: tuple[int, ...]


def token_shares(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> Split:
    """The best token shares for fixed hosts.

    loads[e] >= 0, hosts[e] the ranks that hold expert e, speeds[rank] > 0. Among (nearly) best
    splits the one nearest to speed-proportional shares, so that noise in the loads hurts no one
    host. Raises ValueError for a negative load, an expert without host, or a speed not above 0.
    """
    from scipy.optimize import linprog  # a quarter second to import: not at start-up
    from scipy.sparse import coo_array, vstack

    _check(loads, hosts, speeds)
    ranks = sorted(speeds)
    position = {rank: i for i, rank in enumerate(ranks)}
    speed = np.array([speeds[rank] for rank in ranks])
    total = float(sum(loads))
    fluid = total / float(speed.sum())
    pairs = [(e, rank) for e, on in enumerate(hosts) for rank in sorted(on)]
    reference = np.array([speeds[r] / sum(speeds[x] for x in hosts[e]) for e, r in pairs])
    if total <= 0.0:
        idle = _with_shares(len(hosts), pairs, reference.tolist())
        return Split(hosts=idle, value=0.0, fluid=0.0, witness=())
    num_pairs, num_ranks, num_experts = len(pairs), len(ranks), len(hosts)
    pair_range = np.arange(num_pairs)
    expert_of = np.array([e for e, _ in pairs])
    rank_of = np.array([position[r] for _, r in pairs])
    load_of = np.array([loads[e] for e, _ in pairs]) / fluid
    # Variables: share of each pair, its distance from the reference, and the value (in fluids).
    rows = np.concatenate([rank_of, np.arange(num_ranks)])
    columns = np.concatenate([pair_range, np.full(num_ranks, 2 * num_pairs)])
    values = np.concatenate([load_of, -speed])
    shape = (num_ranks, 2 * num_pairs + 1)
    per_rank = coo_array((values, (rows, columns)), shape=shape)
    sign = np.concatenate([np.ones(num_pairs), -np.ones(num_pairs)])
    # +-(share - reference) - distance <= 0, one row per pair and sign.
    twice = np.arange(2 * num_pairs)
    distance = coo_array(
        (
            np.concatenate([sign, -np.ones(2 * num_pairs)]),
            (
                np.concatenate([twice, twice]),
                np.concatenate([np.tile(pair_range, 2), np.tile(pair_range + num_pairs, 2)]),
            ),
        ),
        shape=(2 * num_pairs, 2 * num_pairs + 1),
    )
    sums = coo_array(
        (np.ones(num_pairs), (expert_of, pair_range)), shape=(num_experts, 2 * num_pairs + 1)
    )
    cost = np.concatenate(
        [np.zeros(num_pairs), TIE_BREAK * load_of / max(1.0, load_of.sum()), [1.0]]
    )
    solution = linprog(
        cost,
        A_ub=vstack([per_rank, distance]).tocsr(),
        b_ub=np.concatenate([np.zeros(num_ranks), sign * np.tile(reference, 2)]),
        A_eq=sums.tocsr(),
        b_eq=np.ones(num_experts),
        bounds=(0.0, None),
        method="highs",
    )
    assert solution.status == 0, f"the split is always feasible: {solution.message}"
    split = _with_shares(num_experts, pairs, solution.x[:num_pairs].tolist())
    ratio = _load_by_rank(split, loads, position) / speed
    value = float(ratio.max())
    witness = tuple(r for r, x in zip(ranks, ratio, strict=True) if x >= value * (1 - 1e-6))
    return Split(hosts=split, value=value, fluid=fluid, witness=witness)


def batch_rows(num_rows: int, speeds: Mapping[int, float]) -> dict[int, int]:
    """Whole rows per rank that minimise the largest rows_j / speed_j (greedy is exact here).

    Raises ValueError for fewer rows than none, or a speed not above 0.
    """
    if num_rows < 0 or not all(speed > 0.0 for speed in speeds.values()):
        raise ValueError("rows must not be negative and speeds must be above 0")
    rows = dict.fromkeys(sorted(speeds), 0)
    for _ in range(num_rows):
        rows[min(rows, key=lambda rank: ((rows[rank] + 1) / speeds[rank], rank))] += 1
    return rows


def reshare(
    layout: Layout,
    *,
    loads: Sequence[Sequence[float]],
    speeds: Mapping[int, float],
) -> tuple[tuple[ExpertHosts, ...], ...]:
    """The best token shares of every layer for the hosts as they are."""
    layers = []
    for layer, layer_loads in enumerate(loads):
        on = [[host.rank for host in hosts] for hosts in layout.experts[layer]]
        at = {rank: speeds[rank] for rank in layout.stage_of(layer).ranks}
        layers.append(token_shares(layer_loads, on, at).hosts)
    return tuple(layers)


def place(
    layout: Layout,
    *,
    loads: Sequence[Sequence[float]],
    speeds: Mapping[int, float],
    slots_per_rank: int,
) -> tuple[tuple[ExpertHosts, ...], ...]:
    """Hosts and shares of every layer, from the present hosts by the fewest useful changes.

    Local search along the witness: an expert whose hosts all are at the limit gets one more host
    (a free slot) or another one instead of its slowest. Stops within TOLERANCE of the fluid
    bound or when nothing helps. An expert never loses hosts, and no rank holds one twice.
    """
    layers = []
    for layer, layer_loads in enumerate(loads):
        on = [[host.rank for host in hosts] for hosts in layout.experts[layer]]
        at = {rank: speeds[rank] for rank in layout.stage_of(layer).ranks}
        layers.append(_improve(on, layer_loads, at, slots_per_rank).hosts)
    return tuple(layers)


def _improve(
    on: list[list[int]], loads: Sequence[float], speeds: Mapping[int, float], slots: int
) -> Split:
    best = token_shares(loads, on, speeds)
    for _ in range(MAX_MOVES_PER_LAYER):
        if best.value <= best.fluid * (1.0 + TOLERANCE):
            break
        options = [
            (token_shares(loads, changed, speeds), changed)
            for changed in _changes(on, loads, best.witness, speeds, slots)
        ]
        if not options:
            break
        found, changed = min(options, key=lambda option: option[0].value)
        if found.value > best.value * (1.0 - TOLERANCE / 4):
            break
        best, on = found, changed
    return best


def _changes(
    on: list[list[int]],
    loads: Sequence[float],
    witness: tuple[int, ...],
    speeds: Mapping[int, float],
    slots: int,
) -> list[list[list[int]]]:
    """Host lists one change away that let load leave the witness: heaviest experts first."""
    used = {rank: sum(rank in hosts for hosts in on) for rank in speeds}
    stuck = [e for e, hosts in enumerate(on) if set(hosts) <= set(witness)]
    stuck.sort(key=lambda e: (-loads[e], e))
    outside = [rank for rank in sorted(speeds) if rank not in witness and used[rank] < slots]
    result = []
    for expert in stuck[:4]:
        for fresh in outside:
            if fresh in on[expert]:
                continue
            added = [list(hosts) for hosts in on]
            added[expert] = sorted([*on[expert], fresh])
            result.append(added)
    return result


def _with_shares(
    num_experts: int, pairs: Sequence[tuple[int, int]], shares: Sequence[float]
) -> tuple[ExpertHosts, ...]:
    """Hosts with cleaned-up shares: tiny ones become 0, sums exactly 1."""
    found: list[list[Host]] = [[] for _ in range(num_experts)]
    for (expert, rank), share in zip(pairs, shares, strict=True):
        found[expert].append(Host(rank, float(share) if share > MIN_SHARE else 0.0))
    result = []
    for hosts in found:
        total = sum(host.share for host in hosts)
        result.append(tuple(Host(host.rank, host.share / total) for host in hosts))
    return tuple(result)


def _load_by_rank(
    hosts: Sequence[ExpertHosts], loads: Sequence[float], position: Mapping[int, int]
) -> npt.NDArray[np.float64]:
    load = np.zeros(len(position))
    for expert_hosts, expert_load in zip(hosts, loads, strict=True):
        for host in expert_hosts:
            load[position[host.rank]] += host.share * expert_load
    return load


def _check(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> None:
    if len(loads) != len(hosts):
        raise ValueError(f"{len(loads)} loads for {len(hosts)} experts")
    if any(not load >= 0.0 for load in loads):
        raise ValueError("loads must not be negative")
    if any(not speed > 0.0 for speed in speeds.values()):
        raise ValueError("speeds must be above 0")
    for expert, on in enumerate(hosts):
        if not on or not set(on) <= set(speeds):
            raise ValueError(f"expert {expert}: hosts {list(on)} must be ranks with a speed")
