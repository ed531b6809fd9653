"""How much does a placement of experts survive, and how even is it? Ours beside Lazarus and EPLB.

`python -m benchmarks.placement_survival`; seconds. First the set-up of the Lazarus paper, recorded
routing (`smartmoe_routing`, iteration 201): 10 nodes, 6 slots, the busiest 8, 12 or 16 experts of
each of 12 layers, at least 2 nodes for each; a loss is survived only if all layers are. Then single
layers with Zipf loads. Every part is exact (all sets of lost nodes). Load is max / mean over nodes:
Lazarus and EPLB with equal shares, as published, and with the best split over their hosts. Ours
also where 1 % above the bound counts as even, so that survival decides below that.
Then the layout a job starts with, before loads are known. Last the promise that fewer losses are
survived than each expert has replicas, in all small cases (research 1.6): how often each planner
breaks it.
Prints tables, last one line of JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks import eplb
from pacekeeper.controller.planning.experts.certificate import survival_by
from pacekeeper.controller.planning.experts.planner import plan_experts
from pacekeeper.controller.planning.experts.problem import Floors, Prices, alike
from pacekeeper.controller.planning.reliability import minimal_cut_sets, survival, survival_bound
from pacekeeper.controller.planning.token_split.min_max import min_max_split
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.simulator.baselines import lazarus

NUM_NODES, SLOTS, FLOOR = 10, 6, 2
MODELS = {"GPT-S": 8, "GPT-M": 12, "GPT-L": 16}
ITERATION = 201
SHOWN = range(1, 8)
SMALL_NODES, SMALL_SLOTS, SMALL_EXPERTS, SMALL_REPLICAS = 7, 4, 7, 18  # of the small cases, at most

# nodes, ranks of each, layers, experts of each, replicas of each
FIRST = ((8, 1, 12, 16, 2), (8, 2, 12, 16, 2), (8, 8, 58, 256, 2), (16, 4, 58, 256, 3))

Loads = npt.NDArray[np.float64]
Row = dict[str, object]


def recorded_loads(data: Path, num_experts: int) -> Loads:
    """[layers, experts], each layer's busiest first."""
    with np.load(data / "smartmoe_routing" / "expert_tokens.npz") as trace:
        (at,) = np.flatnonzero(trace["iteration"] == ITERATION)
        counts = trace["counts"][at].sum(axis=0).astype(np.float64)
    busiest: Loads = -np.sort(-counts, axis=1)[:, :num_experts]
    return busiest


def overlap(loads: Sequence[float]) -> lazarus.Placement:
    counts = lazarus.replica_counts(loads, num_slots=NUM_NODES * SLOTS, min_replicas=FLOOR)
    return lazarus.maximum_rank_overlap(counts, num_nodes=NUM_NODES, slots_per_node=SLOTS)


def spread(counts: Sequence[int], *, num_nodes: int, slots_per_node: int) -> lazarus.Placement:
    """Replicas dealt out to the nodes in turn, expert by expert: the paper's first comparison."""
    dealt = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert len(dealt) == num_nodes * slots_per_node
    return tuple(tuple(sorted(dealt[node::num_nodes])) for node in range(num_nodes))


def compact(counts: Sequence[int], *, num_nodes: int, slots_per_node: int) -> lazarus.Placement:
    """Replicas packed node after node, expert by expert: the paper's second comparison."""
    dealt = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert len(dealt) == num_nodes * slots_per_node
    return tuple(
        tuple(dealt[node * slots_per_node : (node + 1) * slots_per_node])
        for node in range(num_nodes)
    )


def hosts_of(placement: lazarus.Placement, num_experts: int) -> list[list[int]]:
    """The nodes that hold each expert, ascending, each once."""
    hosts: list[list[int]] = [[] for _ in range(num_experts)]
    for node, experts in enumerate(placement):
        for expert in sorted(set(experts)):
            hosts[expert].append(node)
    return hosts


