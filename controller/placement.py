"""Who should hold which expert replica, given loads, speeds and slots. Pure.

Local search from the present hosts along the witness of the split (`shares.py`): an expert whose
hosts are all at the limit gets a host outside. Few, useful changes; ties go to the lowest index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pacekeeper.controller.shares import Optimum, Split, best_value, token_shares
from pacekeeper.core.layout import Layout

TOLERANCE = 0.02  # of the fluid bound: a layer within it is left alone
WORTH_A_CHANGE = 0.005  # of a layer's value: smaller improvements are not worth moving state
MAX_CHANGES_PER_LAYER = 6
# Width of one look: the heaviest stuck experts times the ranks with most room.
MAX_EXPERTS, MAX_TARGETS = 4, 4
# Linear programmes in one call, all layers together: bounds the time at any cluster size.
MAX_TRIALS = 128

Hosts = tuple[tuple[int, ...], ...]  # [expert] -> ranks, ascending


@dataclass(slots=True)
class _Budget:
    """Trials left in one call of `place`."""

    trials: int


def place(
    layout: Layout,
    *,
    splits: Sequence[Split],
    loads: Sequence[Sequence[float]],
    speeds: Mapping[int, float],
    slots_per_rank: int,
    min_hosts: int,
) -> tuple[Split, ...]:
    """Hosts and token shares of every layer, from the present hosts by the fewest useful changes.

    `splits`: the best shares over the present hosts (`shares.split_layers`); layers that need no
    change keep theirs. A change gives an expert of the witness a host outside of it: a free slot;
    or the slot of an expert that has more than `min_hosts` hosts; or two replicas swap their ranks.
    No rank takes on an expert it holds, or more than `slots_per_rank` replicas of a layer. The
    layers farthest above the fluid bound come first. loads[layer][expert] in token rows.
    """
    result = list(splits)
    budget = _Budget(MAX_TRIALS)
    above_fluid = [split.bound.value - split.bound.fluid for split in splits]
    for layer in sorted(range(len(splits)), key=lambda i: (-above_fluid[i], i)):
        hosts = tuple(tuple(host.rank for host in on) for on in layout.experts[layer])
        at = {rank: speeds[rank] for rank in layout.stage_of(layer).ranks}
        changed = _improve(
            hosts,
            loads[layer],
            at,
            start=splits[layer].bound,
            slots=slots_per_rank,
            min_hosts=min_hosts,
            budget=budget,
        )
        if changed != hosts:
            result[layer] = token_shares(loads[layer], changed, at)
    return tuple(result)


def _improve(
    hosts: Hosts,
    loads: Sequence[float],
    speeds: Mapping[int, float],
    *,
    start: Optimum,
    slots: int,
    min_hosts: int,
    budget: _Budget,
) -> Hosts:
    best = start
    for _ in range(MAX_CHANGES_PER_LAYER):
        if best.value <= best.fluid * (1.0 + TOLERANCE):
            break
        found: tuple[Optimum, Hosts] | None = None
        for changed in _changes(hosts, loads, speeds, best.witness, slots, min_hosts):
            if budget.trials == 0:
                break
            budget.trials -= 1
            value = best_value(loads, changed, speeds)
            if found is None or value.value < found[0].value * (1.0 - 1e-9):
                found = value, changed
        if found is None or found[0].value > best.value * (1.0 - WORTH_A_CHANGE):
            break
        best, hosts = found
    return hosts


def _changes(
    hosts: Hosts,
    loads: Sequence[float],
    speeds: Mapping[int, float],
    witness: tuple[int, ...],
    slots: int,
    min_hosts: int,
) -> list[Hosts]:
    """Host lists one change away that let load leave the witness: heaviest experts first."""
    inside = set(witness)
    used = {rank: 0 for rank in speeds}
    burden = dict.fromkeys(speeds, 0.0)  # at speed-proportional shares, per unit of speed
    for on, load in zip(hosts, loads, strict=True):
        speed = sum(speeds[rank] for rank in on)
        for rank in on:
            used[rank] += 1
            burden[rank] += load / speed
    stuck = [e for e, on in enumerate(hosts) if set(on) <= inside and loads[e] > 0.0]
    stuck.sort(key=lambda e: (-loads[e], e))
    outside = sorted((r for r in speeds if r not in inside), key=lambda r: (burden[r], r))
    result = []
    for expert in stuck[:MAX_EXPERTS]:
        for fresh in outside[:MAX_TARGETS]:
            if used[fresh] < slots:
                result.append(_with_host(hosts, expert, fresh))
                continue
            guests = [e for e, on in enumerate(hosts) if fresh in on]
            spare = [e for e in guests if len(hosts[e]) > min_hosts]
            if spare:
                dropped = min(spare, key=lambda e: (loads[e] / len(hosts[e]), e))
                without = _without_host(hosts, dropped, fresh)
                result.append(_with_host(without, expert, fresh))
            swap = _swap(hosts, expert, fresh, guests, loads, burden)
            if swap is not None:
                result.append(swap)
    return result


def _swap(
    hosts: Hosts,
    expert: int,
    fresh: int,
    guests: Sequence[int],
    loads: Sequence[float],
    burden: Mapping[int, float],
) -> Hosts | None:
    """`expert` leaves its most burdened host for `fresh`, whose lightest guest goes there."""
    left = max(hosts[expert], key=lambda rank: (burden[rank], -rank))
    free = [e for e in guests if left not in hosts[e]]
    if not free:
        return None
    guest = min(free, key=lambda e: (loads[e] / len(hosts[e]), e))
    swapped = _with_host(_without_host(hosts, expert, left), expert, fresh)
    return _with_host(_without_host(swapped, guest, fresh), guest, left)


def _with_host(hosts: Hosts, expert: int, rank: int) -> Hosts:
    assert rank not in hosts[expert], "a rank holds an expert once"
    return (*hosts[:expert], tuple(sorted((*hosts[expert], rank))), *hosts[expert + 1 :])


def _without_host(hosts: Hosts, expert: int, rank: int) -> Hosts:
    left = tuple(r for r in hosts[expert] if r != rank)
    return (*hosts[:expert], left, *hosts[expert + 1 :])
