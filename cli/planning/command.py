"""`pacekeeper plan placement`: place experts on devices. Contacts no service."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pacekeeper.cli.common.options import FiniteFloatRange, json_option, option_group
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.planning.eplb import check_suffix, eplb, write_tables
from pacekeeper.cli.planning.partition import partition
from pacekeeper.core.errors import ConfigError

if TYPE_CHECKING:
    from pacekeeper.controller.planning.experts.planner import ExpertPlan
    from pacekeeper.controller.planning.experts.problem import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The devices, as given on the command line."""

    nodes: int
    devices: int
    slots: int
    speeds: str
    suspects: str
    failure: float
    racks: int | None
    rack_failure: float

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices

    def check(self) -> None:
        """Raises ConfigError if the options contradict each other or exceed a job's limits."""
        from pacekeeper.core.telemetry.shm_ring import MAX_RANKS

        if self.num_devices > MAX_RANKS:
            raise ConfigError(f"{self.num_devices} devices: a job has at most {MAX_RANKS}")
        if self.rack_failure and not self.racks:
            raise ConfigError("--rack-failure needs --racks")

    def cluster(self) -> "Cluster":
        """Return the planner's description of the devices.

        Raises:
            ConfigError, ValueError: --speeds or --suspects is malformed, or a value out of range.
        """
        from pacekeeper.cli.planning.inputs import parse_device_values
        from pacekeeper.controller.planning.experts.problem import Cluster

        number = self.num_devices
        at_node = tuple(device // self.devices for device in range(number))
        at_rack = tuple(node // self.racks for node in at_node) if self.racks else at_node
        return Cluster(
            speeds=parse_device_values(self.speeds, number, 1.0, "--speeds"),
            slots=(self.slots,) * number,
            failure_probability=parse_device_values(
                self.suspects, number, self.failure, "--suspects"
            ),
            nodes=at_node,
            racks=at_rack,
            rack_failure=dict.fromkeys(at_rack, self.rack_failure) if self.rack_failure else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """The constraints on a placement, as given on the command line."""

    min_nodes: int
    min_racks: int
    drift: float
    current: Path | None
    max_copies: int | None

    def check(self) -> None:
        """Raises ConfigError if the options contradict each other."""
        if self.max_copies is not None and self.current is None:
            raise ConfigError("--max-copies needs --current, the placement in use")

    def plan(
        self, loads: list[list[float]], cluster: "Cluster", present: list[list[list[int]]] | None
    ) -> "ExpertPlan":
        """Plan the placement.

        Args:
            loads: rows, [layers, experts].
            cluster: the devices.
            present: devices that hold each expert, [layers, experts, replicas]; None: none yet.

        Raises:
            ValueError: as `plan_experts`.
        """
        from pacekeeper.controller.planning.experts.planner import PresentPlacement, plan_experts
        from pacekeeper.controller.planning.experts.problem import Floors

        return plan_experts(
            loads,
            cluster,
            floors=Floors(nodes=self.min_nodes, racks=self.min_racks),
            drift=self.drift,
            present=None if present is None else PresentPlacement(present, self.max_copies),
        )


@click.group()
def command() -> None:
    """Plan expert placements or partitions for another trainer."""


command.add_command(partition)
command.add_command(eplb)


@command.command()
@click.option(
    "--loads",
    type=PathType(path_type=Path),
    required=True,
    help="Rows per layer and expert: a file (.json, .csv, .npy), or a recorded run with expert "
    "loads (docs/traces.md).",
)
@option_group(
    "devices",
    ClusterOptions,
    click.option("--nodes", type=click.IntRange(1), required=True, help="Number of nodes."),
    click.option(
        "--devices", type=click.IntRange(1), default=1, show_default=True, help="Devices per node."
    ),
    click.option(
        "--slots", type=click.IntRange(1), required=True, help="Expert slots per device and layer."
    ),
    click.option(
        "--speeds",
        default="",
        metavar="DEVICE=SPEED,...",
        help="Relative speeds of devices; others have 1.0.",
    ),
    click.option(
        "--suspects",
        default="",
        metavar="DEVICE=PROBABILITY,...",
        help="Failure probabilities of devices; others have --failure.",
    ),
    click.option(
        "--failure",
        type=FiniteFloatRange(0.0, 1.0),
        default=0.01,
        show_default=True,
        help="Probability that a device fails before the next plan.",
    ),
    click.option(
        "--racks",
        type=click.IntRange(1),
        help="Nodes per rack [default: each node is its own rack].",
    ),
    click.option(
        "--rack-failure",
        type=FiniteFloatRange(0.0, 1.0),
        default=0.0,
        show_default=True,
        help="Probability that a whole rack fails before the next plan.",
    ),
)
@option_group(
    "wanted",
    PlacementOptions,
    click.option(
        "--min-nodes",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Minimum number of nodes that hold each expert.",
    ),
    click.option(
        "--min-racks",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Minimum number of racks that hold each expert.",
    ),
    click.option(
        "--drift",
        type=FiniteFloatRange(0.0),
        default=0.1,
        show_default=True,
        help="Expected change of loads, relative to the mean work of a device.",
    ),
    click.option(
        "--current",
        type=PathType(path_type=Path),
        help="Placement in use, as printed by --json or in EPLB's form.",
    ),
    click.option(
        "--max-copies",
        type=click.IntRange(0),
        help="Maximum number of expert copies to move from --current.",
    ),
)
@click.option("--plot", type=PathType(path_type=Path), help="Also write a plot to this PNG file.")
@click.option(
    "--eplb",
    "tables",
    type=PathType(path_type=Path),
    help="Also write EPLB's tables to this file (.npz or .json); free slots get replicas.",
)
@json_option("Print the whole plan as one JSON document.")
def placement(
    loads: Path,
    devices: ClusterOptions,
    wanted: PlacementOptions,
    plot: Path | None,
    tables: Path | None,
    as_json: bool,
) -> None:
    """Place the experts of each layer on devices.

    The plan comes with the token share of every replica, a lower bound on the load of the busiest
    device, the losses of devices, nodes and racks that it survives, and the copies to make.
    """
    from pacekeeper.cli.planning import inputs, placement_text

    devices.check()
    wanted.check()
    if tables is not None:
        check_suffix(tables)
    rows = inputs.read_loads(loads)
    present = None
    if wanted.current is not None:
        present = inputs.read_replica_ranks(wanted.current, devices.num_devices)
    try:
        cluster = devices.cluster()
        plan = wanted.plan(rows, cluster, present)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if plot is not None:
        placement_text.write_plot(plan, rows, cluster, plot)
    if tables is not None:
        write_tables(tables, placement_text.as_tables(plan, rows, cluster))
    if as_json:
        click.echo(json.dumps(placement_text.as_document(plan, cluster)))
    else:
        placement_text.print_placement(plan, cluster)
