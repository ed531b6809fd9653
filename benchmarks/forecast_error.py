"""How far is the planners' forecast of a step from the same step played event by event?

`python -m benchmarks.forecast_error`; a minute or two (`--cases N`). Partitions: random models,
dense and with experts, layers that differ, some devices slow or dead; the baseline and the plan of
`plan_partition`, its price against `step_events.py`, which knows ranks, layers and links.
Placements: random loads and speeds of a data-parallel job; the layout that our policy decides on,
priced with what the detector says of the speeds and with the loads it saw, against the steps that
follow, whose loads have moved on as far as recorded ones do in 100 steps. A forecast can be wrong
in two ways, told apart: the planner prices a step wrongly (`placement`: played at the speeds it was
told), and it was told wrong speeds (`slowdowns as told`: of the rank that is told worst, after the
few steps that the detector needs; `at true speeds`: both together, as a job sees it). The bar is
the planner's. Prints median and 95th percentile of the deviation, last one line of JSON; `jitter`:
every rank's time in every layer varies by so much, of which a forecast knows nothing.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.step_events import event_step_s
from pacekeeper.controller.planning.model.partition import Partition
from pacekeeper.controller.planning.model.problem import (
    Device,
    LayerCost,
    Links,
    ModelCost,
    PartitionProblem,
)
from pacekeeper.controller.planning.partition.planner import plan_partition
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.baselines.initial_partition import baseline_partition
from pacekeeper.simulator.engine.detection_model import simulate_detection
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel
from pacekeeper.simulator.policies.pacekeeper import model_of, shape_of, workload_of

BAR = 0.02
JITTER = 0.004  # healthy repeats of an iteration differ by 0.2-0.4 % (Perseus' runs)
DRIFT = 0.09  # of the log of a load: a total variation of 0.05, as recorded routing after 100 steps
RANKS_PER_NODE = 8
LINKS = Links(inside_bytes_per_s=200e9, between_bytes_per_s=25e9)

Array = npt.NDArray[np.float64]
Deviations = dict[str, list[float]]


def random_problem(seed: int) -> PartitionProblem:
    """A job of up to 64 ranks, about one in eight of them slow, one in forty dead."""
    draw = np.random.default_rng(seed)
    while True:
        tensor, data, stages = (
            int(draw.choice(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2, 4))
        )
        has_experts = bool(draw.integers(2))
        layers = [
            _layer(draw, has_experts and at > 0) for at in range(stages * int(draw.integers(2, 6)))
        ]
        model = ModelCost(
            layers=tuple(layers),
            num_attention_shards=8,
            num_mlp_shards=64,
            boundary_bytes=float(draw.uniform(1e5, 4e6)),
            embedding_bytes=5e8,
            head_s=float(draw.uniform(0.0, 4e-4)),
            head_bytes=5e8,
            launch_s=float(draw.uniform(0.0, 4e-4)),
        )
        ranks = range(tensor * data * stages)
        speeds = np.where(draw.random(len(ranks)) < 0.125, draw.uniform(0.3, 0.95, len(ranks)), 1.0)
        devices = tuple(
            Device(
                rank=rank, node=rank // RANKS_PER_NODE, memory_bytes=80e9, speed=float(speeds[rank])
            )
            for rank in ranks
        )
        try:
            baseline = baseline_partition(
                model,
                LINKS,
                devices,
                tensor=tensor,
                data=data,
                stages=stages,
                rows_per_batch=int(draw.integers(4, 33)),
                num_microbatches=stages * int(draw.integers(1, 5)),
                pipelines_per_expert_group=data if has_experts else 0,
            )
        except ValueError:  # it does not fit into memory
            continue
        schedule = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)[int(draw.integers(2))]
        return PartitionProblem(
            model=model,
            devices=devices,
            links=LINKS,
            baseline=replace(baseline, schedule=schedule),
        )


def _layer(draw: np.random.Generator, has_experts: bool) -> LayerCost:
    """Layers of a model differ by a third or so."""
    attention_s, mlp_s, expert_s = 1e-4 * np.exp(draw.normal(0.0, 0.3, 3)) * (1.0, 2.0, 3.0)
    return LayerCost(
        attention_s=float(attention_s),
        mlp_s=float(mlp_s),
        replicated_s=float(draw.uniform(0.0, 1e-5)),
        attention_bytes=1e9,
        mlp_bytes=2e9,
        replicated_bytes=1e6,
        activation_bytes=1e7,
        expert_s=float(expert_s) if has_experts else 0.0,
        expert_bytes=8e9 if has_experts else 0.0,
        dispatch_bytes=float(draw.uniform(1e5, 4e6)) if has_experts else 0.0,
    )


def partition_deviations(seeds: range) -> Deviations:
    """(price - events) / events, by what is priced."""
    found: Deviations = {}
    for seed in seeds:
        problem = random_problem(seed)
        plan = plan_partition(problem)
        told: tuple[tuple[str, Partition, float], ...] = (
            ("baseline, slow devices", problem.baseline, price(problem.baseline, problem).step_s),
            ("plan", plan.partition, plan.step_s),
        )
        for name, partition, step_s in told:
            played_s = event_step_s(partition, problem)
            found.setdefault(name, []).append(step_s / played_s - 1.0)
            jittered_s = event_step_s(partition, problem, jitter=JITTER, seed=seed)
            found.setdefault(f"{name}, jitter", []).append(step_s / jittered_s - 1.0)
    return found


def placement_deviations(seeds: range) -> tuple[Deviations, Deviations]:
    """(forecast - steps) / steps of layouts that our policy decides on: at the speeds it was told,
    and with what the detector told wrongly.
    """
    planned: Deviations = {}
    told: Deviations = {}
    dispatch = Dispatch.EVENED
    for seed in seeds:
        draw = np.random.default_rng(seed)
        job = _random_job(draw)
        num_nodes = int(draw.integers(4, 33))
        speed = {
            node: float(draw.uniform(0.3, 0.9)) for node in range(num_nodes) if draw.random() < 0.1
        }
        parts = draw.lognormal(0.0, 1.0, (job.num_layers, job.num_experts))
        parts /= parts.sum(axis=1, keepdims=True)
        first = even_layout(
            ranks=range(num_nodes),
            num_layers=job.num_layers,
            num_experts=job.num_experts,
            replicas=min(num_nodes, num_nodes * job.slots_per_node // job.num_experts),
        )
        sight = simulate_detection(
            job, first, parts, dispatch, known={}, speed=speed, config=DetectorConfig(), seed=seed
        )
        decision = decide(_view(job, first, parts, sight.slow), PolicyConfig())
        layout = decision.layout or first
        forecast_s = decision.planned_step_s if decision.layout else decision.current_step_s
        if not forecast_s:  # so many are slow that a person must look: nothing is forecast
            continue
        later = parts * np.exp(draw.normal(0.0, DRIFT, parts.shape))
        later /= later.sum(axis=1, keepdims=True)
        believed = {rank: 1.0 / slowdown for rank, slowdown in sight.slow.items()}
        for name, loads in (("placement", parts), ("placement, loads moved on", later)):
            for found, end, speeds in ((planned, "", believed), (told, ", at true speeds", speed)):
                played_s = job.step_s(layout, loads, speeds, dispatch)
                found.setdefault(name + end, []).append(forecast_s / played_s - 1.0)
        wrong = [
            sight.slow.get(rank, 1.0) * speed.get(rank, 1.0) - 1.0 for rank in {*speed, *sight.slow}
        ]
        if wrong:
            told.setdefault("slowdowns as told", []).append(max(wrong, key=abs))
    return planned, told


def _random_job(draw: np.random.Generator) -> JobModel:
    num_experts = int(draw.choice((8, 16, 32)))
    return JobModel(
        num_layers=int(draw.integers(2, 9)),
        num_experts=num_experts,
        slots_per_node=num_experts // 2,
        samples_per_node=16,
        tokens_per_sample=1024,
        balanced_step_s=1.0,
        expert_part=float(draw.uniform(0.2, 0.7)),
        expert_bytes=50_000_000,
        dense_bytes=500_000_000,
    )


def _view(
    job: JobModel, layout: Layout, parts: Array, slow: Mapping[int, float]
) -> PlanningSnapshot:
    """As the controller sees a settled job in which these ranks have become slow."""
    num_nodes, settled = len(layout.ranks), PolicyConfig().settle_steps
    return PlanningSnapshot(
        layout=layout,
        shape=shape_of(job, num_nodes),
        model=model_of(job),
        workload=workload_of(job, parts, num_nodes),
        slow=slow,
        baseline=None,
        step_s=0.0,
        steps_since_plan=settled,
        is_provisional=True,
        num_load_steps=settled,
        next_generation=2,
    )


def figures(found: Deviations) -> dict[str, dict[str, float]]:
    """Of each kind how many, the median and the 95th percentile of the size, and the mean."""
    rows = {}
    for name, deviations in found.items():
        size = np.abs(deviations)
        rows[name] = {
            "cases": len(deviations),
            "median": float(np.median(size)),
            "p95": float(np.percentile(size, 95.0)),
            "most": float(size.max()),
            "mean": float(np.mean(deviations)),
        }
    return rows


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title=title)
    for head in ("what", "cases", "median", "95 %", "most", "mean"):
        table.add_column(head, justify="left" if head == "what" else "right")
    for name, row in rows.items():
        parts = (f"{row[key]:.3%}" for key in ("median", "p95", "most"))
        table.add_row(name, str(row["cases"]), *parts, f"{row['mean']:+.3%}")
    Console(width=120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.cases)
    of_placements, told = placement_deviations(seeds)
    rows = figures(partition_deviations(seeds) | of_placements)
    show("forecast over what is played, less 1", rows)
    of_detector = figures(told)
    show("the same with slowdowns told wrongly: the detector's part", of_detector)
    is_met = all(row["p95"] <= BAR for row in rows.values())
    result = {"bar": BAR, "met": is_met, "rows": rows, "with_detector": of_detector}
    print(json.dumps(result))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
