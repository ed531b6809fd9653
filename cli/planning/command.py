"""`pacekeeper plan placement`: place experts on devices. Reads files, contacts no service."""

import json
from pathlib import Path

import click

from pacekeeper.cli.common.options import FiniteFloatRange, json_option
from pacekeeper.cli.planning.partition import partition


@click.group()
def command() -> None:
    """Plan expert placements or partitions for another trainer."""


command.add_command(partition)


@command.command()
@click.option(
    "--loads",
    type=Path,
    required=True,
    help="File with the rows per layer and expert: .json, .csv or .npy.",
)
@click.option("--nodes", type=click.IntRange(1), required=True, help="Number of nodes.")
@click.option(
    "--devices", type=click.IntRange(1), default=1, show_default=True, help="Devices per node."
)
@click.option(
    "--slots", type=click.IntRange(1), required=True, help="Expert slots per device and layer."
)
@click.option(
    "--speeds",
    default="",
    metavar="DEVICE=SPEED,...",
    help="Relative speeds of devices; others have 1.0.",
)
@click.option(
    "--suspects",
    default="",
    metavar="DEVICE=PROBABILITY,...",
    help="Failure probabilities of devices; others have --failure.",
)
@click.option(
    "--failure", type=FiniteFloatRange(0.0, 1.0), default=0.01, show_default=True,
    help="Probability that a device fails before the next plan.",
)  # fmt: skip
@click.option(
    "--racks", type=click.IntRange(1), help="Nodes per rack [default: each node is its own rack]."
)
@click.option(
    "--rack-failure", type=FiniteFloatRange(0.0, 1.0), default=0.0, show_default=True,
    help="Probability that a whole rack fails before the next plan.",
)  # fmt: skip
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Minimum number of nodes that hold each expert.",
)
@click.option(
    "--min-racks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Minimum number of racks that hold each expert.",
)
@click.option(
    "--drift", type=FiniteFloatRange(0.0), default=0.1, show_default=True,
    help="Expected change of loads, relative to the mean work of a device.",
)  # fmt: skip
@click.option("--current", type=Path, help="Placement in use, as printed by --json.")
@click.option(
    "--max-copies",
    type=click.IntRange(0),
    help="Maximum number of expert copies to move from --current.",
)
@click.option("--plot", type=Path, help="Also write a plot to this PNG file.")
@json_option("Print the whole plan as one JSON document.")
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
    """Place the experts of each layer on devices, with the token share of every replica.

    The plan comes with a lower bound on the load of the busiest device, the losses of devices,
    nodes and racks that it survives, and the copies to make.
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
        raise ConfigError("--max-copies needs --current, the placement in use")
    rows = inputs.read_loads(loads)
    present = None if current is None else inputs.read_replica_ranks(current, num_devices)
    at_node = tuple(device // devices for device in range(num_devices))
    at_rack = tuple(node // racks for node in at_node) if racks else at_node
    if rack_failure and not racks:
        raise ConfigError("--rack-failure needs --racks")
    try:
        cluster = Cluster(
            speeds=inputs.parse_device_values(speeds, num_devices, 1.0, "--speeds"),
            slots=(slots,) * num_devices,
            failure_probability=inputs.parse_device_values(
                suspects, num_devices, failure, "--suspects"
            ),
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
        placement_text.write_plot(plan, rows, cluster, plot)
    if as_json:
        click.echo(json.dumps(placement_text.as_document(plan, cluster)))
    else:
        placement_text.print_placement(plan, cluster)
