"""`pacekeeper plan`: plans for people who bring their own trainer. Reads files, asks nobody."""

import json
from pathlib import Path

import click

from pacekeeper.cli.common.options import Finite
from pacekeeper.cli.planning.partition import partition


@click.group()
def command() -> None:
    """Plan for a trainer of your own."""


command.add_command(partition)


@command.command()
@click.option(
    "--loads", type=Path, required=True, help="Rows per layer and expert: .json, .csv, .npy."
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="How many nodes.")
@click.option("--devices", type=click.IntRange(1), default=1, help="Devices per node. [1]")
@click.option(
    "--slots", type=click.IntRange(1), required=True, help="Experts per device and layer."
)
@click.option("--speeds", default="", help="DEVICE=SPEED,..: those that are not 1.0.")
@click.option("--suspects", default="", help="DEVICE=PROBABILITY,..: those more likely to fail.")
@click.option(
    "--failure", type=Finite(0.0, 1.0), default=0.01, show_default=True,
    help="Probability that a device fails before the next plan.",
)  # fmt: skip
@click.option("--racks", type=click.IntRange(1), help="Nodes per rack; not given: each its own.")
@click.option(
    "--rack-failure", type=Finite(0.0, 1.0), default=0.0, show_default=True,
    help="Probability that a rack fails with all its nodes before the next plan.",
)  # fmt: skip
@click.option(
    "--min-nodes", type=click.IntRange(1), default=1, show_default=True, help="Per expert."
)
@click.option(
    "--min-racks", type=click.IntRange(1), default=1, show_default=True, help="Per expert."
)
@click.option(
    "--drift", type=Finite(0.0), default=0.1, show_default=True,
    help="Change of loads to keep room for, relative to one device's fair work.",
)  # fmt: skip
@click.option("--current", type=Path, help="An earlier plan (--json) to start from.")
@click.option("--max-copies", type=click.IntRange(0), help="Copies allowed beyond --current.")
@click.option("--plot", type=Path, help="Draw loads and survival into this .png.")
@click.option("--json", "as_json", is_flag=True, help="The whole plan as one JSON document.")
def placement(
    loads: Path,
    nodes: int,
    devices: int,
    slots: int,
    speeds: str,
    suspects: str,
    failure: float,
    racks: int | None,
    rack_failure: float,
    min_nodes: int,
    min_racks: int,
    drift: float,
    current: Path | None,
    max_copies: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Which devices hold which experts, and which share of its tokens each computes.

    With proof: how even, against what no placement beats; which losses are survived; what to copy.
    """
    from pacekeeper.cli.planning import inputs, placement_text
    from pacekeeper.controller.planning.experts.planner import plan_experts
    from pacekeeper.controller.planning.experts.problem import Cluster, Floors
    from pacekeeper.core.errors import ConfigError
    from pacekeeper.core.telemetry.shm_ring import MAX_RANKS

    num_devices = nodes * devices
    if num_devices > MAX_RANKS:
        raise ConfigError(f"{num_devices} devices: a job has at most {MAX_RANKS}")
    if max_copies is not None and current is None:
        raise ConfigError("--max-copies needs --current: without it every replica is a copy")
    rows = inputs.read_loads(loads)
    present = None if current is None else inputs.read_hosts(current, num_devices)
    at_node = tuple(device // devices for device in range(num_devices))
    at_rack = tuple(node // racks for node in at_node) if racks else at_node
    if rack_failure and not racks:
        raise ConfigError("--rack-failure needs --racks")
    try:
        cluster = Cluster(
            speeds=inputs.by_device(speeds, num_devices, 1.0, "--speeds"),
            slots=(slots,) * num_devices,
            failure_probability=inputs.by_device(suspects, num_devices, failure, "--suspects"),
            nodes=at_node,
            racks=at_rack,
            rack_failure=dict.fromkeys(at_rack, rack_failure) if rack_failure else {},
        )
        plan = plan_experts(
            rows,
            cluster,
            floors=Floors(nodes=min_nodes, racks=min_racks),
            drift=drift,
            present=present,
            max_copies=max_copies,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if plot is not None:
        placement_text.draw(plan, rows, cluster, plot)
    if as_json:
        click.echo(json.dumps(placement_text.as_document(plan, cluster)))
    else:
        placement_text.show(plan, cluster)
