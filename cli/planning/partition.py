"""`pacekeeper plan partition`: layers, shards and rows for a trainer of one's own. Asks nobody."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("description", type=click.Path(path_type=Path))
@click.option("--speeds", default="", help="RANK=SPEED,..: those that are not 1.0; 0: dead.")
@click.option("--current", type=Path, help="An earlier plan (--json): what runs now.")
@click.option("--whole", is_flag=True, help="Every living rank keeps some work.")
@click.option("--program", is_flag=True, help="What each stage does in a step, in order, too.")
@click.option("--json", "as_json", is_flag=True, help="The whole plan as one JSON document.")
def partition(
    description: Path, speeds: str, current: Path | None, whole: bool, program: bool, as_json: bool
) -> None:
    """Which ranks hold which layers and shards, and compute which rows.

    DESCRIPTION is a TOML or JSON file (docs/partition.md; examples/partition.toml). The plan comes
    with its forecast, the distance to the fluid limit, memory, bytes to move, and the reason.
    """
    from dataclasses import replace

    from pacekeeper.cli.planning.partition_text import as_document, programs, show, show_programs
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
    found = programs(plan, problem.schedule) if program else []
    if as_json:
        document = as_document(plan, present_s)
        click.echo(json.dumps(document | {"programs": found} if program else document))
    else:
        show(plan, present_s)
        show_programs(found)


def _speeds(text: str) -> dict[int, float]:
    from pacekeeper.core.errors import ConfigError

    speeds = {}
    for part in filter(None, text.split(",")):
        rank, _, speed = part.partition("=")
        try:
            speeds[int(rank)] = float(speed)
        except ValueError:
            raise ConfigError(f"--speeds: expected RANK=NUMBER,.., got '{part}'") from None
    return speeds
