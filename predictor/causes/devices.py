"""Rules for readings of a device (NVML) that explain a slow rank.

A reading is a cause only if peers of the same model, which are not slow, do not share it; clock
rates, link widths and power count under load only. Every rule takes the worst sample since the
onset, for the device and its peers alike: one more sample never lowers the certainty of its rule.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.predictor.causes.evidence import (
    IDLE,
    Cause,
    CauseKind,
    DeviceWindow,
    Rule,
    RuleResult,
    Symptoms,
    compare_with_peers,
    grown,
    measured_values,
    shown,
    unlike,
)

CLOCK_APART = 1.10  # clocks this factor apart: the smallest slowdown worth a finding
HOTTER_CELSIUS = 10.0
HOT_CELSIUS = 85.0  # near the slowdown limit of present data-centre devices
HOT_MEMORY_CELSIUS = 95.0  # near the limit of present HBM
NEAR_CELSIUS = 3.0  # to the temperature at which clocks go down
AT_LIMIT_RATIO = 0.97
LESS_POWER = 1.05
LESS_SPEED = 1.05
LESS_ACTIVE = 1.25  # factor: peers this much busier than a device show that it waits
SLOW_ANSWER_S = 0.5  # NVML takes milliseconds; its lock is held meanwhile, and launches wait

_PROBABLE, _SUSPECTED = Tier.PROBABLE, Tier.SUSPECTED
_MEMORY, _DRIVER = CauseKind.MEMORY_ERRORS, CauseKind.DRIVER
_NVLINK, _PCIE = CauseKind.NVLINK, CauseKind.PCIE
_RECOVERIES: Mapping[int, str] = {  # NVML_GPU_RECOVERY_ACTION; 0: none
    1: "a reset of the device",
    2: "a reboot of the node",
    3: "that peers leave it",
    4: "that it is drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
XIDS: Mapping[int, tuple[CauseKind, Tier, str]] = {
    13: (_DRIVER, _SUSPECTED, "a graphics exception, mostly of the application"),
    31: (_DRIVER, _SUSPECTED, "a page fault, mostly of the application"),
    43: (_DRIVER, _SUSPECTED, "a channel that stopped, mostly by the application"),
    45: (_DRIVER, _SUSPECTED, "a channel that was cleaned up"),
    48: (_MEMORY, _PROBABLE, "an uncorrectable memory error"),
    61: (_DRIVER, _PROBABLE, "a microcontroller that stopped"),
    62: (_DRIVER, _PROBABLE, "a microcontroller that halted"),
    63: (_MEMORY, _SUSPECTED, "a memory row that was marked for replacement"),
    64: (_MEMORY, _PROBABLE, "a memory row that could not be replaced"),
    74: (_NVLINK, _PROBABLE, "an NVLink error"),
    79: (CauseKind.LOST, Tier.CONFIRMED, "the device fell off its bus"),
    92: (_MEMORY, _PROBABLE, "many corrected memory errors"),
    94: (_MEMORY, _PROBABLE, "an uncorrectable memory error that was contained"),
    95: (_MEMORY, _PROBABLE, "an uncorrectable memory error that was not contained"),
    119: (_DRIVER, _PROBABLE, "a GSP that does not answer"),
    120: (_DRIVER, _PROBABLE, "an error of the GSP"),
}
"""(kind of cause, highest tier, text) of each error code of the driver."""
UNKNOWN_XID = (_DRIVER, _SUSPECTED, "see NVIDIA's catalog")


def known_values(samples: Iterable[DeviceSample], field: str) -> list[Any]:
    """Return the reported values of a field of samples, or of their `health`."""
    return measured_values(
        [getattr(s if hasattr(s, field) else s.health, field, None) for s in samples]
    )


def xids(symptoms: Symptoms) -> RuleResult:
    """Find errors that the driver reported since the onset, each code once."""
    own = None if symptoms.device is None else _new_xids(symptoms.device)
    if own is None:
        return RuleResult(subject="Xids", is_reported=False)
    among = compare_with_peers(map(_new_xids, symptoms.alike), bool)
    causes = []
    for code in () if among.is_refuted else dict.fromkeys(own):
        kind, most, meaning = XIDS.get(code, UNKNOWN_XID)
        words = f"the driver reported Xid {code}, {meaning} ({among.words})"
        causes.append(Cause(kind=kind, sure=among.sure(most), words=words))
    return RuleResult(subject="Xids", causes=tuple(causes))


def _new_xids(window: DeviceWindow) -> tuple[int, ...] | None:
    """Codes since the onset, oldest first; None: not observed. Samples hold the newest codes."""
    healths = [s.health for s in window.since_before if s.health]
    known = [(h.num_xids, h.xids) for h in healths if h.num_xids is not None and h.xids is not None]
    if len(known) < 2:
        return None
    found: list[int] = []
    for (before, _), (after, newest) in pairwise(known):
        if after > before:
            found += newest[before - after :]
    return tuple(found)


def _most(field: str, samples: str = "during") -> Callable[[DeviceWindow], Any]:
    return lambda window: max(known_values(getattr(window, samples), field), default=None)


def _least(field: str, samples: str = "during") -> Callable[[DeviceWindow], Any]:
    return lambda window: min(known_values(getattr(window, samples), field), default=None)


def _growth(field: str) -> Callable[[DeviceWindow], int | None]:
    """Growth of a counter since the last sample before the onset."""
    return lambda window: grown(known_values(window.since_before, field))


def _foreign_pids(window: DeviceWindow) -> str | None:
    """Processes on the device that are no ranks of the job; None: not reported.

    NVML reports process IDs of the host's namespace: if no rank is among them, they are ignored.
    """
    pids = frozenset(pid for each in known_values(window.during, "processes") for pid in each)
    return ", ".join(map(str, sorted(pids - window.pids))) if pids & window.pids else None


def _full_limit(window: DeviceWindow) -> float | None:
    """The power limit if the device draws all of it, else 0; None: not reported."""
    samples = [s for s in window.busy if s.power_watts is not None and s.power_limit_watts]
    if not samples:
        return None
    is_full = max((s.power_watts or 0.0) / (s.power_limit_watts or 1.0) for s in samples)
    return _least("power_limit_watts")(window) if is_full >= AT_LIMIT_RATIO else 0.0


def _recovery(window: DeviceWindow) -> str | None:
    action = _most("recovery_action")(window)
    return action and _RECOVERIES.get(action, f"action {action}")


def _links_down(window: DeviceWindow) -> int | None:
    healths = [s.health for s in window.during if s.health]
    counts = [
        h.nvlinks - h.nvlinks_up
        for h in healths
        if h.nvlinks is not None and h.nvlinks_up is not None
    ]
    return max(counts, default=None)


def _link_gigabytes_per_s(window: DeviceWindow) -> float | None:
    speeds = known_values(window.during, "nvlink_bytes_per_s")
    return min(speeds) / 1e9 if speeds else None


def _is_lost(window: DeviceWindow) -> bool | None:
    return any(s.is_lost for s in window.during) if window.during else None


def _idles(window: DeviceWindow) -> bool | None:
    reasons = known_values(window.during, "clock_event_reasons")
    return any(reason & IDLE for reason in reasons) if reasons else None


def _counter(subject: str, kind: CauseKind, most: Tier, field: str, what: str = "") -> Rule:
    """A counter that grew since the onset; `what` it counts, if not the subject."""
    return shown(subject, kind, most, _growth(field), f"{{mine}} new {what or subject} ({{among}})")


def _heat(subject: str, field: str, hot: float, own: str, theirs: str) -> Rule:
    """Heat alone does not slow a device: SUSPECTED at most."""
    return unlike(
        subject,
        CauseKind.THERMAL,
        _SUSPECTED,
        _most(field),
        f"{own}{{mine:.0f}} degrees Celsius, {theirs} {{usual:.0f}}",
        is_alike=lambda usual, mine: usual > mine - HOTTER_CELSIUS,
        usual=lambda _: hot - HOTTER_CELSIUS,
        alone=f"{own}{{mine:.0f}} degrees Celsius, no peer to compare with",
    )


def _pcie_link(field: str, name: str) -> Rule:
    """A link that trained down: below its peers' or, without any, below its own maximum."""
    return unlike(
        "PCIe link",
        _PCIE,
        _PROBABLE,
        _least(field, "busy"),
        f"PCIe {name}{{mine:.0f}}, its peers {name}{{usual:.0f}}",
        is_alike=lambda usual, mine: usual <= mine,
        usual=_most(f"{field}_max"),
        alone=f"PCIe {name}{{mine:.0f}}, it can {{usual:.0f}}",
    )