def dealt(loads: Sequence[float], rule: Callable[..., lazarus.Placement]) -> lazarus.Placement:
    counts = lazarus.replica_counts(loads, num_slots=NUM_NODES * SLOTS, min_replicas=FLOOR)
    return rule(counts, num_nodes=NUM_NODES, slots_per_node=SLOTS)


def eplb_placement(loads: Sequence[float]) -> lazarus.Placement:
    (slots,) = eplb.rebalance(
        np.array([loads]),
        num_replicas=NUM_NODES * SLOTS,
        num_groups=1,
        num_nodes=1,
        num_devices=NUM_NODES,
    )
    by_node = slots.reshape(NUM_NODES, SLOTS).tolist()
    return tuple(tuple(sorted(node)) for node in by_node)


PUBLISHED: dict[str, Callable[[Sequence[float]], lazarus.Placement]] = {
    "Lazarus": overlap,
    "spread": lambda loads: dealt(loads, spread),
    "compact": lambda loads: dealt(loads, compact),
    "EPLB": eplb_placement,
}


def published(case: str, name: str, loads: Loads) -> Row:
    """Survival of all layers, and the worst layer's max / mean."""
    placements = [PUBLISHED[name](rows) for rows in loads.tolist()]
    hosts = [hosts_of(placement, loads.shape[1]) for placement in placements]
    parts = survival(minimal_cut_sets(on for layer in hosts for on in layer), NUM_NODES)
    equal = []
    for rows, placement in zip(loads, placements, strict=True):
        number = np.bincount([e for node in placement for e in node], minlength=len(rows))
        equal.append(max(sum((rows / number)[e] for e in node) for node in placement))
    flags = np.zeros((*loads.shape, NUM_NODES), dtype=np.bool_)
    for layer, experts in enumerate(hosts):
        for expert, on in enumerate(experts):
            flags[layer, expert, on] = True
    split = min_max_split(loads, flags, np.ones(NUM_NODES)).value
    mean = loads.sum(axis=1) / NUM_NODES
    return {
        "case": case,
        "planner": name,
        "survived": parts,
        "load": float((np.array(equal) / mean).max()),
        "load_best_split": float((split / mean).max()),
    }


def ours(case: str, loads: Loads, even: float = Prices().even) -> Row:
    plan = plan_experts(
        loads,
        alike(NUM_NODES, SLOTS),
        floors=Floors(nodes=FLOOR),
        prices=Prices(even=even),
        max_losses=NUM_NODES,
    )
    proof = plan.proof
    worst = max(layer.value / layer.fluid for layer in proof.layers)
    return {
        "case": case,
        "planner": "ours" if even == Prices().even else f"ours, {even:.0%} free",
        "survived": proof.survival,
        "load": worst,
        "load_best_split": worst,
        "load_bound": max(layer.slots_bound / layer.fluid for layer in proof.layers),
        "survived_bound": proof.survival_bound,
        "reason": proof.reason,
    }


