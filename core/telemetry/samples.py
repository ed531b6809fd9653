"""Who sits where: what a rank says of itself when it attaches, and what is known of devices."""

import re
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.layout.pipeline_schedule import Schedule

KEPT_XIDS = 8  # of one device: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """Read seldom, and the same from reading to reading unless something happened.

    None: this device or driver does not tell, never a guess. Counts are since the driver was
    loaded. `nvlink_bytes_per_s` is the speed of all links that are up; `xids` the newest codes the
    driver reported, in order, of `num_xids` since the agent began to listen.
    """

    memory_clock_max_mhz: float | None = None
    sm_clock_set_mhz: float | None = None  # application clock
    power_limit_default_watts: float | None = None
    power_limit_max_watts: float | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    pcie_recoveries: int | None = None  # from L0 to recovery: the link trained anew
    pcie_errors: int | None = None  # corrected by the link
    pcie_fatal_errors: int | None = None  # not corrected by it, fatal or not
    nvlinks: int | None = None
    nvlinks_up: int | None = None
    nvlink_bytes_per_s: float | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    nvlink_errors: int | None = None  # damaged or lost packets
    ecc_corrected: int | None = None
    ecc_uncorrected_ever: int | None = None  # over the device's life
    rows_remapped: int | None = None
    is_remap_pending: bool | None = None  # until the device is reset
    has_remap_failed: bool | None = None
    remap_banks_full: int | None = None  # banks without a spare row
    recovery_action: int | None = None  # NVML_GPU_RECOVERY_ACTION_*: 0 none
    num_xids: int | None = None
    xids: tuple[int, ...] | None = None


MAX_NODE_NAME = 253  # of a host name
NODE_NAME_RULE = f"1 to {MAX_NODE_NAME} printable characters"
JOB_NAME_RULE = "1 to 64 of letters, digits, '-', '_' and '.', not beginning with '.'"
_JOB_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")


class Clock(StrEnum):
    """Where a rank's compute times come from."""

    CUDA = "cuda"  # CUDA events of the device
    CPU = "cpu"  # thread CPU time + run-queue wait + the rest
    EMULATED = "emulated"  # modelled device time from counted work (demonstrations, tests)
    WALL = "wall"  # a foreign trainer's own stopwatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the planner must know of the model; sizes include optimizer state.

    `slots_per_rank` bounds the expert replicas of one layer that a rank has memory for.
    `splits_each_step`: the trainer divides every step's tokens over an expert's hosts by itself, by
    the layout's speeds; otherwise it keeps to the layout's shares.
    `schedule`: the order of chunks in its pipelines, by which their steps are priced. A trainer
    that does not report it runs 1F1B. None: this version does not know the reported schedule, so
    no layout with stages or tensor groups is priced.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    rows_per_step: int
    slots_per_rank: int
    expert_bytes: int
    dense_bytes: int
    splits_each_step: bool = False
    schedule: Schedule | None = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        for name in ("num_layers", "rows_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelShape.{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "num_experts",
            "experts_per_token",
            "slots_per_rank",
            "expert_bytes",
            "dense_bytes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"ModelShape.{name} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What one rank says of itself once, when it attaches to its node's ring directory.

    `role` names the group of ranks that do the same work (stage, chunk, tensor share): peers.
    `device_uuid` is empty for a rank without GPU; `model` is None where work can not move. `life`
    ascends from one launch of the job to the next (Unix milliseconds of its start, the same on all
    ranks); 0 where the launcher sets none: lives are then told apart by pids.
    """

    job: str
    rank: int
    world_size: int
    pid: int
    role: str = "train"
    clock: Clock = Clock.WALL
    device_uuid: str = ""
    model: ModelShape | None = None
    life: int = 0
    can_probe: bool = False  # it runs the fixed probe when all ranks are asked for it

    def __post_init__(self) -> None:
        if self.life < 0:
            raise ValueError(f"life {self.life}: expected Unix milliseconds, or 0 for unknown")
        if not is_job_name(self.job):
            raise ValueError(f"job name {self.job!r}: expected {JOB_NAME_RULE}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")


def is_job_name(name: str) -> bool:
    """True where `name` may name a directory: it becomes one below the ring directory."""
    return _JOB_NAME.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """True where a node may appear under `name`: people and logs read it."""
    return 1 <= len(name) <= MAX_NODE_NAME and name.isprintable()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One reading of one GPU by NVML. None means: this device does not tell, never a guess.

    A MIG instance is a device of its own, in `parent_uuid`: its memory is its own, all other
    readings are of the whole. Of a lost device nothing is known but that it is lost.
    """

    device_index: int
    device_uuid: str
    sampled_s: float  # monotonic clock of the node
    name: str = ""
    parent_uuid: str = ""
    is_lost: bool = False
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilisation_ratio: float | None = None
    memory_used_bytes: int | None = None
    clock_event_reasons: int | None = None  # NVML bit mask
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_replays: int | None = None
    ecc_uncorrected: int | None = None
    processes: tuple[int, ...] | None = None  # pids that hold a context on the device
    answer_s: float | None = None  # how long the driver took for this reading
    power_now_watts: float | None = None  # at this moment; power_watts may be a mean of a second
    energy_joules: float | None = None  # since the driver was loaded
    memory_temperature_celsius: float | None = None
    margin_celsius: float | None = None  # to the temperature at which clocks go down
    # Seconds since the driver was loaded in which clocks were held down, by reason: without gaps,
    # where clock_event_reasons is one moment.
    power_cap_held_s: float | None = None
    board_limit_held_s: float | None = None
    reliability_held_s: float | None = None
    sync_boost_held_s: float | None = None
    sw_thermal_held_s: float | None = None
    hw_thermal_held_s: float | None = None
    power_brake_held_s: float | None = None
    # Bytes since the driver was loaded.
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    # Shares of the time between two readings in which they worked (Hopper and later).
    sm_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    memory_active_ratio: float | None = None
    health: DeviceHealth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """One reading of a node's kernel. None means: this kernel does not tell, never a guess.

    Pressures are shares of the last 10 s, 0 to 1, in which some (all) tasks that wanted to run
    waited for the resource (Linux pressure stall information, "some" and "full"). Network: all
    interfaces that are hardware, together; fabric: all InfiniBand and RoCE ports. Counts are since
    boot. The wall clock: how far the kernel still has to move it, and its bound of the error.
    """

    sampled_s: float  # monotonic clock of the node
    num_cores: int | None = None
    load_1min: float | None = None
    load_5min: float | None = None
    load_15min: float | None = None
    cpu_some_ratio: float | None = None
    cpu_full_ratio: float | None = None
    io_some_ratio: float | None = None
    io_full_ratio: float | None = None
    memory_some_ratio: float | None = None
    memory_full_ratio: float | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    swap_in_bytes_per_s: float | None = None
    swap_out_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    network_received_bytes_per_s: float | None = None
    network_errors: int | None = None
    network_drops: int | None = None
    tcp_resent_ratio: float | None = None  # of the segments sent since the last reading
    fabric_ports: int | None = None
    fabric_ports_up: int | None = None
    fabric_errors: int | None = None
    fabric_sent_bytes_per_s: float | None = None
    fabric_received_bytes_per_s: float | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    is_clock_synchronised: bool | None = None
