"""Samples of a node: readings of its GPUs (NVML) and of its kernel.

The agent takes them, the controller and the predictor read them.
"""

from dataclasses import dataclass

KEPT_XIDS = 8  # of one device: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """Slow-changing state of one GPU; constant from sample to sample unless an event occurs.

    None: the device or driver does not report it. Counts start when the driver is loaded.
    `nvlink_bytes_per_s` is the total speed of all active links; `xids` are the newest error codes
    of the driver, in order, out of `num_xids` since the agent started to listen.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One reading of one GPU by NVML. None: the device does not report the value.

    A MIG instance is a device of its own with `parent_uuid`: its memory is its own, all other
    readings are of the whole GPU. A lost device has no values except `is_lost`.
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
    """One reading of a node's kernel. None: the kernel does not report the value.

    Pressures are shares of the last 10 s, 0 to 1, in which some (or all) runnable tasks waited for
    the resource (Linux pressure stall information, "some" and "full"). Network values are sums over
    hardware interfaces, fabric values over InfiniBand and RoCE ports. Counts start at boot.
    `clock_offset_s` is the remaining correction of the wall clock, `clock_error_s` its error bound.
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
