"""What a device's samples say of why its rank is slow: one rule per reading of NVML. Pure.

A reading accuses only under load and only where peers of the same model, which are not slow, do
not show it too. Every rule takes the worst sample since the onset, of the device and of its peers
alike: one more sample of a device never makes its rule less sure.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

from pacekeeper.core.findings import Tier
from pacekeeper.predictor.symptoms import (
    IDLE,
    Beside,
    Cause,
    CauseKind,
    DeviceWindow,
    Look,
    Symptoms,
    beside,
    told,
)

CLOCK_APART = 1.10  # clocks this factor apart: the smallest slowdown worth a finding
THROTTLED = 1.05  # a clock this factor below its maximum is held down
HOTTER_CELSIUS = 10.0
HOT_CELSIUS = 85.0  # near the slowdown limit of present data-centre devices
AT_LIMIT_RATIO = 0.97
LESS_POWER = 1.05

# NVML clock-event reasons (nvml.h, nvmlClocksEventReasons): (bit, kind, at most so sure, words).
# What the hardware says of itself is proof once the clock is low too; the last three are common in
# health and suspicious only beside peers.
_HARD = (
    (0x40, CauseKind.THERMAL, "hardware thermal slowdown"),
    (0x20, CauseKind.THERMAL, "software thermal slowdown"),
    (0x80, CauseKind.POWER, "power brake (asserted from outside)"),
    (0x08, CauseKind.CLOCKS, "hardware slowdown"),
)
_SOFT = (
    (0x04, CauseKind.POWER, "software power cap"),
    (0x10, CauseKind.CLOCKS, "sync boost (the clock of the slowest in its group)"),
    (0x100, CauseKind.CLOCKS, "display clock setting"),
)
_POWER_CAP = 0x04


def clock_events(symptoms: Symptoms) -> Look:
    """The reasons that the device itself gives for a low clock."""
    subject = "clock events"
    own = symptoms.device
    if own is None or not told([s.clock_event_reasons for s in own.busy]):
        return Look(subject=subject, is_told=False)
    is_low, is_below = _is_held_down(own), _is_below_peers(symptoms)
    causes = []
    for bit, kind, name in (*_HARD, *_SOFT):
        among = _asked(symptoms, partial(_has_event, bit=bit))
        if not _has_event(own, bit) or among.is_refuted:
            continue
        is_hard = (bit, kind, name) in _HARD
        if is_hard:
            most = Tier.CONFIRMED if is_low else Tier.PROBABLE
        else:
            most = Tier.PROBABLE if bit == _POWER_CAP and is_below else Tier.SUSPECTED
        count = sum(bool((s.clock_event_reasons or 0) & bit) for s in own.busy)
        causes.append(
            Cause(
                kind=kind,
                sure=among.sure(most),
                words=f"the device reports {name} in {count} of {len(own.busy)} samples "
                f"({among.words})",
                not_seen=("SM clock",) if is_low is None else (),
            )
        )
    return Look(subject=subject, causes=tuple(causes))


def sm_clock(symptoms: Symptoms) -> Look:
    """The compute clock against its peers', or its own maximum where there are none."""
    subject = "SM clock"
    own = symptoms.device
    mine = None if own is None else _lowest_clock(own)
    if own is None or mine is None:
        return Look(subject=subject, is_told=False)
    among = _asked(symptoms, lambda peer: _shares_clock(peer, mine))
    theirs = told([_lowest_clock(peer) for peer in symptoms.alike])
    top = max(told([s.sm_clock_max_mhz for s in own.busy]), default=None)
    healthy = median(theirs) if theirs else top
    if healthy is None:
        return Look(subject=subject, is_told=False)
    if healthy < mine * CLOCK_APART or among.is_refuted:
        return Look(subject=subject)
    whose = "its peers ran" if theirs else "its maximum is"
    cause = Cause(
        kind=CauseKind.CLOCKS,
        sure=among.sure(Tier.PROBABLE),
        words=f"SM clock {mine:.0f} MHz where {whose} {healthy:.0f} MHz, which would make it "
        f"x{healthy / max(mine, 1.0):.2f} slow ({among.words} as low)",
    )
    return Look(subject=subject, causes=(cause,))


