"""Rules for errors that a device's links, memory and driver report, one for each kind.

As in `devices.py`, the worst sample since the onset counts, and only if healthy peers do not share
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

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
    counted,
    grown,
    measured_values,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The effect of an error code: kind of cause, highest tier as an explanation, and text."""

    kind: CauseKind
    most: Tier
    words: str


def _memory(words: str, most: Tier = Tier.PROBABLE) -> Meaning:
    return Meaning(kind=CauseKind.MEMORY_ERRORS, most=most, words=words)


def _driver(words: str, most: Tier = Tier.PROBABLE) -> Meaning:
    return Meaning(kind=CauseKind.DRIVER, most=most, words=words)


XIDS: Mapping[int, Meaning] = {
    13: _driver("a graphics exception, mostly of the application", Tier.SUSPECTED),
    31: _driver("a page fault, mostly of the application", Tier.SUSPECTED),
    43: _driver("a channel that stopped, mostly by the application", Tier.SUSPECTED),
    45: _driver("a channel that was cleaned up", Tier.SUSPECTED),
    48: _memory("an uncorrectable memory error"),
    61: _driver("a microcontroller that stopped"),
    62: _driver("a microcontroller that halted"),
    63: _memory("a memory row that was marked for replacement", Tier.SUSPECTED),
    64: _memory("a memory row that could not be replaced"),
    74: Meaning(kind=CauseKind.NVLINK, most=Tier.PROBABLE, words="an NVLink error"),
    79: Meaning(kind=CauseKind.LOST, most=Tier.CONFIRMED, words="the device fell off its bus"),
    92: _memory("many corrected memory errors"),
    94: _memory("an uncorrectable memory error that was contained"),
    95: _memory("an uncorrectable memory error that was not contained"),
    119: _driver("a GSP that does not answer"),
    120: _driver("an error of the GSP"),
}


def meaning(xid: int) -> Meaning:
    """Return the effect of an error code; an unknown one is at most suspected."""
    return XIDS.get(xid) or _driver("see NVIDIA's catalog", Tier.SUSPECTED)


