"""Messages about this node's health to NVRx's launcher and to NVSentinel. Pure.

Both contain the health of the devices and the ranks of this node that a finding of the controller
names. Unknown health excludes no node and produces no event.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pacekeeper.core.incidents.node_health import Fitness, NodeHealth
from pacekeeper.core.incidents.rank_ranges import format_ranks

FINDING_LIFETIME_S = 3600.0  # of a finding after the end of its job
SLOW = "SlowRank"

SlowRanks = Mapping[str, frozenset[int]]  # by job: ranks of this node that a finding names


@dataclass(slots=True, kw_only=True)
class RecentFindings:
    """Ranks of this node named by findings, kept for FINDING_LIFETIME_S after their job ends."""

    _named: dict[str, tuple[frozenset[int], float]] = field(default_factory=dict)

    def update(self, present: SlowRanks, now_s: float) -> SlowRanks:
        """Update the findings and return all that are kept.

        Args:
            present: For each job that runs here, the ranks named now; empty for none.
            now_s: Monotonic clock.
        """
        for job, ranks in present.items():
            if ranks:
                self._named[job] = ranks, now_s
            else:
                self._named.pop(job, None)
        for job, (_, seen_s) in list(self._named.items()):
            if now_s - seen_s > FINDING_LIFETIME_S:
                del self._named[job]
        return {job: ranks for job, (ranks, _) in sorted(self._named.items())}


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheckAnswer:
    """Response of `nvhcd.HealthCheckService`. The launcher admits the node if `is_success`."""

    is_success: bool
    exit_code: int
    output: str  # JSON: fail_count, failed_checks, messages
    error: str


def health_check_answer(verdict: NodeHealth, slow: SlowRanks) -> HealthCheckAnswer:
    """The response to a launcher; unfit devices and slow ranks exclude a node, UNKNOWN does not."""
    failed = [verdict.reason] if verdict.fitness is Fitness.UNFIT else []
    messages = [verdict.line]
    if slow:
        failed.append(SLOW)
        messages.append(describe_slow_ranks(slow))
    output = {"fail_count": len(failed), "failed_checks": failed, "messages": messages}
    return HealthCheckAnswer(
        is_success=not failed,
        exit_code=1 if failed else 0,
        output=json.dumps(output),
        error="; ".join(messages) if failed else "",
    )


def describe_slow_ranks(slow: SlowRanks) -> str:
    """One line of text that names the ranks by job."""
    named = [f"{format_ranks(ranks)} of {job}" for job, ranks in slow.items()]
    return f"a finding names ranks {'; '.join(named)}"


class Action(StrEnum):
    """Recommended action, by the names of NVSentinel."""

    NONE = "NONE"
    RESET = "COMPONENT_RESET"
    SUPPORT = "CONTACT_SUPPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """State of one check, for NVSentinel. `entities` are pairs (type, value)."""

    check: str
    is_healthy: bool
    is_fatal: bool
    code: str
    message: str
    action: Action
    entities: tuple[tuple[str, str], ...] = ()


FITNESS_CHECK = "PacekeeperDevices"
PACE_CHECK = "PacekeeperPace"
_ACTIONS = {
    "DeviceLost": Action.RESET,
    "RecoveryNeeded": Action.RESET,
    "RowRemapFailed": Action.SUPPORT,
}


def health_events(verdict: NodeHealth, slow: SlowRanks) -> tuple[HealthEvent, ...]:
    """The state of both checks; unknown device health gives no event."""
    found = []
    if verdict.fitness is not Fitness.UNKNOWN:
        is_unfit = verdict.fitness is Fitness.UNFIT
        found.append(
            HealthEvent(
                check=FITNESS_CHECK,
                is_healthy=not is_unfit,
                is_fatal=is_unfit,
                code=verdict.reason if is_unfit else "",
                message=verdict.words,
                action=_ACTIONS.get(verdict.reason, Action.NONE),
            )
        )
    found.append(
        HealthEvent(
            check=PACE_CHECK,
            is_healthy=not slow,
            is_fatal=False,
            code=SLOW if slow else "",
            message=describe_slow_ranks(slow) if slow else "no finding names a rank of this node",
            action=Action.NONE,
            entities=tuple(
                ("RANK", f"{job}/{rank}") for job, ranks in slow.items() for rank in sorted(ranks)
            ),
        )
    )
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class UnsentEvents:
    """Events not yet sent: a check is unsent while its state differs from the one sent last."""

    _sent: dict[str, HealthEvent] = field(default_factory=dict)

    def pending(self, present: tuple[HealthEvent, ...]) -> tuple[HealthEvent, ...]:
        """The events that differ from the ones sent last."""
        return tuple(event for event in present if self._sent.get(event.check) != event)

    def mark_sent(self, sent: tuple[HealthEvent, ...]) -> None:
        """Record that the receiver has stored these events."""
        self._sent |= {event.check: event for event in sent}