def temperature(symptoms: Symptoms) -> Look:
    """Heat alone slows nothing: never more than suspected."""
    subject = "temperature"
    own = symptoms.device
    mine = None if own is None else _hottest(own)
    if mine is None:
        return Look(subject=subject, is_told=False)
    theirs = told([_hottest(peer) for peer in symptoms.alike])
    among = Beside(told=len(theirs), shared=sum(t > mine - HOTTER_CELSIUS for t in theirs))
    if among.is_refuted or (not theirs and mine < HOT_CELSIUS):
        return Look(subject=subject)
    against = f"its peers had {median(theirs):.0f}" if theirs else "no peer to compare with"
    words = f"{mine:.0f} degrees Celsius, {against}"
    cause = Cause(kind=CauseKind.THERMAL, sure=Tier.SUSPECTED, words=words)
    return Look(subject=subject, causes=(cause,))


def power(symptoms: Symptoms) -> Look:
    """A lower limit than the peers' is a setting; running at it is common in health."""
    subject = "power"
    own = symptoms.device
    limit = None if own is None else _limit(own)
    if own is None or limit is None:
        return Look(subject=subject, is_told=False)
    theirs = told([_limit(peer) for peer in symptoms.alike])
    among = Beside(told=len(theirs), shared=sum(t < limit * LESS_POWER for t in theirs))
    causes = []
    if theirs and not among.is_refuted:
        words = f"its power limit is {limit:.0f} W, its peers' {median(theirs):.0f} W"
        causes.append(Cause(kind=CauseKind.POWER, sure=Tier.PROBABLE, words=words))
    at_limit = _asked(symptoms, _is_at_limit)
    if _is_at_limit(own) and at_limit.told and not at_limit.is_refuted:
        words = f"it draws all of its power limit of {limit:.0f} W ({at_limit.words})"
        causes.append(Cause(kind=CauseKind.POWER, sure=Tier.SUSPECTED, words=words))
    return Look(subject=subject, causes=tuple(causes))


def pcie_link(symptoms: Symptoms) -> Look:
    """A link that trained down. Without peers nobody knows what it should be."""
    subject = "PCIe link"
    own = symptoms.device
    causes = []
    is_told = False
    for field, name in (("pcie_width", "width x"), ("pcie_generation", "generation ")):
        mine = None if own is None else _least(own, field)
        if mine is None:
            continue
        is_told = True
        theirs = told([_least(peer, field) for peer in symptoms.alike])
        among = Beside(told=len(theirs), shared=sum(t <= mine for t in theirs))
        if theirs and not among.is_refuted:
            words = f"PCIe {name}{mine:.0f}, its peers {name}{median(theirs):.0f}"
            causes.append(Cause(kind=CauseKind.PCIE, sure=Tier.PROBABLE, words=words))
    return Look(subject=subject, is_told=is_told, causes=tuple(causes))


def pcie_replays(symptoms: Symptoms) -> Look:
    """Packets sent again since the onset; a few are common in health."""
    return _growing(symptoms, "pcie_replays", "PCIe replays", CauseKind.PCIE, Tier.SUSPECTED)


def ecc(symptoms: Symptoms) -> Look:
    """Uncorrected memory errors since the onset."""
    kind = CauseKind.MEMORY_ERRORS
    return _growing(symptoms, "ecc_uncorrected", "uncorrected ECC errors", kind, Tier.PROBABLE)


def foreign_processes(symptoms: Symptoms) -> Look:
    """Processes on the device that are no ranks of the job.

    NVML gives numbers of the host's namespace: where no rank of the job is among them, the numbers
    can not be compared and say nothing.
    """
    subject = "processes on the device"
    own = symptoms.device
    strangers = None if own is None else _strangers(own)
    if strangers is None:
        return Look(subject=subject, is_told=False)
    among = _asked(symptoms, lambda peer: None if (s := _strangers(peer)) is None else bool(s))
    if not strangers or among.is_refuted:
        return Look(subject=subject)
    pids = ", ".join(map(str, sorted(strangers)))
    words = f"processes that are no ranks of the job use the device: {pids} ({among.words})"
    cause = Cause(kind=CauseKind.FOREIGN_PROCESS, sure=among.sure(Tier.PROBABLE), words=words)
    return Look(subject=subject, causes=(cause,))


