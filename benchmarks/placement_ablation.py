"""Which generators of expert placements earn their place?

`python -m benchmarks.placement_ablation --data DIR`; some minutes. Plans every case with all
generators and again without each of them, and compares the results: predicted time of the experts
in a step, the part of node losses that is survived, replicas to copy, and the price of all three
in seconds until the next plan. The cases are recorded routing (`smartmoe_routing`, 16 ranks) with
3, 4 and 6 slots and the shipped cases of `placement_quality` and `placement_survival`; ranks of
equal and unequal speed, with and without racks that fail as a whole; from scratch, as an update of
the plan before, and after the death of two ranks. Also small clusters of uneven nodes and slots,
where few generators find any plan. Prints a table, last one line of JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from pacekeeper.controller.planning.experts import incremental, planner, search
from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    NoPlacement,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices, alike

THRESHOLD = 0.005  # relative: a generator that changes no result by so much is not needed
NUM_RANKS = 16
SNAPSHOTS = (0, 250)  # of the recorded routing; an update starts from the one before
SHIPPED = (  # experts, ranks, slots: `placement_quality`, `placement_survival`, small jobs
    (64, 8, 9),
    (64, 16, 5),
    (128, 64, 3),
    (256, 32, 9),
    (8, 10, 6),
    (12, 10, 6),
    (16, 10, 6),
    (8, 4, 3),
    (8, 4, 4),
    (16, 8, 3),
    (16, 12, 2),
)
NUM_LAYERS, EVERY_LAYER = 2, 3  # of a shipped case; of the recorded layers one of so many
NUM_DEAD = 2
NUM_IRREGULAR = 60
MAX_LOSSES = 3
PRICES = Prices()

Loads = npt.NDArray[np.float64]
Present = list[list[list[int]]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One placement to find: loads [layers, experts] in rows, and those of the plan before."""

    name: str
    loads: Loads
    before: Loads
    cluster: Cluster
    floors: Floors


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """step: time of the experts over the fluid limit; survived [losses]; copies; price in s."""

    step: float
    survived: tuple[float, ...]
    copies: int
    price_s: float


def without(generate: object) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(
        patch.object(search, "GENERATORS", tuple(g for g in search.GENERATORS if g is not generate))
    )
    return stack


def patched(module: object, name: str, value: object) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(patch.object(module, name, value))
    return stack


VARIANTS: dict[str, Callable[[], ExitStack]] = {
    "chained declustering": lambda: without(search._structures),
    "swaps in small clusters": lambda: without(search._swaps),
    "greedy fill": lambda: without(search._fills),
    "ring arcs": lambda: without(search._arcs),
    "round robin": lambda: patched(planner, "dealt", lambda task: []),
    "update": lambda: patched(planner, "updated", lambda *_: None),
    "local search": lambda: patched(
        incremental, "evened", lambda hosts, task, needs, even, max_copies: (hosts.copy(), even)
    ),
    "refinement": lambda: patched(planner, "polished", lambda task, draft: draft),
}


