"""What stays as it is while a device is well: settings, links, error counts, Xids."""

from dataclasses import dataclass

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