def idleness(symptoms: Symptoms) -> Look:
    """A device that idles while its peers work waits for its node: a hint, not a proof."""
    subject = "idling"
    own = symptoms.device
    is_idle = None if own is None else _is_idle(own)
    if is_idle is None:
        return Look(subject=subject, is_told=False)
    among = _asked(symptoms, _is_idle)
    if not is_idle or not among.told or among.is_refuted:
        return Look(subject=subject)
    words = f"the device idles in between: its node feeds it too slowly ({among.words})"
    cause = Cause(kind=CauseKind.STARVED, sure=Tier.SUSPECTED, words=words)
    return Look(subject=subject, causes=(cause,))


def _growing(symptoms: Symptoms, field: str, name: str, kind: CauseKind, most: Tier) -> Look:
    own = symptoms.device
    mine = None if own is None else _growth(own, field)
    if mine is None:
        return Look(subject=name, is_told=False)
    among = _asked(symptoms, lambda peer: None if (g := _growth(peer, field)) is None else g > 0)
    if mine <= 0 or among.is_refuted:
        return Look(subject=name)
    words = f"{mine} new {name} ({among.words})"
    return Look(subject=name, causes=(Cause(kind=kind, sure=among.sure(most), words=words),))


def _asked(symptoms: Symptoms, shares: Callable[[DeviceWindow], bool | None]) -> Beside:
    return beside(symptoms.alike, shares)


def _has_event(window: DeviceWindow, bit: int) -> bool | None:
    reasons = told([s.clock_event_reasons for s in window.busy])
    return any(reason & bit for reason in reasons) if reasons else None


def _lowest_clock(window: DeviceWindow) -> float | None:
    return min(told([s.sm_clock_mhz for s in window.busy]), default=None)


def _shares_clock(peer: DeviceWindow, mine: float) -> bool | None:
    clock = _lowest_clock(peer)
    return None if clock is None else clock < mine * CLOCK_APART


def _is_below_peers(symptoms: Symptoms) -> bool:
    return any(cause.sure is not Tier.SUSPECTED for cause in sm_clock(symptoms).causes)


def _is_held_down(window: DeviceWindow) -> bool | None:
    """Was the clock below its own maximum? None: not told."""
    clock = _lowest_clock(window)
    top = max(told([s.sm_clock_max_mhz for s in window.busy]), default=None)
    return None if clock is None or top is None else clock * THROTTLED <= top


def _hottest(window: DeviceWindow) -> float | None:
    return max(told([s.temperature_celsius for s in window.during]), default=None)


def _limit(window: DeviceWindow) -> float | None:
    return min(told([s.power_limit_watts for s in window.during]), default=None)


def _is_at_limit(window: DeviceWindow) -> bool | None:
    ratios = [
        s.power_watts / s.power_limit_watts
        for s in window.busy
        if s.power_watts is not None and s.power_limit_watts
    ]
    return max(ratios) >= AT_LIMIT_RATIO if ratios else None


def _least(window: DeviceWindow, field: str) -> float | None:
    return min(told([getattr(s, field) for s in window.busy]), default=None)


def _growth(window: DeviceWindow, field: str) -> int | None:
    """Largest minus smallest count since the last sample before the onset."""
    counts = told([getattr(s, field) for s in window.since_before])
    return max(counts) - min(counts) if len(counts) > 1 else None


def _strangers(window: DeviceWindow) -> frozenset[int] | None:
    lists = told([s.processes for s in window.during])
    pids = frozenset(pid for each in lists for pid in each)
    return pids - window.pids if pids & window.pids else None


def _is_idle(window: DeviceWindow) -> bool | None:
    reasons = told([s.clock_event_reasons for s in window.during])
    return any(reason & IDLE for reason in reasons) if reasons else None