def speeds_of(kind: str, num_ranks: int) -> tuple[float, ...]:
    if kind == "equal":
        return (1.0,) * num_ranks
    slow = {1: 0.5, num_ranks // 2: 0.8}
    return tuple(slow.get(rank, 1.0) for rank in range(num_ranks))


def cluster_of(num_ranks: int, slots: int, kind: str, has_racks: bool) -> Cluster:
    """With racks: nodes of two ranks, racks of two nodes, which may fail as a whole."""
    speeds = speeds_of(kind, num_ranks)
    if not has_racks:
        return alike(num_ranks, slots, speeds=speeds)
    found = alike(num_ranks, slots, speeds=speeds, ranks_per_node=2, nodes_per_rack=2)
    return replace(found, rack_failure=dict.fromkeys(found.racks, 0.002))


def cases(data: Path) -> Iterator[Case]:
    kinds = [(speed, racks) for speed in ("equal", "unequal") for racks in (False, True)]
    path = data / "smartmoe_routing" / "expert_tokens.npz"
    if path.exists():
        with np.load(path) as trace:
            counts = trace["counts"][:, :, ::EVERY_LAYER].sum(axis=1).astype(np.float64)
        for at in SNAPSHOTS:
            for slots, floor in ((3, 1), (4, 1), (4, 2), (6, 2)):
                for speed, racks in kinds:
                    yield Case(
                        name=f"recorded {at}, {slots} slots, floor {floor}, {speed}, racks {racks}",
                        loads=counts[at + 1],
                        before=counts[at],
                        cluster=cluster_of(NUM_RANKS, slots, speed, racks),
                        floors=Floors(nodes=floor),
                    )
    random = np.random.default_rng(0)
    for num_experts, num_ranks, slots in SHIPPED:
        for skew in (0.8, 1.2):
            one = np.arange(1.0, num_experts + 1.0) ** -skew * 1e4
            loads = np.array([random.permutation(one) for _ in range(NUM_LAYERS)])
            before = loads * random.lognormal(0.0, 0.1, loads.shape)
            for speed, racks in kinds:
                floor = 2 if num_ranks * slots >= 2.5 * num_experts else 1
                yield Case(
                    name=f"Zipf {skew}, {num_experts} experts, {num_ranks} ranks, {slots} slots,"
                    f" {speed}, racks {racks}",
                    loads=loads,
                    before=before,
                    cluster=cluster_of(num_ranks, slots, speed, racks),
                    floors=Floors(nodes=floor),
                )
    yield from irregular(NUM_IRREGULAR)


def irregular(num: int) -> Iterator[Case]:
    """Clusters of uneven nodes and slots, floors that they just satisfy."""
    random = np.random.default_rng(1)
    for at in range(num):
        num_ranks = int(random.integers(3, 9))
        nodes = tuple(sorted(int(node) for node in random.integers(0, 4, num_ranks)))
        slots = tuple(int(count) for count in random.integers(1, 5, num_ranks))
        floor = int(random.integers(1, 3))
        num_experts = max(1, sum(slots) // (floor + 1))
        loads = 1e4 * random.lognormal(0.0, 1.0, (1, num_experts))
        yield Case(
            name=f"irregular {at}",
            loads=loads,
            before=loads,
            cluster=Cluster(
                speeds=(1.0,) * num_ranks,
                slots=slots,
                failure_probability=(0.01,) * num_ranks,
                nodes=nodes,
                racks=nodes,
            ),
            floors=Floors(nodes=floor),
        )


def hosts_of(plan: ExpertPlan) -> Present:
    return [[[host.rank for host in on] for on in layer] for layer in plan.replicas]


def without_ranks(cluster: Cluster, dead: Sequence[int]) -> Cluster:
    living = [rank for rank in range(cluster.num_ranks) if rank not in dead]
    racks = tuple(cluster.racks[rank] for rank in living)
    return Cluster(
        speeds=tuple(cluster.speeds[rank] for rank in living),
        slots=tuple(cluster.slots[rank] for rank in living),
        failure_probability=tuple(cluster.failure_probability[rank] for rank in living),
        nodes=tuple(cluster.nodes[rank] for rank in living),
        racks=racks,
        rack_failure={k: p for k, p in cluster.rack_failure.items() if k in racks},
    )


def after_death(present: Present, num_ranks: int, dead: Sequence[int]) -> Present:
    """The hosts on the living ranks, by their new positions."""
    living = [rank for rank in range(num_ranks) if rank not in dead]
    place = {rank: at for at, rank in enumerate(living)}
    return [[[place[rank] for rank in on if rank in place] for on in layer] for layer in present]


def result_and_plan(
    case: Case, cluster: Cluster, floors: Floors, present: Present | None
) -> tuple[Result, ExpertPlan | None]:
    try:
        plan = plan_experts(
            case.loads,
            cluster,
            floors=floors,
            prices=PRICES,
            present=None if present is None else PresentPlacement(present),
            max_losses=MAX_LOSSES,
        )
    except NoPlacement:
        return Result(step=nan, survived=(), copies=0, price_s=nan), None
    proof = plan.proof
    step = sum(of.value for of in proof.layers) / sum(of.fluid for of in proof.layers)
    copies = 0 if present is None else proof.num_copied
    result = Result(
        step=step,
        survived=proof.survival,
        copies=copies,
        price_s=step * PRICES.step_s * PRICES.num_steps
        + proof.loss_probability * PRICES.restart_s
        + copies * PRICES.move_s,
    )
    return result, plan


def results_of(case: Case, present: Present | None) -> dict[str, Result]:
    """From scratch, from the plan before, and both after the death of NUM_DEAD ranks."""
    tried: dict[str, tuple[Cluster, Floors, Present | None]] = {
        "anew": (case.cluster, case.floors, None)
    }
    if present is not None:
        tried["update"] = (case.cluster, case.floors, present)
    dead = tuple(range(1, 1 + NUM_DEAD))
    if case.cluster.num_ranks > NUM_DEAD + 1 and present is not None:
        left = without_ranks(case.cluster, dead)
        hosts = after_death(present, case.cluster.num_ranks, dead)
        tried["death, anew"] = (left, case.floors, None)
        if all(on for layer in hosts for on in layer):
            tried["death"] = (left, replace(case.floors, is_strict=False), hosts)
    return {way: result_and_plan(case, *parts)[0] for way, parts in tried.items()}


def compared(mine: Result, whole: Result) -> Row:
    """Relative changes of step time and price, in survived parts and copies; `lost`: no plan."""
    if whole.price_s != whole.price_s or mine.price_s != mine.price_s:
        return {"lost": float(mine.price_s != mine.price_s and whole.price_s == whole.price_s)}
    survived = [a - b for a, b in zip(mine.survived, whole.survived, strict=True)]
    return {
        "lost": 0.0,
        "step": mine.step / whole.step - 1.0,
        "survived": min(survived),
        "copies": (mine.copies - whole.copies) / max(whole.copies, 1),
        "price": mine.price_s / whole.price_s - 1.0,
    }


def summary(name: str, rows: Sequence[Row]) -> Row:
    """The worst change of each result, and in how many plans the price changes by THRESHOLD."""
    both = [row for row in rows if "price" in row]
    lost = sum(row["lost"] for row in rows)
    changed = sum(abs(row["price"]) >= THRESHOLD for row in both)
    return {
        "without": name,
        "plans": len(rows),
        "no plan": int(lost),
        "step time": max(row["step"] for row in both),
        "survived": min(row["survived"] for row in both),
        "copies": max(row["copies"] for row in both),
        "price": max(row["price"] for row in both),
        "price changed": changed,
        "needed": bool(lost or changed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--every", type=int, default=1, help="Take one case of so many.")
    arguments = parser.parse_args()
    rows: dict[str, list[Row]] = {name: [] for name in VARIANTS}
    for case in list(cases(arguments.data))[:: arguments.every]:
        before = result_and_plan(replace(case, loads=case.before), case.cluster, case.floors, None)
        present = None if before[1] is None else hosts_of(before[1])
        base = results_of(case, present)
        for name, disable in VARIANTS.items():
            with disable():
                found = results_of(case, present)
            rows[name] += [compared(found[way], whole) for way, whole in base.items()]
    result = [summary(name, of) for name, of in rows.items()]
    table = Table(title="largest change of each result without one generator")
    for name in result[0]:
        table.add_column(name, justify="right")
    for row in result:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