def _below(factor: float) -> Callable[[float, float], bool]:
    return lambda usual, mine: usual < mine * factor


sm_clock = unlike(
    "SM clock",
    CauseKind.CLOCKS,
    _PROBABLE,
    _least("sm_clock_mhz", "busy"),
    "SM clock {mine:.0f} MHz where its peers ran {usual:.0f} MHz, which would make it "
    "x{times:.2f} slow ({among} as low)",
    is_alike=_below(CLOCK_APART),
    usual=_most("sm_clock_max_mhz", "busy"),
    alone="SM clock {mine:.0f} MHz where its maximum is {usual:.0f} MHz, which would make it "
    "x{times:.2f} slow ({among} as low)",
)

# The signal, the kind of cause, its highest tier, the reading, the words.
FAULTS: tuple[Rule, ...] = (
    shown("loss", CauseKind.LOST, Tier.CONFIRMED, _is_lost,
          "the device is lost: it answers its driver no more"),
    xids,
    shown("processes on the device", CauseKind.FOREIGN_PROCESS, _PROBABLE, _foreign_pids,
          "processes that are no ranks of the job use the device: {mine} ({among})"),
)  # fmt: skip
STATES: tuple[Rule, ...] = (
    _counter("uncorrected ECC errors", _MEMORY, _PROBABLE, "ecc_uncorrected"),
    sm_clock,
    unlike("application clock", CauseKind.CLOCKS, _PROBABLE, _least("sm_clock_set_mhz"),
           "its application clock is set to {mine:.0f} MHz, its peers' to {usual:.0f}",
           is_alike=_below(CLOCK_APART)),
    _pcie_link("pcie_width", "width x"),
    _pcie_link("pcie_generation", "generation "),
    unlike("power", CauseKind.POWER, _PROBABLE, _least("power_limit_watts"),
           "its power limit is {mine:.0f} W, its peers' {usual:.0f} W",
           is_alike=_below(LESS_POWER), usual=_most("power_limit_default_watts"),
           alone="its power limit is set to {mine:.0f} W, by default it is {usual:.0f} W"),
    shown("power", CauseKind.POWER, _SUSPECTED, _full_limit,
          "it draws all of its power limit of {mine:.0f} W ({among})", needs_peers=True),
    shown("NVLinks", _NVLINK, _PROBABLE, _links_down, "{mine} of its NVLinks are down ({among})"),
    unlike("NVLinks", _NVLINK, _PROBABLE, _link_gigabytes_per_s,
           "its NVLinks add up to {mine:.0f} GB/s, those of its peers to {usual:.0f}",
           is_alike=_below(LESS_SPEED)),
    shown("row remapping", _MEMORY, _PROBABLE, _most("has_remap_failed"),
          "a damaged row of its memory could not be replaced ({among})"),
    shown("row remapping", _MEMORY, _SUSPECTED, _most("is_remap_pending"),
          "damaged rows of its memory wait for a reset ({among})"),
    shown("recovery action", _DRIVER, _PROBABLE, _recovery,
          "the driver asks for {mine} ({among})"),
)  # fmt: skip
SIGNS: tuple[Rule, ...] = (
    _counter("PCIe replays", _PCIE, _SUSPECTED, "pcie_replays"),
    _counter("PCIe errors", _PCIE, _PROBABLE, "pcie_fatal_errors", "uncorrected PCIe errors"),
    _counter("PCIe errors", _PCIE, _SUSPECTED, "pcie_errors", "corrected PCIe errors"),
    _counter("PCIe errors", _PCIE, _SUSPECTED, "pcie_recoveries", "PCIe recoveries"),
    _counter("NVLink errors", _NVLINK, _SUSPECTED, "nvlink_errors", "damaged NVLink packets"),
    _counter("NVLink errors", _NVLINK, _SUSPECTED, "nvlink_replays", "NVLink replays"),
    _counter("NVLink errors", _NVLINK, _SUSPECTED, "nvlink_recoveries", "NVLink recoveries"),
    _counter("corrected ECC", _MEMORY, _SUSPECTED, "ecc_corrected", "corrected ECC errors"),
    shown("driver's answers", _DRIVER, _SUSPECTED, _most("answer_s"),
          "its driver took {mine:.1f} s to answer ({among})",
          is_bad=lambda longest_s: longest_s >= SLOW_ANSWER_S),
    _heat("temperature", "temperature_celsius", HOT_CELSIUS, "", "its peers had"),
    _heat("memory temperature", "memory_temperature_celsius", HOT_MEMORY_CELSIUS,
          "its memory has ", "its peers'"),
    shown("temperature margin", CauseKind.THERMAL, _SUSPECTED, _least("margin_celsius"),
          "{mine:.0f} degrees below the temperature at which it slows down ({among})",
          is_bad=lambda margin: margin <= NEAR_CELSIUS),
    unlike("activity", CauseKind.STARVED, _SUSPECTED, _least("sm_active_ratio"),
           "its multiprocessors worked {mine:.0%} of the time, its peers' {usual:.0%}",
           is_alike=_below(LESS_ACTIVE)),
    shown("idling", CauseKind.STARVED, _SUSPECTED, _idles,
          "the device idles in between: its node feeds it too slowly ({among})",
          needs_peers=True),
)  # fmt: skip
