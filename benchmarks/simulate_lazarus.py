"""Lazarus' experiment on spot nodes, simulated: ours beside Lazarus and restarts from checkpoints.

`python -m benchmarks.simulate_lazarus`; some minutes (`--quick`: two seeds). 80 minutes of the P3
trace (`spot_bamboo`), at most ten nodes, recorded routing (`smartmoe_routing`), GPT-S and GPT-L as
in the paper (arXiv 2407.04656, 6.1 and 6.4). Step times are fitted to what the paper prints of
undisturbed and of regularly disturbed runs, not to what is compared here; every number has its
source in docs/simulator.md. Prints tables, last one line of JSON. `benchmarks/simulate_faults.py`
plays the whole traces.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.simulator.cluster.history import History, NodesJoined, NodesLost, SpeedChanged
from pacekeeper.simulator.cluster.membership import capped
from pacekeeper.simulator.cluster.spot_trace import read_spot
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.engine.statistics import summarize, with_interval
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel
from pacekeeper.simulator.jobs.expert_routing import Routing, read_routing
from pacekeeper.simulator.policies.base import PUBLISHED, Policy, Use
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting, grouped
from pacekeeper.simulator.policies.lazarus import Lazarus, placed
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper

MAX_NODES, SLOTS, SAMPLES, TOKENS, LAYERS = 10, 6, 4, 1024, 12
MINUTES, SPAN = 80.0, "80 minutes"
# Minute 34 of the paper's trace takes four of its nodes: these, of p3-trace.csv, are among its ten.
LOST_AT_34 = ("node19", "node11", "node17", "node3")
STATE_BYTES_PER_PARAMETER = 14  # 63 MB for an expert of 8 x 768^2 parameters
LOADS_EVERY = 50  # steps between two changes of the recorded loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What the paper prints of a model. `steps`: Lazarus' in 30 minutes with a node lost every 5;
    bars: samples over the 80 minutes against checkpointing."""

    name: str
    num_experts: int
    group_size: int
    expert_bytes: int
    parameters: float
    steps: int
    bar: float


MODELS = (
    Paper(name="GPT-S", num_experts=8, group_size=2, expert_bytes=63_000_000, parameters=521e6,
          steps=2926, bar=2.3),
    Paper(name="GPT-L", num_experts=16, group_size=4, expert_bytes=112_000_000, parameters=1.7e9,
          steps=1996, bar=3.4),
)  # fmt: skip
# GPT-M, all ten nodes, no failure: 45 samples/s for Lazarus, 34 for DeepSpeed.
FITTED = Paper(name="GPT-M", num_experts=12, group_size=2, expert_bytes=112_000_000,
               parameters=1.3e9, steps=0, bar=0.0)  # fmt: skip
RATES = (45.0, 34.0)


def job_of(paper: Paper, *, step_s: float, expert_part: float) -> JobModel:
    state = int(paper.parameters * STATE_BYTES_PER_PARAMETER)
    return JobModel(
        num_layers=LAYERS,
        num_experts=paper.num_experts,
        slots_per_node=SLOTS,
        samples_per_node=SAMPLES,
        tokens_per_sample=TOKENS,
        balanced_step_s=step_s,
        expert_part=expert_part,
        expert_bytes=paper.expert_bytes,
        dense_bytes=state - LAYERS * paper.num_experts * paper.expert_bytes,
    )


def imbalances(paper: Paper, routing: Routing, num_nodes: int) -> tuple[float, float]:
    """Experts' time over an even spread, Lazarus' and DeepSpeed's: mean over the record."""
    job = job_of(paper, step_s=1.0, expert_part=1.0)
    nodes = range(num_nodes)
    fixed: Layout | None = grouped(nodes, paper.group_size, job)
    assert fixed is not None
    theirs, padded = [], []
    for step in range(0, int(routing.steps[-1]), 200):
        layout = placed(nodes, routing.at(step), job, min_replicas=2)
        assert layout is not None
        now = routing.at(step + 100)  # half-way to the next plan
        theirs.append(job.imbalance(layout, now, Dispatch.BY_SHARES))
        padded.append(job.imbalance(fixed, now, Dispatch.PADDED))
    return float(np.mean(theirs)), float(np.mean(padded))


def fitted_expert_part(data: Path) -> float:
    """The part of a balanced step that makes GPT-M 45 and 34 samples a second."""
    theirs, padded = imbalances(FITTED, routing_of(data, FITTED), MAX_NODES)
    ratio = RATES[0] / RATES[1]
    part = (ratio - 1.0) / ((padded - 1.0) - ratio * (theirs - 1.0))
    assert 0.0 < part < 1.0, f"no expert part explains the printed rates: {part}"
    return part


def fitted_step_s(paper: Paper, data: Path, expert_part: float) -> float:
    """A balanced step, from Lazarus' steps in 30 minutes that lost five nodes.

    30 s for each loss (the middle of 20 to 40 s); ten nodes at first, five at the end.
    """
    theirs = [imbalances(paper, routing_of(data, paper), n)[0] for n in range(5, MAX_NODES + 1)]
    training_s = 1800.0 - 5 * 30.0
    factor = 1.0 - expert_part + expert_part * float(np.mean(theirs))
    return training_s / paper.steps / factor


def routing_of(data: Path, paper: Paper) -> Routing:
    path = data / "smartmoe_routing" / "expert_tokens.npz"
    return read_routing(path, num_experts=paper.num_experts, num_layers=LAYERS)


