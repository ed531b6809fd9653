"""Shares and placements at the size of a large model, 60 layers x 256 experts: how long they take,
and how near they come to what no placement with so many slots can beat.

Loads are Zipf-like from a fixed seed; with --data that holds `smartmoe_routing`, also the recorded
routing of a real model. One rank runs at 0.6 of its speed; one thread, as in the controller. Prints
a table, last one line of JSON.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from pacekeeper.controller.planning.experts.certificate import lower_bound
from pacekeeper.controller.planning.token_split.linear_program import batch_rows
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.replica_candidates import ReplicaRequest, plan_replicas
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ReplicaSet

Loads = npt.NDArray[np.float64]  # [layers, experts]
SLOW_RANK, SLOW_SPEED = 3, 0.6
MIN_HOSTS = 2


def zipf_loads(num_layers: int, num_experts: int, exponent: float = 0.8) -> Loads:
    """Each layer its own order of hot experts, the same skew; 8 choices of 32768 tokens."""
    random = np.random.default_rng(0)
    skew = np.arange(1, num_experts + 1) ** -exponent
    skew = skew / skew.sum() * 8 * 32768
    return np.stack([random.permutation(skew) for _ in range(num_layers)])


def recorded_loads(data: Path) -> Loads | None:
    """Tokens per layer and expert of iteration 2,000 of a recorded run, all ranks together."""
    path = data / "smartmoe_routing" / "expert_tokens.npz"
    if not path.exists():
        return None
    with np.load(path) as trace:
        at = int(np.abs(trace["iteration"].astype(int) - 2000).argmin())
        counts: Loads = trace["counts"][at].sum(axis=0).astype(np.float64)
    return counts


def placement_request(loads: Loads, num_ranks: int, slots: int) -> ReplicaRequest:
    """A step of a second, a thousand of them until the next plan, 50 ms for each copy."""
    return ReplicaRequest(
        slots_per_rank=slots,
        min_hosts=MIN_HOSTS,
        spread=SpreadFloor(),
        row_s=num_ranks / float(loads.sum()),
        replica_s=0.0,
        num_steps=1000,
        move_s=0.05,
        restart_s=600.0,
        failure_probability=0.01,
    )


def measure(
    name: str, loads: Loads, *, num_ranks: int, replicas: int, spare_slots: int = 1
) -> dict[str, float | str]:
    """One case: time, and how far the slowest rank of the average layer is above the fluid.

    `least_over_fluid`: where the slots do not suffice for the fluid.
    """
    num_layers, num_experts = loads.shape
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=replicas,
    )
    slots = -(-num_experts * replicas // num_ranks) + spare_slots
    speeds = {rank: SLOW_SPEED if rank == SLOW_RANK else 1.0 for rank in range(num_ranks)}
    by_layer = loads.tolist()
    began_s = time.perf_counter()
    splits = split_layers(layout, loads=by_layer, speeds=speeds)
    shared_s = time.perf_counter()
    plan = plan_replicas(
        layout, splits, by_layer, speeds, placement_request(loads, num_ranks, slots)
    )
    placed = plan.experts if plan else tuple(split.replicas for split in splits)
    placed_s = time.perf_counter()
    batch_rows(8 * num_ranks, speeds)
    even = [
        _value(layout.experts[layer], by_layer[layer], speeds) / splits[layer].bound.fluid
        for layer in range(num_layers)
    ]
    floor = [MIN_HOSTS] * num_experts
    least = [
        lower_bound(row, speeds, num_slots=slots * num_ranks, min_hosts=floor) for row in by_layer
    ]
    return {
        "case": name,
        "layers": num_layers,
        "experts": num_experts,
        "ranks": num_ranks,
        "replicas": replicas,
        "slots": slots,
        "shares_ms_per_layer": (shared_s - began_s) * 1e3 / num_layers,
        "shares_s": shared_s - began_s,
        "place_s": placed_s - shared_s,
        "even_over_fluid": float(np.mean(even)),
        "shares_over_fluid": float(np.mean([s.value / s.bound.fluid for s in splits])),
        "placed_over_fluid": float(
            np.mean(
                [
                    _value(placed[layer], by_layer[layer], speeds) / splits[layer].bound.fluid
                    for layer in range(num_layers)
                ]
            )
        ),
        "least_over_fluid": float(
            np.mean([value / s.bound.fluid for value, s in zip(least, splits, strict=True)])
        ),
        "copied_per_layer": float(np.mean([*map(_num_copied, layout.experts, placed)])),
    }


def _num_copied(before: Sequence[ReplicaSet], after: Sequence[ReplicaSet]) -> int:
    old, new = (
        {(e, host.rank) for e, on in enumerate(hosts) for host in on} for hosts in (before, after)
    )
    return len(new - old)


def _value(experts: Sequence[ReplicaSet], loads: list[float], speeds: dict[int, float]) -> float:
    at = dict.fromkeys(speeds, 0.0)
    for hosts, load in zip(experts, loads, strict=True):
        for host in hosts:
            at[host.rank] += host.share * load
    return max(at[rank] / speeds[rank] for rank in speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--layers", type=int, default=60)
    arguments = parser.parse_args()
    # The first call pays the imports of the solver.
    measure("warm-up", zipf_loads(1, 8), num_ranks=4, replicas=2)
    recorded = recorded_loads(arguments.data)
    with threadpool_limits(1):
        cases = [
            measure("zipf 0.8", zipf_loads(arguments.layers, 256), num_ranks=n, replicas=r)
            for n, r in ((32, 2), (64, 2), (256, 2), (256, 3))
        ]
        cases += [
            measure(
                "no slot to spare",
                zipf_loads(arguments.layers, 256),
                num_ranks=n,
                replicas=2,
                spare_slots=0,
            )
            for n in (32, 64)
        ]
        if recorded is not None:
            cases.append(measure("recorded", recorded, num_ranks=16, replicas=2))
    columns = list(cases[0])
    print("  ".join(f"{name:>19}" for name in columns))
    for case in cases:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in case.values()]
        print("  ".join(f"{cell:>19}" for cell in cells))
    print(json.dumps(cases))


if __name__ == "__main__":
    main()