def first_layout(
    num_nodes: int, per_node: int, num_layers: int, num_experts: int, replicas: int
) -> Row:
    """Survival of all layers of the layout that knows no loads."""
    node_of = {rank: rank // per_node for rank in range(num_nodes * per_node)}
    layout = even_layout(
        ranks=node_of,
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=replicas,
        domain_of=node_of,
    )
    found = survival_by(layout.experts, list(node_of.values()), max_losses=num_nodes)
    return {
        "case": f"{num_nodes} nodes x {per_node}, {num_layers} layers x {num_experts}",
        "planner": f"first, {replicas} replicas",
        "survived": found,
        "load": 1.0,
        "load_best_split": 1.0,
        "load_bound": 1.0,
        "survived_bound": tuple(
            survival_bound(num_nodes, lost, replicas) for lost in range(num_nodes + 1)
        ),
    }


def small_cases(max_nodes: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(nodes, slots of each, replicas of each expert, ascending) that fill all slots."""
    for num_nodes in range(2, max_nodes + 1):
        for slots in range(1, SMALL_SLOTS + 1):
            if num_nodes * slots <= SMALL_REPLICAS:
                for num_experts in range(2, SMALL_EXPERTS + 1):
                    for counts in ascending_parts(num_nodes * slots, num_experts, 1):
                        yield num_nodes, slots, counts


def ascending_parts(total: int, number: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to add up so many whole numbers, each at least the one before."""
    if number == 1:
        yield (total,)
        return
    for first in range(least, total // number + 1):
        for rest in ascending_parts(total - first, number - 1, first):
            yield (first, *rest)


def promises(max_nodes: int = SMALL_NODES) -> dict[str, int]:
    """How many small cases there are, and in how many an expert stands on too few nodes."""
    found = {"cases": 0, "broken_by_lazarus": 0, "broken_by_ours": 0}
    for num_nodes, slots, counts in small_cases(max_nodes):
        floor = min(*counts, num_nodes)
        overlapping = lazarus.maximum_rank_overlap(
            counts, num_nodes=num_nodes, slots_per_node=slots
        )
        theirs = hosts_of(overlapping, len(counts))
        loads, floors = [list(map(float, counts))], Floors(nodes=floor)
        (planned,) = plan_experts(loads, alike(num_nodes, slots), floors=floors).replicas
        found["cases"] += 1
        found["broken_by_lazarus"] += min(map(len, theirs)) < floor
        found["broken_by_ours"] += min(map(len, planned)) < floor
    return found


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=title)
    for name in ("case", "planner", *(f"{k} lost" for k in SHOWN), "max/mean", "best split"):
        table.add_column(name, justify="left" if name in ("case", "planner") else "right")
    for row in rows:
        parts = row["survived"]
        assert isinstance(parts, tuple)
        table.add_row(
            str(row["case"]),
            str(row["planner"]),
            *(f"{parts[k]:.3f}" for k in SHOWN),
            f"{row['load']:.3f}",
            f"{row['load_best_split']:.3f}",
        )
        if "survived_bound" in row:
            bound = row["survived_bound"]
            assert isinstance(bound, tuple)
            table.add_row(
                "",
                "no hosts beat",
                *(f"{bound[k]:.3f}" for k in SHOWN),
                f"{row['load_bound']:.3f}",
                "",
                end_section=True,
                style="dim",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    console = Console(width=130)
    result: dict[str, Any] = {"recorded": [], "zipf": []}
    if (arguments.data / "smartmoe_routing").exists():
        for name, num_experts in MODELS.items():
            loads = recorded_loads(arguments.data, num_experts)
            result["recorded"] += [published(name, planner, loads) for planner in PUBLISHED]
            result["recorded"].append(ours(name, loads))
            result["recorded"].append(ours(name, loads, even=0.01))
        show("all 12 layers, recorded routing", result["recorded"], console)
    else:
        console.print(f"no smartmoe_routing below {arguments.data}: Zipf loads only")
    for num_experts in MODELS.values():
        for exponent in (0.5, 1.0, 1.5):
            loads = np.arange(1.0, num_experts + 1.0)[None] ** -exponent
            name = f"{num_experts} experts, Zipf {exponent}"
            result["zipf"] += [published(name, planner, loads) for planner in ("Lazarus", "EPLB")]
            result["zipf"].append(ours(name, loads))
    show("one layer", result["zipf"], console)
    result["first"] = [first_layout(*case) for case in FIRST]
    show("the layout a job starts with", result["first"], console)
    kept = result["promises"] = promises()
    console.print(
        f"fewer losses than replicas of each expert: {kept['cases']} small cases, the promise is"
        f" broken by Lazarus in {kept['broken_by_lazarus']}, by ours in {kept['broken_by_ours']}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
