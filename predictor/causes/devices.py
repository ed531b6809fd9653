"""Rules for device samples that explain a slow rank, one for each reading of NVML.

A reading is a cause only under load and only if peers of the same model, which are not slow, do not
share it. Every rule takes the worst sample since the onset, for the device and its peers alike: one
more sample of a device never lowers the certainty of its rule.
"""

from collections.abc import Callable, Sequence
from statistics import median

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes.evidence import (
    IDLE,
    Cause,
    CauseKind,
    DeviceWindow,
    PeerComparison,
    RuleResult,
    Symptoms,
    apply_rule,
    compare_with_peers,
    counted,
    grown,
    measured_values,
)

HOTTER_CELSIUS = 10.0
HOT_CELSIUS = 85.0  # near the slowdown limit of present data-centre devices
AT_LIMIT_RATIO = 0.97
LESS_POWER = 1.05
HOT_MEMORY_CELSIUS = 95.0  # near the limit of present HBM
NEAR_CELSIUS = 3.0  # to the temperature at which clocks go down
LESS_ACTIVE = 1.25  # factor: peers this much busier than a device show that it waits


def temperature(symptoms: Symptoms) -> RuleResult:
    """Find a hot device. Heat alone does not slow it: SUSPECTED at most."""
    return _heat(symptoms, "temperature", _hottest, hot=HOT_CELSIUS, own="", theirs="its peers had")


def memory_temperature(symptoms: Symptoms) -> RuleResult:
    """Find hot memory, which lowers its clock: SUSPECTED at most."""
    return _heat(
        symptoms,
        "memory temperature",
        _hottest_memory,
        hot=HOT_MEMORY_CELSIUS,
        own="its memory has ",
        theirs="its peers'",
    )


def margin(symptoms: Symptoms) -> RuleResult:
    """Find a device within few degrees of the temperature at which its clocks are lowered."""

    def causes(mine: float, _: Sequence[float], among: PeerComparison) -> Sequence[Cause]:
        if mine > NEAR_CELSIUS:
            return ()
        words = f"{mine:.0f} degrees below the temperature at which it slows down ({among.words})"
        return (Cause(kind=CauseKind.THERMAL, sure=Tier.SUSPECTED, words=words),)

    return apply_rule(
        symptoms,
        "temperature margin",
        _margin,
        is_alike=lambda peers, _: peers <= NEAR_CELSIUS,
        causes=causes,
    )


def power(symptoms: Symptoms) -> RuleResult:
    """Find a power limit below the peers' or the default, and a device that runs at its limit.

    A lower limit is a setting; running at the limit is common in health.
    """
    subject = "power"
    own = symptoms.device
    limit = None if own is None else _limit(own)
    if own is None or limit is None:
        return RuleResult(subject=subject, is_reported=False)
    theirs = measured_values([_limit(peer) for peer in symptoms.alike])
    among = PeerComparison(reported=len(theirs), shared=sum(t < limit * LESS_POWER for t in theirs))
    causes = []
    if theirs and not among.is_refuted:
        words = f"its power limit is {limit:.0f} W, its peers' {median(theirs):.0f} W"
        causes.append(Cause(kind=CauseKind.POWER, sure=Tier.PROBABLE, words=words))
    at_limit = _compare(symptoms, _is_at_limit)
    default = None if theirs else _default_limit(own)
    if default is not None and limit * LESS_POWER <= default:
        words = f"its power limit is set to {limit:.0f} W, by default it is {default:.0f} W"
        causes.append(Cause(kind=CauseKind.POWER, sure=Tier.SUSPECTED, words=words))
    if _is_at_limit(own) and at_limit.reported and not at_limit.is_refuted:
        words = f"it draws all of its power limit of {limit:.0f} W ({at_limit.words})"
        causes.append(Cause(kind=CauseKind.POWER, sure=Tier.SUSPECTED, words=words))
    return RuleResult(subject=subject, causes=tuple(causes))


def pcie_link(symptoms: Symptoms) -> RuleResult:
    """Find a link that trained down: below its peers' or, without any, below its own maximum."""
    subject = "PCIe link"
    own = symptoms.device
    if own is None:
        return RuleResult(subject=subject, is_reported=False)
    causes = []
    is_reported = False
    for field, name in (("pcie_width", "width x"), ("pcie_generation", "generation ")):
        mine = _least(own, field)
        if mine is None:
            continue
        is_reported = True
        theirs = measured_values([_least(peer, field) for peer in symptoms.alike])
        among = PeerComparison(reported=len(theirs), shared=sum(t <= mine for t in theirs))
        if theirs and not among.is_refuted:
            words = f"PCIe {name}{mine:.0f}, its peers {name}{median(theirs):.0f}"
            causes.append(Cause(kind=CauseKind.PCIE, sure=Tier.PROBABLE, words=words))
        best = max(_healths(own, f"{field}_max"), default=None)
        if not theirs and best is not None and mine < best:
            words = f"PCIe {name}{mine:.0f}, it can {best:.0f}"
            causes.append(Cause(kind=CauseKind.PCIE, sure=Tier.SUSPECTED, words=words))
    return RuleResult(subject=subject, is_reported=is_reported, causes=tuple(causes))


def pcie_replays(symptoms: Symptoms) -> RuleResult:
    """Find packets retransmitted since the onset; a few are common in health."""
    return _counted(symptoms, "pcie_replays", "PCIe replays", CauseKind.PCIE, Tier.SUSPECTED)


def ecc(symptoms: Symptoms) -> RuleResult:
    """Find uncorrected memory errors since the onset."""
    kind = CauseKind.MEMORY_ERRORS
    return _counted(symptoms, "ecc_uncorrected", "uncorrected ECC errors", kind, Tier.PROBABLE)


