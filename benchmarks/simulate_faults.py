"""Whole recorded histories of nodes: hours of spot nodes, and 348 days of faults on 400 servers.

`python -m benchmarks.simulate_faults`; hours (`--quick`, one model, two seeds and thirty days: some
minutes; `--seeds`, `--days` and `--only` choose).
Every trace of spot nodes that is there, the whole P3 and G4dn ones and Parcae's hours among them
(`spot_bamboo`, `spot_parcae`), at most ten nodes drawn by seed, recorded routing; the log of faults
(`infinitehbd_faults`) with a node taken out by any fault, and with fail-slow kinds slowing it to
half, loads even. Jobs and policies are those of `simulate_lazarus`, and "none", which begins anew;
on the servers checkpoints are as far apart as Young's rule (1974) says for the losses of that very
log, for every policy. Prints tables with 95 % intervals over seeds, last one line of JSON; `won`:
in how many cells ours trained most.
"""

import argparse
import gc
import json
import sys
import time
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulate_lazarus import (
    LAYERS,
    LOADS_EVERY,
    MAX_NODES,
    MODELS,
    Paper,
    fitted_expert_part,
    fitted_step_s,
    job_of,
    routing_of,
    share_lost,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.simulator.cluster.fault_log import DAY_S, read_faults
from pacekeeper.simulator.cluster.history import History, NodesLost
from pacekeeper.simulator.cluster.membership import capped
from pacekeeper.simulator.cluster.spot_trace import read_spot
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.engine.statistics import Summary, summarize, with_interval
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.jobs.expert_routing import Routing, even_routing
from pacekeeper.simulator.policies.base import PUBLISHED, Policy, Use
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting
from pacekeeper.simulator.policies.lazarus import Lazarus
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper

NUM_SERVERS = 400
SLOW_SPEED = 0.5  # of a server with a fail-slow fault: the log tells no size
TAKEN_OUT, SLOWED = "servers", "servers, fail-slow"
REVIEW_S = 3600.0  # on servers, where loads stay: how often a policy looks at them anew


def policies(paper: Paper, likelihood: float) -> dict[str, Policy]:
    """By the name in the result; ratios are to the first."""
    size = paper.group_size
    return {
        "checkpoint": Restarting(group_size=size),
        "none": Restarting(name="none", group_size=size, checkpoint_steps=None),
        "checkpoint_fast": Regrouping(group_size=size),
        "lazarus": Lazarus(),
        "ours": Pacekeeper(config=PolicyConfig(failure_probability=likelihood)),
    }


def young_steps(history: History, job: JobModel) -> int:
    """Steps between two checkpoints that stop training, by Young's rule, for these losses."""
    num_losses = sum(isinstance(change, NodesLost) for change in history.changes)
    saving_s = PUBLISHED.saving(job, NUM_SERVERS).stop_s
    between_s = history.duration_s / max(1, num_losses)
    return max(1, round(sqrt(2.0 * saving_s * between_s) / job.balanced_step_s))


def paced(policy: Policy, steps: int, review_steps: int) -> Policy:
    """The policy with these periods, where it has any."""
    match policy:
        case Restarting(checkpoint_steps=None):
            return policy
        case Restarting() | Regrouping():
            return replace(policy, checkpoint_steps=steps)
        case Lazarus() | Pacekeeper():
            return replace(policy, checkpoint_steps=steps, review_steps=review_steps)
        case _:
            return policy


def spot_histories(data: Path) -> dict[str, History]:
    """Every trace of spot nodes that is there, by a short name or that of its file."""
    found: dict[str, History] = {}
    for folder in ("spot_bamboo", "spot_parcae"):
        for path in sorted((data / folder).glob("*.*")):
            if path.suffix in (".csv", ".txt") and not path.name.startswith("LICENSE"):
                short = _short(path)
                found[path.stem if short in found else short] = read_spot(path)
    return found


def _short(path: Path) -> str:
    """P3, G4dn, or Parcae's hour by its model, availability and pre-emption."""
    model, is_hour, hour = path.stem.partition("_trace_")
    if is_hour:
        return f"Parcae {hour[:2]} {model}"
    if path.parent.name == "spot_parcae":
        return f"Parcae {path.stem}"
    known = {"p3-trace": "P3", "g4dn": "G4dn", "p2": "P2", "a100": "A100"}
    return next((name for part, name in known.items() if part in path.stem), path.stem)


def server_histories(data: Path, days: float) -> dict[str, History]:
    log = data / "infinitehbd_faults" / "fault_trace.json.gz"
    if not log.exists():
        return {}
    found = {
        TAKEN_OUT: read_faults(log, num_nodes=NUM_SERVERS),
        SLOWED: read_faults(log, num_nodes=NUM_SERVERS, slow_speed=SLOW_SPEED),
    }
    if not days:
        return found
    return {name: history.cut(duration_s=days * DAY_S) for name, history in found.items()}


def played(
    name: str,
    history: History,
    paper: Paper,
    job: JobModel,
    routing: Routing,
    seeds: int,
    likelihood: float,
) -> dict[str, list[SimulationResult]]:
    """Outcomes of every policy, seed by seed, on the same nodes."""
    is_servers = name in (TAKEN_OUT, SLOWED)
    found: dict[str, list[SimulationResult]] = {}
    for seed in range(seeds):
        mine = history if is_servers else capped(history, max_nodes=MAX_NODES, seed=seed)
        for key, policy in policies(paper, likelihood).items():
            chosen = policy
            if is_servers:
                review_steps = round(REVIEW_S / job.balanced_step_s)
                chosen = paced(policy, young_steps(history, job), review_steps)
            found.setdefault(key, []).append(simulate(mine, job, routing, chosen, seed=seed))
    return found


def row_of(row: Summary) -> dict[str, Any]:
    return {
        "samples": round(row.samples),
        "ratio": round(row.ratio, 4),
        "ratio_95": row.ratio_95 and round(row.ratio_95, 4),
        "fluid": round(row.fluid, 4),
        "fluid_95": row.fluid_95 and round(row.fluid_95, 4),
        "restarts": round(row.restarts, 2),
        "needless_restarts": row.needless_restarts,
        "spent": {str(use): round(part, 5) for use, part in row.spent.items()},
    }


def show(title: str, rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title=title)
    uses = [use for use in Use if any(row["spent"][use] >= 5e-4 for row in rows.values())]
    heads = ("policy", "samples", "over checkpointing", "of the limit", "restarts", *uses)
    for head in heads:
        table.add_column(str(head), justify="left" if head == "policy" else "right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['samples']:,}",
            with_interval(row["ratio_95"], row["ratio"], ".3f"),
            with_interval(row["fluid_95"], row["fluid"], ".1%"),
            f"{row['restarts']:.1f}",
            *(f"{row['spent'][use]:.1%}" for use in uses),
        )
    console.print(table)


def verdict(cells: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """In how many cells ours trained most, and by how much over the best other one."""
    over = {
        name: rows["ours"]["samples"]
        / max(1, *(row["samples"] for key, row in rows.items() if key != "ours"))
        for name, rows in cells.items()
    }
    return {
        "cells": len(cells),
        "won": sum(ratio > 1.0 for ratio in over.values()),
        "over_best": {name: round(ratio, 4) for name, ratio in over.items()},
        "needless_restarts": sum(rows["ours"]["needless_restarts"] for rows in cells.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--days", type=float, default=0.0, help="of the log of faults; 0: all")
    parser.add_argument("--only", default="", help="cells that begin so, as 'GPT-S, P3'")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    began_s = time.perf_counter()
    # A layout of 400 nodes is 30,000 values: looking for cycles of them as often as usual takes a
    # fifth of the time.
    gc.set_threshold(200_000, 20, 20)
    seeds, days = (2, 30.0) if arguments.quick else (arguments.seeds, arguments.days)
    likelihood = share_lost(arguments.data)
    expert_part = fitted_expert_part(arguments.data)
    spans = spot_histories(arguments.data) | server_histories(arguments.data, days)
    console = Console(width=190)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for paper in MODELS[:1] if arguments.quick else MODELS:
        step_s = fitted_step_s(paper, arguments.data, expert_part)
        job = job_of(paper, step_s=step_s, expert_part=expert_part)
        recorded = routing_of(arguments.data, paper).thinned(LOADS_EVERY)
        even = even_routing(LAYERS, paper.num_experts)
        for name, history in spans.items():
            if not f"{paper.name}, {name}".startswith(arguments.only):
                continue
            routing = even if name in (TAKEN_OUT, SLOWED) else recorded
            found = played(name, history, paper, job, routing, seeds, likelihood)
            rows = {row.policy: row_of(row) for row in summarize(found)}
            cells[f"{paper.name}, {name}"] = rows
            show(f"{paper.name}, {name}, {history.duration_s / 3600.0:.1f} h", rows, console)
    result = {"seeds": seeds, **verdict(cells), "wall_s": round(time.perf_counter() - began_s, 1)}
    print(json.dumps(result | {"rows": cells}))
    return 0 if result["won"] == result["cells"] and not result["needless_restarts"] else 1


if __name__ == "__main__":
    sys.exit(main())
