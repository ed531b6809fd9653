"""Applies all rules to a slow rank and orders the causes by certainty.

Rules: `clocks.py`, `devices.py`, `hosts.py`. If no rule finds a cause, the
result lists the readings that equalled the peers' and those not reported.
"""

from collections.abc import Sequence

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.causes import clocks, devices, hosts
from pacekeeper.predictor.causes.evidence import Cause, CauseKind, Rule, RuleResult, Symptoms

RULES: tuple[Rule, ...] = (
    *devices.FAULTS,
    clocks.held_time,
    clocks.clock_events,
    *devices.STATES,
    *hosts.THREAD,
    *hosts.NODE,
    *devices.SIGNS,
)
MOST_TOLD = 3  # causes in one line


def explain(symptoms: Symptoms) -> tuple[Cause, ...]:
    """Return the causes, the most certain first, within one tier in the order of `RULES`.

    Never empty: without a finding it is one cause of kind UNKNOWN, which lists the signals
    examined.
    """
    results = [rule(symptoms) for rule in RULES]
    causes = [cause for result in results for cause in result.causes]
    if not causes:
        return (_no_cause(symptoms, results),)
    return tuple(sorted(causes, key=lambda cause: -list(Tier).index(cause.sure)))


def is_explained(causes: Sequence[Cause]) -> bool:
    """Return whether any cause was found."""
    return any(cause.kind is not CauseKind.UNKNOWN for cause in causes)


def in_words(causes: Sequence[Cause]) -> str:
    """Format the most certain causes as one line, each with its tier and missing signals.

    The signals of a cause of kind UNKNOWN are not part of the line.
    """
    parts = []
    for cause in causes[:MOST_TOLD]:
        if cause.kind is CauseKind.UNKNOWN:
            parts.append(cause.words)
            continue
        missing = f", not reported: {', '.join(cause.not_seen)}" if cause.not_seen else ""
        parts.append(f"{cause.sure} {cause.kind}: {cause.words}{missing}")
    if len(causes) > MOST_TOLD:
        parts.append(f"and {len(causes) - MOST_TOLD} weaker signs")
    return "; ".join(parts)


def examined_signals(causes: Sequence[Cause]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the signals that were not unusual and those not reported, if no cause was found.

    Both are empty if a cause was found or no signal was reported at all.
    """
    if is_explained(causes) or not causes[0].normal:
        return (), ()
    return causes[0].normal, causes[0].not_seen


def _no_cause(symptoms: Symptoms, results: Sequence[RuleResult]) -> Cause:
    missing = []
    if symptoms.device is None or not symptoms.device.during:
        missing.append("no device samples")
    if symptoms.host is None or not symptoms.host.during:
        missing.append("no host samples")
    is_reported: dict[str, bool] = {}
    for result in results:
        is_reported[result.subject] = is_reported.get(result.subject, False) or result.is_reported
    thread = symptoms.thread
    if thread is None or (thread.run_queue_s is None and thread.stall_s is None):
        missing.append("no thread times")
    return Cause(
        kind=CauseKind.UNKNOWN,
        sure=Tier.SUSPECTED,
        words=f"nothing seen: {', '.join(missing)}" if missing else "nothing seen",
        not_seen=tuple(subject for subject, is_there in is_reported.items() if not is_there),
        normal=tuple(subject for subject, is_there in is_reported.items() if is_there),
    )