def foreign_processes(symptoms: Symptoms) -> RuleResult:
    """Find processes on the device that are not ranks of the job.

    NVML reports process IDs of the host's namespace. If no rank of the job is among them, the
    namespaces differ, and the reading is ignored.
    """

    def causes(
        mine: frozenset[int], _: Sequence[frozenset[int]], among: PeerComparison
    ) -> Sequence[Cause]:
        if not mine:
            return ()
        pids = ", ".join(map(str, sorted(mine)))
        words = f"processes that are no ranks of the job use the device: {pids} ({among.words})"
        sure = among.sure(Tier.PROBABLE)
        return (Cause(kind=CauseKind.FOREIGN_PROCESS, sure=sure, words=words),)

    return apply_rule(
        symptoms,
        "processes on the device",
        _foreign_pids,
        is_alike=lambda peers, _: bool(peers),
        causes=causes,
    )


def idleness(symptoms: Symptoms) -> RuleResult:
    """Find a device that idles while its peers work: its node feeds it too slowly (a hint)."""

    def causes(mine: bool, _: Sequence[bool], among: PeerComparison) -> Sequence[Cause]:
        if not mine or not among.reported:
            return ()
        words = f"the device idles in between: its node feeds it too slowly ({among.words})"
        return (Cause(kind=CauseKind.STARVED, sure=Tier.SUSPECTED, words=words),)

    return apply_rule(symptoms, "idling", _is_idle, is_alike=lambda peers, _: peers, causes=causes)


def activity(symptoms: Symptoms) -> RuleResult:
    """Find multiprocessors less active than the peers': they wait for the node (a hint)."""

    def causes(mine: float, theirs: Sequence[float], _: PeerComparison) -> Sequence[Cause]:
        if not theirs:
            return ()
        words = f"its multiprocessors worked {mine:.0%} of the time, "
        words += f"its peers' {median(theirs):.0%}"
        return (Cause(kind=CauseKind.STARVED, sure=Tier.SUSPECTED, words=words),)

    return apply_rule(
        symptoms,
        "activity",
        _activity,
        is_alike=lambda peers, mine: peers < mine * LESS_ACTIVE,
        causes=causes,
    )


def _heat(
    symptoms: Symptoms,
    subject: str,
    degrees_of: Callable[[DeviceWindow], float | None],
    *,
    hot: float,
    own: str,
    theirs: str,
) -> RuleResult:
    """Return a cause if hotter than the peers or, without any, than `hot`.

    `own` and `theirs` begin the two parts of the reason.
    """

    def causes(mine: float, peers: Sequence[float], _: PeerComparison) -> Sequence[Cause]:
        if not peers and mine < hot:
            return ()
        against = f"{theirs} {median(peers):.0f}" if peers else "no peer to compare with"
        words = f"{own}{mine:.0f} degrees Celsius, {against}"
        return (Cause(kind=CauseKind.THERMAL, sure=Tier.SUSPECTED, words=words),)

    return apply_rule(
        symptoms,
        subject,
        degrees_of,
        is_alike=lambda peers, mine: peers > mine - HOTTER_CELSIUS,
        causes=causes,
    )


def _counted(symptoms: Symptoms, field: str, what: str, kind: CauseKind, most: Tier) -> RuleResult:
    return counted(symptoms, what, what, lambda window: _growth(window, field), kind, most)


def _compare(symptoms: Symptoms, shares: Callable[[DeviceWindow], bool | None]) -> PeerComparison:
    return compare_with_peers(symptoms.alike, shares)


def _hottest(window: DeviceWindow) -> float | None:
    return max(measured_values([s.temperature_celsius for s in window.during]), default=None)


def _hottest_memory(window: DeviceWindow) -> float | None:
    return max(measured_values([s.memory_temperature_celsius for s in window.during]), default=None)


def _margin(window: DeviceWindow) -> float | None:
    return min(measured_values([s.margin_celsius for s in window.during]), default=None)


def _activity(window: DeviceWindow) -> float | None:
    return min(measured_values([s.sm_active_ratio for s in window.during]), default=None)


def _healths(window: DeviceWindow, field: str) -> list[float]:
    return measured_values([getattr(s.health, field, None) for s in window.during])


def _default_limit(window: DeviceWindow) -> float | None:
    return max(_healths(window, "power_limit_default_watts"), default=None)


def _limit(window: DeviceWindow) -> float | None:
    return min(measured_values([s.power_limit_watts for s in window.during]), default=None)


def _is_at_limit(window: DeviceWindow) -> bool | None:
    ratios = [
        s.power_watts / s.power_limit_watts
        for s in window.busy
        if s.power_watts is not None and s.power_limit_watts
    ]
    return max(ratios) >= AT_LIMIT_RATIO if ratios else None


def _least(window: DeviceWindow, field: str) -> float | None:
    return min(measured_values([getattr(s, field) for s in window.busy]), default=None)


def _growth(window: DeviceWindow, field: str) -> int | None:
    """Growth of a counter since the last sample before the onset."""
    return grown([getattr(s, field) for s in window.since_before])


def _foreign_pids(window: DeviceWindow) -> frozenset[int] | None:
    lists = measured_values([s.processes for s in window.during])
    pids = frozenset(pid for each in lists for pid in each)
    return pids - window.pids if pids & window.pids else None


def _is_idle(window: DeviceWindow) -> bool | None:
    reasons = measured_values([s.clock_event_reasons for s in window.during])
    return any(reason & IDLE for reason in reasons) if reasons else None
