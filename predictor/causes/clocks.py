"""Rules for throttled clocks of a device: counters of time, and the mask of clock events.

A counter of time has no gaps, while the mask shows one instant per second. Counters are therefore
read first, and the mask adds a reason only if it is more certain.
"""

from itertools import pairwise

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.devices import known_values, sm_clock
from pacekeeper.predictor.causes.evidence import (
    Cause,
    CauseKind,
    DeviceWindow,
    PeerComparison,
    RuleResult,
    Symptoms,
    compare_with_peers,
    is_surer,
)

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
_BOOST = "sync boost (the clock of the slowest in its group)"
_SOFT: tuple[_Reason, ...] = (
    (0x04, "power_cap_held_s", CauseKind.POWER, "software power cap"),
    (0x200, "board_limit_held_s", CauseKind.POWER, "board limit"),
    (0x10, "sync_boost_held_s", CauseKind.CLOCKS, _BOOST),
    (0x100, "", CauseKind.CLOCKS, "display clock setting"),
    (0x02, "", CauseKind.CLOCKS, "application clock setting"),
    (0x400, "reliability_held_s", CauseKind.CLOCKS, "voltage reliability limit"),
)
REASONS: tuple[_Reason, ...] = (*_HARD, *_SOFT)
"""(bit of NVML's mask, field that counts its time or "", kind of cause, name) of each reason."""


def held_time(symptoms: Symptoms) -> RuleResult:
    """Find reasons that throttled the clocks, by their share of the time since the onset."""
    own = symptoms.device
    counted = () if own is None else [_share(own, field) for _, field, _, _ in REASONS]
    return RuleResult(
        subject="time clocks were held down",
        is_reported=any(share is not None for share in counted),
        causes=tuple(_held(symptoms).values()),
    )


def clock_events(symptoms: Symptoms) -> RuleResult:
    """Find the reasons that the device itself reports for a low clock."""
    subject = "clock events"
    own = symptoms.device
    masks = [] if own is None else known_values(own.busy, "clock_event_reasons")
    if own is None or not masks:
        return RuleResult(subject=subject, is_reported=False)
    counted, causes = _held(symptoms), []
    for reason in REASONS:
        bit, _, _, name = reason
        count = sum(bool(mask & bit) for mask in masks)
        among = compare_with_peers([_has_event(peer, bit) for peer in symptoms.alike], bool)
        if not count or among.is_refuted:
            continue
        words = f"the device reports {name} in {count} of {len(own.busy)} samples ({among.words})"
        cause = _cause(symptoms, reason, among, words)
        if name not in counted or is_surer(cause.sure, counted[name].sure):
            causes.append(cause)
    return RuleResult(subject=subject, causes=tuple(causes))


def _held(symptoms: Symptoms) -> dict[str, Cause]:
    """Return the cause of each reason that throttled the clocks since the onset, by its name."""
    found: dict[str, Cause] = {}
    for reason in REASONS:
        _, field, _, name = reason
        mine = None if symptoms.device is None else _share(symptoms.device, field)
        theirs = [_share(peer, field) for peer in symptoms.alike]
        among = compare_with_peers(theirs, lambda share: share >= HELD_RATIO)
        if mine is not None and mine >= HELD_RATIO and not among.is_refuted:
            words = f"{name} held its clocks down {mine:.0%} of the time ({among.words})"
            found[name] = _cause(symptoms, reason, among, words)
    return found


def _cause(symptoms: Symptoms, reason: _Reason, among: PeerComparison, words: str) -> Cause:
    assert symptoms.device is not None
    is_low = _is_held_down(symptoms.device)
    if reason in _HARD:
        most = Tier.CONFIRMED if is_low else Tier.PROBABLE
    else:
        is_below_peers = any(c.sure is not Tier.SUSPECTED for c in sm_clock(symptoms).causes)
        is_capped = reason[2] is CauseKind.POWER and is_below_peers
        most = Tier.PROBABLE if is_capped else Tier.SUSPECTED
    not_seen = ("SM clock",) if is_low is None else ()
    return Cause(kind=reason[2], sure=among.sure(most), words=words, not_seen=not_seen)


def _has_event(window: DeviceWindow, bit: int) -> bool | None:
    masks = known_values(window.busy, "clock_event_reasons")
    return any(mask & bit for mask in masks) if masks else None


def _is_held_down(window: DeviceWindow) -> bool | None:
    """Return whether the clock was below its own maximum; None: not reported."""
    clocks, tops = (known_values(window.busy, f"sm_clock_{name}") for name in ("mhz", "max_mhz"))
    return min(clocks) * THROTTLED <= max(tops) if clocks and tops else None


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