SLOW_ANSWER_S = 0.5  # NVML takes milliseconds
SLOWER = 1.05
HARMLESS_RECOVERY = 0  # NVML_GPU_RECOVERY_ACTION_NONE
_RECOVERIES: Mapping[int, str] = {
    1: "a reset of the device",
    2: "a reboot of the node",
    3: "that peers leave it",
    4: "that it is drained and reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
_Question = Callable[[DeviceWindow], bool | None]


def lost(symptoms: Symptoms) -> RuleResult:
    """Find a device that fell off its bus or must be reset."""
    words = "the device is lost: it answers its driver no more"
    return _flagged(symptoms, "loss", _is_lost, CauseKind.LOST, Tier.CONFIRMED, lambda _: words)


def xids(symptoms: Symptoms) -> RuleResult:
    """Find errors that the driver reported since the onset, each code once."""

    def causes(
        codes: tuple[int, ...], _: Sequence[tuple[int, ...]], among: PeerComparison
    ) -> Sequence[Cause]:
        known = {code: meaning(code) for code in codes}
        return [
            _cause(
                xid.kind,
                among.sure(xid.most),
                f"the driver reported Xid {code}, {xid.words} ({among.words})",
            )
            for code, xid in known.items()
        ]

    return apply_rule(
        symptoms, "Xids", _new_xids, is_alike=lambda peers, _: bool(peers), causes=causes
    )


def nvlink(symptoms: Symptoms) -> RuleResult:
    """Find links that are down, or slower than the peers'. Links that are down need no peer."""
    subject = "NVLinks"
    own = symptoms.device
    down = None if own is None else _links_down(own)
    speed = None if own is None else _link_speed(own)
    causes = []
    if down:
        among = compare_with_peers(symptoms.alike, _has_links_down)
        if not among.is_refuted:
            words = f"{down} of its NVLinks are down ({among.words})"
            causes.append(_cause(CauseKind.NVLINK, among.sure(Tier.PROBABLE), words))
    theirs = measured_values([_link_speed(peer) for peer in symptoms.alike])
    if speed is not None and theirs:
        among = PeerComparison(
            reported=len(theirs), shared=sum(t < max(speed, 1.0) * SLOWER for t in theirs)
        )
        if not among.is_refuted:
            words = f"its NVLinks add up to {speed / 1e9:.0f} GB/s, those of its peers to "
            words += f"{max(theirs) / 1e9:.0f}"
            causes.append(_cause(CauseKind.NVLINK, Tier.PROBABLE, words))
    return RuleResult(
        subject=subject, is_reported=down is not None or speed is not None, causes=tuple(causes)
    )


def nvlink_errors(symptoms: Symptoms) -> RuleResult:
    """Find packets damaged or retransmitted and links retrained; a few are common in health."""
    fields = {
        "nvlink_errors": "damaged NVLink packets",
        "nvlink_replays": "NVLink replays",
        "nvlink_recoveries": "NVLink recoveries",
    }
    return _counted(symptoms, "NVLink errors", fields, CauseKind.NVLINK, Tier.SUSPECTED)


def pcie_errors(symptoms: Symptoms) -> RuleResult:
    """Find PCIe errors: corrected ones slow the link, uncorrected ones are worse."""
    corrected = {"pcie_errors": "corrected PCIe errors", "pcie_recoveries": "PCIe recoveries"}
    soft = _counted(symptoms, "PCIe errors", corrected, CauseKind.PCIE, Tier.SUSPECTED)
    fatal = {"pcie_fatal_errors": "uncorrected PCIe errors"}
    hard = _counted(symptoms, "PCIe errors", fatal, CauseKind.PCIE, Tier.PROBABLE)
    return RuleResult(
        subject="PCIe errors",
        is_reported=soft.is_reported or hard.is_reported,
        causes=(*hard.causes, *soft.causes),
    )


def ecc_corrected(symptoms: Symptoms) -> RuleResult:
    """Find frequent corrections of memory errors: such memory is about to fail."""
    fields = {"ecc_corrected": "corrected ECC errors"}
    return _counted(symptoms, "corrected ECC", fields, CauseKind.MEMORY_ERRORS, Tier.SUSPECTED)


def rows(symptoms: Symptoms) -> RuleResult:
    """Find damaged rows of memory that wait for a reset, or without a spare row."""
    subject = "row remapping"
    failed = _flagged(
        symptoms,
        subject,
        lambda window: _any(window, "has_remap_failed"),
        CauseKind.MEMORY_ERRORS,
        Tier.PROBABLE,
        lambda others: f"a damaged row of its memory could not be replaced ({others})",
    )
    pending = _flagged(
        symptoms,
        subject,
        lambda window: _any(window, "is_remap_pending"),
        CauseKind.MEMORY_ERRORS,
        Tier.SUSPECTED,
        lambda others: f"damaged rows of its memory wait for a reset ({others})",
    )
    is_reported = failed.is_reported or pending.is_reported
    return RuleResult(
        subject=subject, is_reported=is_reported, causes=(*failed.causes, *pending.causes)
    )


def recovery(symptoms: Symptoms) -> RuleResult:
    """Find the recovery action that the driver requests (NVML_GPU_RECOVERY_ACTION)."""

    def words(others: str) -> str:
        assert symptoms.device is not None
        action = max(_health_values(symptoms.device, "recovery_action"))
        return f"the driver asks for {_RECOVERIES.get(action, f'action {action}')} ({others})"

    def is_asked(window: DeviceWindow) -> bool | None:
        actions = _health_values(window, "recovery_action")
        return any(action != HARMLESS_RECOVERY for action in actions) if actions else None

    return _flagged(symptoms, "recovery action", is_asked, CauseKind.DRIVER, Tier.PROBABLE, words)


def slow_driver(symptoms: Symptoms) -> RuleResult:
    """Find slow driver calls: the driver holds its lock meanwhile, and kernel launches wait."""

    def is_slow(window: DeviceWindow) -> bool | None:
        answers = measured_values([s.answer_s for s in window.during])
        return max(answers) >= SLOW_ANSWER_S if answers else None

    def words(others: str) -> str:
        assert symptoms.device is not None
        longest_s = max(measured_values([s.answer_s for s in symptoms.device.during]))
        return f"its driver took {longest_s:.1f} s to answer ({others})"

    return _flagged(symptoms, "driver's answers", is_slow, CauseKind.DRIVER, Tier.SUSPECTED, words)


def _flagged(
    symptoms: Symptoms,
    subject: str,
    question: _Question,
    kind: CauseKind,
    most: Tier,
    words: Callable[[str], str],
) -> RuleResult:
    """Return a cause if the device shows the condition and most of its peers do not."""

    def causes(mine: bool, _: Sequence[bool], among: PeerComparison) -> Sequence[Cause]:
        return (_cause(kind, among.sure(most), words(among.words)),) if mine else ()

    return apply_rule(symptoms, subject, question, is_alike=lambda peers, _: peers, causes=causes)


def _counted(
    symptoms: Symptoms, subject: str, fields: Mapping[str, str], kind: CauseKind, most: Tier
) -> RuleResult:
    """Return a cause for each counter that grew since the onset."""
    results = [
        counted(symptoms, subject, what, partial(_growth, field=field), kind, most)
        for field, what in fields.items()
    ]
    return RuleResult(
        subject=subject,
        is_reported=any(result.is_reported for result in results),
        causes=tuple(cause for result in results for cause in result.causes),
    )


def _cause(kind: CauseKind, sure: Tier, words: str) -> Cause:
    return Cause(kind=kind, sure=sure, words=words)


def _growth(window: DeviceWindow, field: str) -> int | None:
    """Growth of a counter since the last sample before the onset."""
    return grown([getattr(s.health, field, None) for s in window.since_before])


def _health_values(window: DeviceWindow, field: str) -> list[int]:
    return measured_values([getattr(s.health, field, None) for s in window.during])


def _any(window: DeviceWindow, field: str) -> bool | None:
    values = _health_values(window, field)
    return any(values) if values else None


def _is_lost(window: DeviceWindow) -> bool | None:
    return any(s.is_lost for s in window.during) if window.during else None


def _new_xids(window: DeviceWindow) -> tuple[int, ...] | None:
    """Return the codes since the onset, oldest first; None: not observed.

    Samples hold only the newest of very many.
    """
    all_counts = [(s.health.num_xids, s.health.xids) for s in window.since_before if s.health]
    known = [(count, xids) for count, xids in all_counts if count is not None and xids is not None]
    if len(known) < 2:
        return None
    found: list[int] = []
    for (before, _), (after, xids) in pairwise(known):
        if after > before:
            found += xids[before - after :]
    return tuple(found)


def _links_down(window: DeviceWindow) -> int | None:
    counts = [
        s.health.nvlinks - s.health.nvlinks_up
        for s in window.during
        if s.health and s.health.nvlinks is not None and s.health.nvlinks_up is not None
    ]
    return max(counts, default=None)


def _has_links_down(window: DeviceWindow) -> bool | None:
    down = _links_down(window)
    return None if down is None else down > 0


def _link_speed(window: DeviceWindow) -> float | None:
    speeds = measured_values([getattr(s.health, "nvlink_bytes_per_s", None) for s in window.during])
    return min(speeds, default=None)
