"""Output of `pacekeeper plan partition`: table and JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pacekeeper.controller.planning.model.partition import PartitionPlan
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.pipeline_schedule import format_program, pipeline_program
from pacekeeper.core.text import format_s

SHOWN_PIPELINES = 16


def as_document(plan: PartitionPlan, present_step_s: float | None) -> dict[str, Any]:
    """Return the plan as JSON values.

    Args:
        plan: the plan.
        present_step_s: step time of the present partition in seconds; None if it cannot run.
    """
    return {
        "schedule": str(plan.partition.schedule),
        "pipelines": [asdict(pipeline) for pipeline in plan.partition.pipelines],
        "step_s": plan.step_s,
        "present_step_s": present_step_s,
        "fluid_s": plan.fluid_s,
        "fluid_fraction": plan.fluid_fraction,
        "gap": plan.gap,
        "memory_bytes": {str(rank): count for rank, count in plan.memory_bytes},
        "moves": {
            "bytes_in": {str(rank): count for rank, count in plan.moves.bytes_in},
            "total_bytes": plan.moves.total_bytes,
            "bytes_from_checkpoint": plan.moves.bytes_from_checkpoint,
            "move_s": plan.moves.move_s,
        },
        "standby": list(plan.standby),
        "evicted": list(plan.evicted),
        "reason": plan.reason,
    }


def step_programs(plan: PartitionPlan) -> list[dict[str, Any]]:
    """Return the step programs, one per kind of pipeline, with the pipelines that run it."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for at, pipeline in enumerate(plan.partition.pipelines):
        kinds.setdefault((len(pipeline.cells), len(pipeline.micro_batches)), []).append(at)
    return [
        {
            "pipelines": members,
            "num_microbatches": number,
            "stages": format_program(
                pipeline_program(plan.partition.schedule, num_stages=depth, num_microbatches=number)
            ),
        }
        for (depth, number), members in kinds.items()
    ]


def print_programs(found: Sequence[dict[str, Any]]) -> None:
    """Print the step programs, one line per stage."""
    console = Console(highlight=False, soft_wrap=True)
    for program in found:
        of = ", ".join(map(str, program["pipelines"]))
        console.print(
            f"step program of pipelines {of}: {program['num_microbatches']} micro-batches"
        )
        for stage, line in enumerate(program["stages"]):
            console.print(f"  stage {stage}: {escape(line)}")


def print_partition(plan: PartitionPlan, present_s: float | None) -> None:
    """Print the plan as lines and a table."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(plan.reason)}[/]")
    before = "not runnable" if present_s is None else format_s(present_s)
    console.print(
        f"step time: {before} now, {format_s(plan.step_s)} planned; fluid limit "
        f"{format_s(plan.fluid_s)} ({plan.gap:+.1%})"
    )
    lost = plan.moves.bytes_from_checkpoint
    console.print(
        f"to move: {plan.moves.total_bytes:.3g} bytes in {format_s(plan.moves.move_s)}"
        + (f", and {lost:.3g} bytes from a checkpoint" if lost else "")
    )
    fullest, used = max(plan.memory_bytes, key=lambda entry: entry[1])
    console.print(f"maximum memory: {used:.3g} bytes on rank {fullest}")
    for state, ranks in (("idle, available", plan.standby), ("excluded", plan.evicted)):
        if ranks:
            console.print(f"{state}: ranks {format_ranks(ranks)}")
    table = Table(title="pipelines")
    for name in ("pipeline", "rows", "layers", "ranks (shards of attention, MLP)"):
        table.add_column(name)
    for at, pipeline in enumerate(plan.partition.pipelines[:SHOWN_PIPELINES]):
        for stage, cell in enumerate(pipeline.cells):
            heads = {run.rank: run.end - run.first for run in cell.attention}
            columns = {run.rank: run.end - run.first for run in cell.mlp}
            held = ", ".join(
                f"{rank} ({heads.get(rank, 0)}, {columns.get(rank, 0)})" for rank in cell.ranks
            )
            name, rows = (str(at), str(pipeline.rows)) if not stage else ("", "")
            table.add_row(name, rows, f"{cell.first_layer}-{cell.end_layer - 1}", held)
    console.print(table)
    left = len(plan.partition.pipelines) - SHOWN_PIPELINES
    if left > 0:
        console.print(f"and {left} more pipelines (all with --json)")
