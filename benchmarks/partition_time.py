"""How long does a plan for the partition take on one core, and how far off is the closed form?

`python -m benchmarks.partition_time`; a minute. LLaMA2-70B in 16 stages of 4 ranks with 4, 16 and
156 pipelines (256 to 9984 devices); 1 % and 5 % of the devices, one at least, at 0.3 to 0.9 of
their speed, then 1 % dead on top. CPU time of this process, the least of some repeats. `closed`:
closed form over longest path, of the plan and of what it replaces. Prints a table, last one line of
JSON.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.partition_cases import LLAMA_70B, problem_of
from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price

# pipelines and the seconds allowed for them
CASES = ((4, 0.5), (16, None), (156, 10.0))
# share of devices that are slow, that are dead
FAULTS = ((0.01, 0.0), (0.05, 0.0), (0.05, 0.01))

Row = dict[str, Any]


def problem(data: int, slow: float, dead: float) -> PartitionProblem:
    random = np.random.default_rng([data, int(100 * slow)])
    num_ranks = LLAMA_70B.tensor * LLAMA_70B.stages * data
    speeds = np.ones(num_ranks)
    order = random.permutation(num_ranks)
    num_slow = max(1, int(slow * num_ranks))
    speeds[order[:num_slow]] = random.uniform(0.3, 0.9, num_slow).round(2)
    made = problem_of(LLAMA_70B, speeds.tolist(), data=data)
    lost = set(order[num_slow : num_slow + int(dead * num_ranks)].tolist())
    devices = tuple(
        replace(device, speed=0.0) if device.rank in lost else device for device in made.devices
    )
    return replace(made, devices=devices)


def measure(data: int, faults: tuple[float, float], repeats: int) -> Row:
    taken_s = []
    for _ in range(repeats):
        made = problem(data, *faults)  # anew: nothing may be remembered
        began_s = time.process_time()
        plan = plan_partition(made)
        taken_s.append(time.process_time() - began_s)
    closed = [price(plan.partition, made, is_exact=False).step_s / plan.step_s]
    if not plan.evicted:
        closed.append(
            price(made.baseline, made, is_exact=False).step_s / price(made.baseline, made).step_s
        )
    return {
        "devices": len(made.devices),
        "slow": faults[0],
        "dead": faults[1],
        "plan_s": min(taken_s),
        "fluid_fraction": plan.fluid_fraction,
        "closed_worst": max(closed, key=lambda ratio: abs(ratio - 1.0)),
        "plan": plan.reason.split(":")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[Row] = []
    with threadpool_limits(1):
        for data, allowed_s in CASES:
            for faults in FAULTS:
                row = measure(data, faults, arguments.repeats)
                rows.append({**row, "allowed_s": allowed_s})
    table = Table(title="CPU seconds of one plan")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=150).print(table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
