"""How long does a plan for all experts take on one core, from scratch and as an update?

`python -m benchmarks.placement_time`; a minute. Zipf 0.8 loads in another order in every layer; the
update follows a drift of 5 % (of the load of an expert with one rank's fair work; smaller loads as
much in proportion, larger ones as the root of theirs). CPU time of this process, with the proof and
all shares. Prints a table, last one line of JSON.
"""

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from pacekeeper.controller.arc_values import drift_deviation
from pacekeeper.controller.expert_cluster import Floors, alike
from pacekeeper.controller.expert_plan import plan_experts

# layers, experts, ranks, slots, floor; seconds allowed from scratch and as an update
CASES = (
    ((12, 16, 10, 6, 2), 0.05, None),
    ((58, 256, 64, 5, 1), 2.0, 0.2),
    ((58, 256, 1000, 2, 1), 5.0, None),
    ((58, 256, 1000, 4, 2), 5.0, None),
)
DRIFT, SKEW = 0.05, 0.8

Row = dict[str, object]


def measure(case: tuple[int, int, int, int, int], repeats: int, *, has_update: bool) -> Row:
    """The least CPU time of some repeats: what else runs only ever adds to it."""
    num_layers, num_experts, num_ranks, slots, floor = case
    random = np.random.default_rng(0)
    skew = 1e4 * np.arange(1.0, num_experts + 1.0) ** -SKEW
    loads = np.array([random.permutation(skew) for _ in range(num_layers)])
    spread = drift_deviation(loads, loads.sum(axis=1) / num_ranks, DRIFT)
    drifted = np.maximum(loads + spread * random.standard_normal(loads.shape), 0.0)
    cluster, floors = alike(num_ranks, slots), Floors(nodes=floor)
    anew_s, update_s, update = [], [], None
    for _ in range(repeats):
        began_s = time.process_time()
        plan = plan_experts(loads, cluster, floors=floors, drift=DRIFT)
        anew_s.append(time.process_time() - began_s)
        if not has_update:
            continue
        present = [[[host.rank for host in on] for on in layer] for layer in plan.hosts]
        began_s = time.process_time()
        update = plan_experts(drifted, cluster, floors=floors, drift=DRIFT, present=present)
        update_s.append(time.process_time() - began_s)
    return {
        "layers": num_layers,
        "experts": num_experts,
        "ranks": num_ranks,
        "slots": slots,
        "floor": floor,
        "anew_s": min(anew_s),
        "update_s": min(update_s, default=None),
        "gap": plan.proof.gap,
        "update_gap": update.proof.gap if update else None,
        "copied": update.proof.num_copied if update else None,
        "replicas": plan.proof.num_replicas,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with threadpool_limits(1):
        for case, allowed_s, update_allowed_s in CASES:
            row = measure(case, arguments.repeats, has_update=update_allowed_s is not None)
            rows.append({**row, "allowed_s": allowed_s, "update_allowed_s": update_allowed_s})
    table = Table(title="CPU seconds of one plan")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=130).print(table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
