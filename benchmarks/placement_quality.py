"""How even are planned experts: with a slow rank, with scarce slots, and on the next loads?

`python -m benchmarks.placement_quality`; minutes. First one layer, Zipf 0.8 and 1.2 and log-normal
loads (mean of 5 draws each): the largest load / speed of a rank over the fluid limit, for EPLB as
published, for the best split over EPLB's hosts, and for ours. Then recorded routing
(`smartmoe_routing`, 16 ranks): a plan made from one snapshot, the *next* one split as well as its
hosts allow, over all layers and snapshots; planned anew each time, and as an update of the plan
before. Prints tables, last one line of JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks import eplb
from pacekeeper.controller.planning.experts.incremental import nearest_ranks
from pacekeeper.controller.planning.experts.planner import (
    ExpertPlan,
    PresentPlacement,
    plan_experts,
)
from pacekeeper.controller.planning.experts.problem import Floors, Prices, alike
from pacekeeper.controller.planning.token_split.min_max import min_max_split

CASES = ((64, 8, 9), (64, 16, 5), (128, 64, 3), (256, 32, 9), (256, 64, 5))
SPEEDS = (1.0, 0.7, 0.5)
RECORDED = ((3, 1, 1.0), (4, 1, 1.0), (4, 1, 0.5), (6, 2, 1.0))  # slots, floor, speed of one rank
NUM_RANKS, SLOW_RANK, NUM_DRAWS = 16, 3, 5
DRIFT = 0.15

Loads = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Row = dict[str, object]


def draws(kind: str, num_experts: int) -> Loads:
    """[draws, experts]"""
    random = np.random.default_rng(0)
    if kind == "log-normal":
        return random.lognormal(0.0, 1.0, (NUM_DRAWS, num_experts))
    skew = np.arange(1.0, num_experts + 1.0) ** -float(kind.split()[1])
    return np.array([random.permutation(skew) for _ in range(NUM_DRAWS)])


def flags_of(hosts: Sequence[Sequence[Sequence[int]]], num_ranks: int) -> Flags:
    flags = np.zeros((len(hosts), len(hosts[0]), num_ranks), dtype=np.bool_)
    for layer, experts in enumerate(hosts):
        for expert, on in enumerate(experts):
            flags[layer, expert, list(on)] = True
    return flags


def hosts_of(plan: ExpertPlan) -> list[list[list[int]]]:
    return [[[host.rank for host in on] for on in layer] for layer in plan.replicas]


def one_layer(num_experts: int, num_ranks: int, slots: int, slow: float, kind: str) -> Row:
    loads, speeds = draws(kind, num_experts), np.ones(num_ranks)
    speeds[SLOW_RANK] = slow
    fluid = loads.sum(axis=1) / speeds.sum()
    placed = eplb.rebalance(
        loads, num_replicas=num_ranks * slots, num_groups=1, num_nodes=1, num_devices=num_ranks
    )
    equal = np.array(
        [
            (eplb.device_loads(layer.tolist(), rows, num_ranks) / speeds).max()
            for layer, rows in zip(placed, loads, strict=True)
        ]
    )
    hosts = [eplb.hosts_of(layer.tolist(), num_ranks, num_experts) for layer in placed]
    split = min_max_split(loads, flags_of(hosts, num_ranks), speeds).value
    cluster = alike(num_ranks, slots, speeds=tuple(speeds.tolist()))
    balance = Prices(restart_s=0.0)  # nothing else is compared here
    plans = [plan_experts(rows[None], cluster, prices=balance).proof.layers[0] for rows in loads]
    return {
        "case": f"{num_experts} experts, {num_ranks} ranks, {slots} slots",
        "slow": slow,
        "loads": kind,
        "eplb": float((equal / fluid).mean()),
        "eplb_best_split": float((split / fluid).mean()),
        "ours": float(np.mean([proof.value / proof.fluid for proof in plans])),
        "ours_worst": max(proof.value / proof.fluid for proof in plans),
    }


def next_snapshots(counts: Loads, slots: int, floor: int, slow: float, stride: int) -> list[Row]:
    """counts [snapshots, layers, experts]"""
    speeds = np.ones(NUM_RANKS)
    speeds[SLOW_RANK] = slow
    cluster = alike(NUM_RANKS, slots, speeds=tuple(speeds.tolist()))
    floors = Floors(nodes=floor)
    result: list[Row] = []
    copies: dict[str, list[int]] = {"anew": [], "update": []}
    for way in ("anew", "update"):
        ratios: list[float] = []
        before: ExpertPlan | None = None
        for at in range(0, len(counts) - stride, stride):
            known = hosts_of(before) if before is not None else None
            plan = plan_experts(
                counts[at],
                cluster,
                floors=floors,
                drift=DRIFT,
                present=None if way == "anew" or known is None else PresentPlacement(known),
            )
            following = counts[at + stride]
            flags = flags_of(hosts_of(plan), NUM_RANKS)
            value = min_max_split(following, flags, speeds).value
            ratios += (value / (following.sum(axis=1) / speeds.sum())).tolist()
            if known is not None:
                present = flags_of(known, NUM_RANKS)
                if way == "anew":  # ranks in the places that need fewest copies
                    flags = flags[:, :, np.argsort(nearest_ranks(flags, present, cluster))]
                copies[way].append(int((flags & ~present).sum()))
            before = plan
        result.append(
            {
                "slots": slots,
                "floor": floor,
                "slow": slow,
                "way": way,
                "median": float(np.median(ratios)),
                "p90": float(np.quantile(ratios, 0.9)),
                "p95": float(np.quantile(ratios, 0.95)),
                "copies": float(np.mean(copies[way])),
                "copies_over_anew": float(np.sum(copies[way]) / np.sum(copies["anew"])),
            }
        )
    return result


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--stride", type=int, default=1, help="snapshots between two plans")
    arguments = parser.parse_args()
    console = Console(width=120)
    result: dict[str, list[Row]] = {
        "one_layer": [
            one_layer(*case, slow, kind)
            for case in CASES
            for slow in SPEEDS
            for kind in ("Zipf 0.8", "Zipf 1.2", "log-normal")
        ],
        "next": [],
    }
    show("largest load / speed over the fluid limit", result["one_layer"], console)
    path = arguments.data / "smartmoe_routing" / "expert_tokens.npz"
    if path.exists():
        with np.load(path) as trace:
            counts = trace["counts"].sum(axis=1).astype(np.float64)
        for case in RECORDED:
            result["next"] += next_snapshots(counts, *case, arguments.stride)
        show("the next snapshot's load over the planned hosts", result["next"], console)
    else:
        console.print(f"no smartmoe_routing below {arguments.data}: one layer only")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
