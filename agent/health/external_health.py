"""What other tools are told of this node: NVRx's launcher asks, NVSentinel is told. Pure.

Both get the verdict of the node's devices, and beside it what only the controller knows: that a
finding names ranks of this node. Where nobody knows, nobody is excluded and nothing is told.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pacekeeper.core.incidents.node_health import Fitness, NodeHealth
from pacekeeper.core.incidents.rank_ranges import format_ranks

FINDING_LIFETIME_S = 3600.0  # so long a finding speaks for the next start of a job that has ended
SLOW = "SlowRank"

SlowRanks = Mapping[str, frozenset[int]]  # by job: ranks of this node that a finding names


@dataclass(slots=True, kw_only=True)
class RecentFindings:
    """Which ranks of this node are named, also after their job has ended."""

    _named: dict[str, tuple[frozenset[int], float]] = field(default_factory=dict)

    def take(self, present: SlowRanks, now_s: float) -> SlowRanks:
        """`present`: of each job that runs here, the ranks named; empty where none is."""
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
    """To `nvhcd.HealthCheckService`: a node joins where it succeeds and nothing has failed."""

    is_success: bool
    exit_code: int
    output: str  # JSON: fail_count, failed_checks, words
    error: str


def health_check_answer(verdict: NodeHealth, slow: SlowRanks) -> HealthCheckAnswer:
    """Unfit devices and named ranks exclude the node; not knowing does not, and is said."""
    failed = [verdict.reason] if verdict.fitness is Fitness.UNFIT else []
    words = [verdict.line]
    if slow:
        failed.append(SLOW)
        words.append(describe_slow_ranks(slow))
    output = {"fail_count": len(failed), "failed_checks": failed, "words": words}
    return HealthCheckAnswer(
        is_success=not failed,
        exit_code=1 if failed else 0,
        output=json.dumps(output),
        error="; ".join(words) if failed else "",
    )


def describe_slow_ranks(slow: SlowRanks) -> str:
    """For people."""
    named = [f"{format_ranks(ranks)} of {job}" for job, ranks in slow.items()]
    return f"a finding names ranks {'; '.join(named)}"


class Action(StrEnum):
    """What should be done with the node, in NVSentinel's words."""

    NONE = "NONE"
    RESET = "COMPONENT_RESET"
    SUPPORT = "CONTACT_SUPPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthEvent:
    """One check's state, for NVSentinel. `entities` are (type, value)."""

    check: str
    is_healthy: bool
    is_fatal: bool
    code: str
    words: str
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
    """The state of both checks; what nobody knows is no event."""
    told = []
    if verdict.fitness is not Fitness.UNKNOWN:
        is_unfit = verdict.fitness is Fitness.UNFIT
        told.append(
            HealthEvent(
                check=FITNESS_CHECK,
                is_healthy=not is_unfit,
                is_fatal=is_unfit,
                code=verdict.reason if is_unfit else "",
                words=verdict.words,
                action=_ACTIONS.get(verdict.reason, Action.NONE),
            )
        )
    told.append(
        HealthEvent(
            check=PACE_CHECK,
            is_healthy=not slow,
            is_fatal=False,
            code=SLOW if slow else "",
            words=describe_slow_ranks(slow) if slow else "no finding names a rank of this node",
            action=Action.NONE,
            entities=tuple(
                ("RANK", f"{job}/{rank}") for job, ranks in slow.items() for rank in sorted(ranks)
            ),
        )
    )
    return tuple(told)


@dataclass(slots=True, kw_only=True)
class UnsentEvents:
    """Which events are still to be told: of each check the newest state, until it is taken."""

    _taken: dict[str, HealthEvent] = field(default_factory=dict)

    def waiting(self, present: tuple[HealthEvent, ...]) -> tuple[HealthEvent, ...]:
        """Those that differ from what was taken last."""
        return tuple(event for event in present if self._taken.get(event.check) != event)

    def taken(self, told: tuple[HealthEvent, ...]) -> None:
        """These have arrived."""
        self._taken |= {event.check: event for event in told}