def share_lost(data: Path) -> float:
    """The mean part of the nodes that a loss takes, over Bamboo's recorded traces but P3.

    A layout stands until the next loss: this is how likely a rank is among the lost.
    """
    parts: list[float] = []
    for path in sorted((data / "spot_bamboo").glob("*-*.*")):
        if path.suffix not in (".csv", ".txt") or path.stem.startswith("p3"):
            continue
        there = 0
        for change in read_spot(path).changes:
            match change:
                case NodesJoined():
                    there += len(change.nodes)
                case NodesLost():
                    parts.append(len(change.nodes) / there)
                    there -= len(change.nodes)
                case SpeedChanged():
                    pass
    if not parts:
        raise DataError(f"{data / 'spot_bamboo'}: no trace but P3 that loses nodes")
    return float(np.mean(parts))


def policies(paper: Paper, job: JobModel, likelihood: float) -> dict[str, Policy]:
    """By the name in the result. `checkpoint_low`: the 3-5 min of a restart hold the steps to be
    done again (half of 250), so that a restart takes as much less."""
    redone_s = 125.0 * job.balanced_step_s
    low, high = PUBLISHED.restart_s
    costs = replace(PUBLISHED, restart_s=(max(0.0, low - redone_s), high - redone_s))
    size = paper.group_size
    return {
        "checkpoint": Restarting(group_size=size),
        "checkpoint_low": Restarting(name="the same, low", group_size=size, costs=costs),
        "checkpoint_fast": Regrouping(group_size=size),
        "lazarus": Lazarus(),
        "ours": Pacekeeper(config=PolicyConfig(failure_probability=likelihood)),
    }


def played(
    history: History, paper: Paper, job: JobModel, routing: Routing, seeds: int, likelihood: float
) -> dict[str, list[SimulationResult]]:
    """Outcomes of every policy, seed by seed, on the same nodes."""
    found: dict[str, list[SimulationResult]] = {}
    for seed in range(seeds):
        first = [int(name[4:]) - 1 for name in LOST_AT_34]  # node1 is the first that joins
        mine = capped(history, max_nodes=MAX_NODES, seed=seed, always=first)
        for name, policy in policies(paper, job, likelihood).items():
            found.setdefault(name, []).append(simulate(mine, job, routing, policy, seed=seed))
    return found


def the_span(data: Path) -> History:
    """The paper's 80 minutes."""
    return read_spot(data / "spot_bamboo" / "p3-trace.csv").cut(duration_s=MINUTES * 60.0)


def summary(found: dict[str, list[SimulationResult]], bar: float) -> dict[str, Any]:
    """Samples over those of checkpointing: mean and 95 % interval over seeds; restarts; time."""
    rows = {row.policy: row for row in summarize(found)}
    result: dict[str, Any] = {"bar": bar}
    for name, row in rows.items():
        result[name] = {
            "ratio": round(row.ratio, 3),
            "ratio_95": row.ratio_95 and round(row.ratio_95, 3),
            "samples": round(row.samples),
            "restarts": round(row.restarts, 2),
            "needless_restarts": row.needless_restarts,
            "spent": {str(use): round(part, 4) for use, part in row.spent.items()},
        }
    pairs = zip(found["ours"], found["checkpoint_low"], strict=True)
    result["ours_over_low"] = round(float(np.mean([a.samples / b.samples for a, b in pairs])), 3)
    ours = rows["ours"]
    result["met"] = bool(
        ours.ratio >= bar and ours.samples > rows["lazarus"].samples and ours.needless_restarts == 0
    )
    return result


def show(title: str, result: dict[str, Any], console: Console) -> None:
    table = Table(title=title)
    columns = ("policy", "samples", "over checkpointing", "restarts", "needless")
    rows = {name: row for name, row in result.items() if isinstance(row, dict)}
    uses = [use for use in Use if any(row["spent"][use] >= 5e-4 for row in rows.values())]
    for column in (*columns, *(use.value for use in uses)):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['samples']:,}",
            with_interval(row["ratio_95"], row["ratio"], ".2f"),
            f"{row['restarts']:.1f}",
            str(row["needless_restarts"]),
            *(f"{row['spent'][use.value]:.1%}" for use in uses),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two seeds")
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    console = Console(width=160)
    expert_part, likelihood = fitted_expert_part(arguments.data), share_lost(arguments.data)
    result: dict[str, Any] = {
        "seeds": seeds,
        "expert_part": round(expert_part, 4),
        "failure_probability": round(likelihood, 3),
        "step_s": {},
    }
    span = the_span(arguments.data)
    for paper in MODELS:
        step_s = fitted_step_s(paper, arguments.data, expert_part)
        result["step_s"][paper.name] = round(step_s, 4)
        job = job_of(paper, step_s=step_s, expert_part=expert_part)
        routing = routing_of(arguments.data, paper).thinned(LOADS_EVERY)
        outcomes = played(span, paper, job, routing, seeds, likelihood)
        key = f"{paper.name}, {SPAN}"
        result[key] = summary(outcomes, paper.bar)
        show(key, result[key], console)
    print(json.dumps(result))
    return 0 if all(result[f"{paper.name}, {SPAN}"]["met"] for paper in MODELS) else 1


if __name__ == "__main__":
    sys.exit(main())
