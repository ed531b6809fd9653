"""Rules for low clocks of a device: throttling counters, clock-event reasons, clock rates.

A counter of time has no gaps, while the mask of clock events shows one instant per second. Counters
are therefore read first, and the mask adds a reason only if it is more certain.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.evidence import (
    Cause,
    CauseKind,
    DeviceWindow,
    PeerComparison,
    RuleResult,
    Symptoms,
    apply_rule,
    compare_with_peers,
    is_surer,
    measured_values,
)

CLOCK_APART = 1.10  # clocks this factor apart: the smallest slowdown worth a finding
THROTTLED = 1.05  # a clock this factor below its maximum is throttled
HELD_RATIO = 0.10  # of the time: at half the clock, the smallest slowdown worth a finding

# NVML's clock-event reasons (nvml.h, nvmlClocksEventReasons), with the field that counts the time
# of each, if any. A thermal limit, a power brake or a hardware slowdown is proof if the clock is
# low too; the other reasons are common in health and count only if peers do not have them.
_Reason = tuple[int, str, CauseKind, str]
_HARD: tuple[_Reason, ...] = (
    (0x40, "hw_thermal_held_s", CauseKind.THERMAL, "hardware thermal slowdown"),
    (0x20, "sw_thermal_held_s", CauseKind.THERMAL, "software thermal slowdown"),
    (0x80, "power_brake_held_s", CauseKind.POWER, "power brake (asserted from outside)"),
    (0x08, "", CauseKind.CLOCKS, "hardware slowdown"),
)
_SOFT: tuple[_Reason, ...] = (
    (0x04, "power_cap_held_s", CauseKind.POWER, "software power cap"),
    (0x200, "board_limit_held_s", CauseKind.POWER, "board limit"),
    (
        0x10,
        "sync_boost_held_s",
        CauseKind.CLOCKS,
        "sync boost (the clock of the slowest in its group)",
    ),
    (0x100, "", CauseKind.CLOCKS, "display clock setting"),
    (0x02, "", CauseKind.CLOCKS, "application clock setting"),
    (0x400, "reliability_held_s", CauseKind.CLOCKS, "voltage reliability limit"),
)
REASONS: tuple[_Reason, ...] = (*_HARD, *_SOFT)
"""(bit of NVML's mask, field that counts its time or "", kind of cause, name) of each reason."""


def held_time(symptoms: Symptoms) -> RuleResult:
    """Find reasons that throttled the clocks, by their share of the time since the onset."""
    subject = "time clocks were held down"
    own = symptoms.device
    if own is None or all(_share(own, field) is None for _, field, _, _ in REASONS):
        return RuleResult(subject=subject, is_reported=False)
    return RuleResult(subject=subject, causes=tuple(_held(symptoms).values()))


def clock_events(symptoms: Symptoms) -> RuleResult:
    """Find the reasons that the device itself reports for a low clock."""
    subject = "clock events"
    own = symptoms.device
    if own is None or not measured_values([s.clock_event_reasons for s in own.busy]):
        return RuleResult(subject=subject, is_reported=False)
    counted, causes = _held(symptoms), []
    for reason in REASONS:
        bit, _, _, name = reason
        among = _compare(symptoms, partial(_has_event, bit=bit))
        if not _has_event(own, bit) or among.is_refuted:
            continue
        count = sum(bool((s.clock_event_reasons or 0) & bit) for s in own.busy)
        words = f"the device reports {name} in {count} of {len(own.busy)} samples ({among.words})"
        cause = _cause(symptoms, reason, among, words)
        if name not in counted or is_surer(cause.sure, counted[name].sure):
            causes.append(cause)
    return RuleResult(subject=subject, causes=tuple(causes))


def sm_clock(symptoms: Symptoms) -> RuleResult:
    """Compare the compute clock with its peers', or with its own maximum without any."""
    subject = "SM clock"
    own = symptoms.device
    mine = None if own is None else _lowest_clock(own)
    if own is None or mine is None:
        return RuleResult(subject=subject, is_reported=False)
    among = _compare(symptoms, lambda peer: _shares_clock(peer, mine))
    theirs = measured_values([_lowest_clock(peer) for peer in symptoms.alike])
    top = max(measured_values([s.sm_clock_max_mhz for s in own.busy]), default=None)
    healthy = median(theirs) if theirs else top
    if healthy is None:
        return RuleResult(subject=subject, is_reported=False)
    if healthy < mine * CLOCK_APART or among.is_refuted:
        return RuleResult(subject=subject)
    whose = "its peers ran" if theirs else "its maximum is"
    cause = Cause(
        kind=CauseKind.CLOCKS,
        sure=among.sure(Tier.PROBABLE),
        words=f"SM clock {mine:.0f} MHz where {whose} {healthy:.0f} MHz, which would make it "
        f"x{healthy / max(mine, 1.0):.2f} slow ({among.words} as low)",
    )
    return RuleResult(subject=subject, causes=(cause,))


def clock_setting(symptoms: Symptoms) -> RuleResult:
    """Find an application clock that is set lower than the peers'."""

    def causes(mine: float, theirs: Sequence[float], _: PeerComparison) -> Sequence[Cause]:
        if not theirs:
            return ()
        words = f"its application clock is set to {mine:.0f} MHz, "
        words += f"its peers' to {median(theirs):.0f}"
        return (Cause(kind=CauseKind.CLOCKS, sure=Tier.PROBABLE, words=words),)

    return apply_rule(
        symptoms,
        "application clock",
        _set_clock,
        is_alike=lambda peers, mine: peers < mine * CLOCK_APART,
        causes=causes,
    )


def _held(symptoms: Symptoms) -> dict[str, Cause]:
    """Return the cause of each reason that throttled the clocks since the onset, by its name."""
    own = symptoms.device
    found: dict[str, Cause] = {}
    for reason in REASONS:
        _, field, _, name = reason
        mine = None if own is None else _share(own, field)
        if mine is None or mine < HELD_RATIO:
            continue
        theirs = measured_values([_share(peer, field) for peer in symptoms.alike])
        among = compare_with_peers(theirs, lambda share: share >= HELD_RATIO)
        if not among.is_refuted:
            words = f"{name} held its clocks down {mine:.0%} of the time ({among.words})"
            found[name] = _cause(symptoms, reason, among, words)
    return found


def _cause(symptoms: Symptoms, reason: _Reason, among: PeerComparison, words: str) -> Cause:
    assert symptoms.device is not None
    _, _, kind, _ = reason
    is_low = _is_held_down(symptoms.device)
    if reason in _HARD:
        most = Tier.CONFIRMED if is_low else Tier.PROBABLE
    else:
        is_power = kind is CauseKind.POWER
        most = Tier.PROBABLE if is_power and _is_below_peers(symptoms) else Tier.SUSPECTED
    not_seen = ("SM clock",) if is_low is None else ()
    return Cause(kind=kind, sure=among.sure(most), words=words, not_seen=not_seen)


def _compare(symptoms: Symptoms, shares: Callable[[DeviceWindow], bool | None]) -> PeerComparison:
    return compare_with_peers(symptoms.alike, shares)


def _has_event(window: DeviceWindow, bit: int) -> bool | None:
    reasons = measured_values([s.clock_event_reasons for s in window.busy])
    return any(reason & bit for reason in reasons) if reasons else None


def _lowest_clock(window: DeviceWindow) -> float | None:
    return min(measured_values([s.sm_clock_mhz for s in window.busy]), default=None)


def _set_clock(window: DeviceWindow) -> float | None:
    clocks = measured_values([getattr(s.health, "sm_clock_set_mhz", None) for s in window.during])
    return min(clocks, default=None)


def _shares_clock(peer: DeviceWindow, mine: float) -> bool | None:
    clock = _lowest_clock(peer)
    return None if clock is None else clock < mine * CLOCK_APART


def _is_below_peers(symptoms: Symptoms) -> bool:
    return any(cause.sure is not Tier.SUSPECTED for cause in sm_clock(symptoms).causes)


def _is_held_down(window: DeviceWindow) -> bool | None:
    """Return whether the clock was below its own maximum; None: not reported."""
    clock = _lowest_clock(window)
    top = max(measured_values([s.sm_clock_max_mhz for s in window.busy]), default=None)
    return None if clock is None or top is None else clock * THROTTLED <= top


def _share(window: DeviceWindow, field: str) -> float | None:
    """Return the largest share of the time between two readings, 0 to 1; None: fewer readings."""
    shares = []
    for before, after in pairwise(window.since_before):
        counted, later = getattr(before, field, None), getattr(after, field, None)
        passed_s = after.sampled_s - before.sampled_s
        if counted is not None and later is not None and passed_s > 0.0:
            # A counter that was reset counts as no growth.
            shares.append(min(1.0, max(0.0, later - counted) / passed_s))
    return max(shares, default=None)
