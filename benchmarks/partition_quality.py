"""How near to the fluid limit are planned partitions when devices are slow, and beside others'?

`python -m benchmarks.partition_quality`; minutes. ResiHP's six models, each on its cluster, with
1 to 1/8 of the devices at 0.65, 0.45 or 0.3 of their speed (weak, medium, severe), drawn at random.
For each cell of model and severity the median and least fraction of the fluid limit (healthy
throughput times the mean speed) that is reached without a plan, by Greyhound's S2 and S3, a planner
as Malleus', ResiHP's three steps, and ours; all timed alike. The fluid limit lengthens the healthy
step as it is, bubbles and messages included: a plan with fewer of them may pass it. Of ResiHP the
better of 1F1B and of weight gradients apart; `migrated`: its Algorithm 1 on shards by speed instead
of its power of two. `ours` keeps 1F1B; `free`: the plan chooses its schedule, too. `whole`: ours
where a micro-batch is one row, so that it hands on whole micro-batches only, as the others do.
Every plan of ours must be a layout that a running job can follow. Prints a table, last one line of
JSON; ends with 1 where the median draw of a cell is not faster than ResiHP's, or where the planner
gains more than 0.1 % on a healthy job: the baseline is not fair then.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.malleus import malleus
from benchmarks.partition_cases import CASES, Case, problem_of
from pacekeeper.controller.planning.model.problem import PartitionProblem, healthy
from pacekeeper.controller.planning.partition.incremental import with_other_shards
from pacekeeper.controller.planning.partition.layout_codec import layout_of
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.core.layout.live_rules import check_live_layout
from pacekeeper.simulator.baselines.greyhound import greyhound
from pacekeeper.simulator.baselines.resihp import DELTAS, ORDERS, resihp
from pacekeeper.simulator.baselines.step_simulation import walks_of_cells

SEVERITIES = {"weak": 0.65, "medium": 0.45, "severe": 0.3}
MOST_SLOW = 8  # one device of so many, at most
MOST_HEALTHY_GAIN = 1.001


def planned_s(problem: PartitionProblem) -> float:
    """Step time of our plan. Raises ValueError where a running job cannot follow it."""
    plan = plan_partition(problem)
    layout = layout_of(plan.partition, ((),) * len(problem.model.layers), generation=1)
    check_live_layout(layout)
    return plan.step_s


def migrated_s(problem: PartitionProblem) -> float:
    """Step time of the baseline's stages with shards by speed, and the best of Algorithm 1."""
    partition = with_other_shards(problem.baseline, problem)
    assert partition is not None, "there are more shards than ranks"
    cells = [pipeline.cells for pipeline in partition.pipelines]
    found = [walks_of_cells(cells, problem, deltas=DELTAS, order=order) for order in ORDERS]
    return min(walk.step_s for walks in found for walk in walks)


PLANNERS: dict[str, Callable[[PartitionProblem], float]] = {
    "none": lambda problem: price(problem.baseline, problem).step_s,
    "greyhound": lambda problem: price(greyhound(problem), problem).step_s,
    "malleus": lambda problem: price(malleus(problem), problem).step_s,
    "resihp": lambda problem: resihp(problem).step_s,
    "migrated": migrated_s,
    "ours": planned_s,
    "free": lambda problem: planned_s(replace(problem, may_change_schedule=True)),
}

Row = dict[str, object]


def draw(case: Case, speed: float, seed: int) -> list[float]:
    """Speeds of all ranks."""
    random = np.random.default_rng([seed, case.num_ranks, int(100 * speed)])
    speeds = np.ones(case.num_ranks)
    number = int(random.integers(1, case.num_ranks // MOST_SLOW + 1))
    speeds[random.choice(case.num_ranks, number, replace=False)] = speed
    return [float(speed) for speed in speeds]


def fractions(case: Case, speed: float, seed: int) -> dict[str, float]:
    """Of the fluid limit, by planner; `whole`: ours where a micro-batch is one row."""
    speeds = draw(case, speed, seed)
    result: dict[str, float] = {}
    for name, rows_per_batch in (("", 16), ("whole", 1)):
        problem = problem_of(case, speeds, rows_per_batch=rows_per_batch)
        fluid_s = price(problem.baseline, healthy(problem)).step_s * problem.fluid_ratio
        chosen = {name: PLANNERS["ours"]} if name else PLANNERS
        result |= {of: fluid_s / step_s(problem) for of, step_s in chosen.items()}
    return result


def healthy_gain(case: Case) -> float:
    """What our planner adds where all devices are healthy: above 1, the baseline is not fair."""
    problem = problem_of(case, [1.0] * case.num_ranks)
    return price(problem.baseline, problem).step_s / plan_partition(problem).step_s


def cell(case: Case, severity: str, num_draws: int) -> Row:
    found = [fractions(case, SEVERITIES[severity], seed) for seed in range(num_draws)]
    row: Row = {"model": case.name, "severity": severity, "draws": num_draws}
    for name in (*PLANNERS, "whole"):
        of_name = [fraction[name] for fraction in found]
        row[name] = float(np.median(of_name))
        row[f"{name}_min"] = float(np.min(of_name))
    for name, of in (("", "ours"), ("free_", "free"), ("whole_", "whole")):
        against = [fraction[of] / fraction["resihp"] for fraction in found]
        row[f"{name}over_resihp"] = float(np.median(against))
        row[f"{name}over_resihp_min"] = float(np.min(against))
    return row


def show(rows: list[Row]) -> None:
    table = Table(title="fraction of the fluid limit: median of draws (least)")
    names = (*PLANNERS, "whole", "over_resihp", "free_over_resihp")
    for name in ("model", "severity", *names):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            str(row["model"]),
            str(row["severity"]),
            *(f"{row[name]:.3f} ({row[f'{name}_min']:.3f})" for name in names),
        )
    Console(width=150).print(table)


def is_met(summary: Row) -> bool:
    """Whether all cells are won, and the planner gains nothing on healthy jobs."""
    gain = float(str(summary["most_healthy_gain"]))
    return summary["cells_won"] == summary["cells"] and gain <= MOST_HEALTHY_GAIN


def main() -> int:
    """Print the table, then one line of JSON; return 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--draws", type=int, default=10)
    arguments = parser.parse_args()
    rows = [cell(case, severity, arguments.draws) for case in CASES for severity in SEVERITIES]
    show(rows)
    ours = [float(str(row["ours"])) for row in rows]
    summary: Row = {
        "cells": len(rows),
        "cells_won": sum(float(str(row["over_resihp"])) > 1.0 for row in rows),
        "draws_won_all": sum(float(str(row["over_resihp_min"])) > 1.0 for row in rows),
        "median_fluid_fraction": float(np.median(ours)),
        "min_fluid_fraction": min(float(str(row["ours_min"])) for row in rows),
        "free_cells_won": sum(float(str(row["free_over_resihp"])) > 1.0 for row in rows),
        "free_draws_won_all": sum(float(str(row["free_over_resihp_min"])) > 1.0 for row in rows),
        "whole_cells_won": sum(float(str(row["whole_over_resihp"])) > 1.0 for row in rows),
        "most_healthy_gain": max(healthy_gain(case) for case in CASES),
        "rows": rows,
    }
    print(json.dumps(summary | {"is_met": is_met(summary)}))
    return 0 if is_met(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
