"""`pacekeeper plan partition`: divide layers, shards and rows among ranks. Reads files only."""

import json
from pathlib import Path

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType


@click.command()
@click.argument("description", type=PathType(path_type=Path))
@click.option(
    "--speeds",
    default="",
    metavar="RANK=SPEED,...",
    help="Relative speeds of ranks; others have 1.0, dead ranks 0.",
)
@click.option(
    "--current", type=PathType(path_type=Path), help="Partition in use, as printed by --json."
)
@click.option("--whole", is_flag=True, help="Give every live rank some work.")
@click.option("--program", is_flag=True, help="Also print the step program of each stage.")
@json_option("Print the whole plan as one JSON document.")
def partition(
    description: Path, speeds: str, current: Path | None, whole: bool, program: bool, as_json: bool
) -> None:
    """Divide layers, shards and rows among a job's ranks.

    DESCRIPTION is a TOML or JSON file (docs/partition.md; examples/partition.toml). The plan comes
    with its forecast, the gap to the fluid limit, memory, bytes to move, and the reason.
    """
    from dataclasses import replace

    from pacekeeper.cli.planning.partition_text import (
        as_document,
        print_partition,
        print_programs,
        step_programs,
    )
    from pacekeeper.controller.planning.partition.planner import plan_partition
    from pacekeeper.controller.planning.partition_cost.step_time import price
    from pacekeeper.core.errors import ConfigError
    from pacekeeper.simulator.scenario.partition_spec import read_partition, read_problem

    present = None if current is None else read_partition(current)
    problem = replace(read_problem(description, _speeds(speeds), present), is_whole=whole)
    try:
        plan = plan_partition(problem)
    except ValueError as error:
        raise ConfigError(f"{description}: {error}") from None
    is_alive = set(problem.now.ranks) <= set(problem.living)
    present_s = price(problem.now, problem).step_s if is_alive else None
    found = step_programs(plan) if program else []
    if as_json:
        document = as_document(plan, present_s)
        click.echo(json.dumps(document | {"programs": found} if program else document))
    else:
        print_partition(plan, present_s)
        print_programs(found)


def _speeds(text: str) -> dict[int, float]:
    from pacekeeper.core.errors import ConfigError

    speeds = {}
    for part in filter(None, text.split(",")):
        rank, _, speed = part.partition("=")
        try:
            speeds[int(rank)] = float(speed)
        except ValueError:
            raise ConfigError(f"--speeds: expected RANK=NUMBER,..., got '{part}'") from None
    return speeds
