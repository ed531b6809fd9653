"""How long does a plan for all experts take on one core, from scratch and as an update?

`python -m benchmarks.placement_time`; a minute. Zipf 0.8 loads in another order in every layer; the
updates follow drifts of 5, 10 and 20 % (of the load of an expert with one rank's fair work; smaller
loads as much in proportion, larger ones as the root of theirs). CPU time of this process, with the
proof and all shares. Prints tables, last one line of JSON.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from pacekeeper.controller.planning.experts.planner import PresentPlacement, plan_experts
from pacekeeper.controller.planning.experts.problem import Floors, alike
from pacekeeper.controller.planning.experts.ring_arcs import drift_deviation

# layers, experts, ranks, slots, floor; seconds allowed from scratch and as an update
CASES = (
    ((12, 16, 10, 6, 2), 0.05, None),
    ((58, 256, 64, 5, 1), 2.0, 0.2),
    ((58, 256, 1000, 2, 1), 5.0, None),
    ((58, 256, 1000, 4, 2), 5.0, None),
)
DRIFTS, SKEW = (0.05, 0.1, 0.2), 0.8

Row = dict[str, Any]


def measure(case: tuple[int, int, int, int, int], repeats: int, *, has_update: bool) -> Row:
    """The least CPU time of some repeats: what else runs only ever adds to it."""
    num_layers, num_experts, num_ranks, slots, floor = case
    random = np.random.default_rng(0)
    skew = 1e4 * np.arange(1.0, num_experts + 1.0) ** -SKEW
    loads = np.array([random.permutation(skew) for _ in range(num_layers)])
    noise = random.standard_normal(loads.shape)
    cluster, floors = alike(num_ranks, slots), Floors(nodes=floor)
    anew_s = []
    for _ in range(repeats):
        began_s = time.process_time()
        plan = plan_experts(loads, cluster, floors=floors, drift=DRIFTS[0])
        anew_s.append(time.process_time() - began_s)
    updates = []
    present = [[[host.rank for host in on] for on in layer] for layer in plan.hosts]
    for drift in DRIFTS if has_update else ():
        spread = drift_deviation(loads, loads.sum(axis=1) / num_ranks, drift)
        drifted, update_s = np.maximum(loads + spread * noise, 0.0), []
        for _ in range(repeats):
            began_s = time.process_time()
            update = plan_experts(
                drifted, cluster, floors=floors, drift=DRIFTS[0], present=PresentPlacement(present)
            )
            update_s.append(time.process_time() - began_s)
        updates.append(
            {
                "ranks": num_ranks,
                "drift": drift,
                "update_s": min(update_s),
                "gap": update.proof.gap,
                "copied": update.proof.num_copied,
            }
        )
    return {
        "layers": num_layers,
        "experts": num_experts,
        "ranks": num_ranks,
        "slots": slots,
        "floor": floor,
        "anew_s": min(anew_s),
        "gap": plan.proof.gap,
        "replicas": plan.proof.num_replicas,
        "plan": plan.proof.reason,
        "updates": updates,
    }


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with threadpool_limits(1):
        for case, allowed_s, update_allowed_s in CASES:
            row = measure(case, arguments.repeats, has_update=update_allowed_s is not None)
            rows.append({**row, "allowed_s": allowed_s, "update_allowed_s": update_allowed_s})
    shown = [{k: v for k, v in row.items() if k != "updates"} for row in rows]
    show("CPU seconds of one plan", shown)
    show("as an update after drift", [update for row in rows for update in row["updates"]])
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
