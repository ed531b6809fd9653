"""The phases of a plan and the one table of transitions between them.

Mitigation and the machine change a plan's phase only through `transition`. A job has at most three
plans: one that is probed, one that is pending (with an operator or on offer), one in force.
docs/plan-phases.md shows the table as a diagram. Nothing here sends or decides anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pacekeeper.core.incidents.findings import Decision, MitigationLevel
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.text import format_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRejection:
    """A rank could not apply a plan; no plan of its level is offered before `until_s`.

    `count`: how often in a row plans of this level were refused.
    """

    plan: Layout
    rank: int
    reason: str
    count: int
    until_s: float

    @property
    def text(self) -> str:
        """The rejection in words, for operators."""
        times = f" (refusal {self.count} in a row)" if self.count > 1 else ""
        return f"rank {self.rank} refused plan {self.plan.generation}{times}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDenial:
    """`operator` denied a plan; no plan of its level is proposed before `until_s`."""

    plan: Layout
    operator: str
    reason: str
    count: int
    until_s: float

    @property
    def text(self) -> str:
        """The denial in words, for operators."""
        times = f" (denial {self.count} in a row)" if self.count > 1 else ""
        why = f": {self.reason}" if self.reason else ""
        return f"denied by {self.operator}{times}{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """A plan was in force and brought nothing; no plan of its level is offered before `until_s`.

    `measured_s` and `planned_s`: a step as measured under it, and as forecast.
    """

    plan: Layout
    measured_s: float
    planned_s: float
    count: int
    until_s: float

    @property
    def text(self) -> str:
        """The rollback in words, for operators."""
        times = f" (time {self.count} in a row)" if self.count > 1 else ""
        return (
            f"plan {self.plan.generation} was undone{times}: it took a step to"
            f" {format_s(self.measured_s)} instead of "
            f"{format_s(self.planned_s)}"
        )


Refusal = RankRejection | OperatorDenial
BackoffReason = RankRejection | OperatorDenial | Rollback
"""Why plans of a level wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of a plan: steps of `planned_s` instead of `before_s`.

    `base` is the layout it replaced; `slow` the slow ranks (rank -> slowdown) it was made for.
    """

    plan: Layout
    level: MitigationLevel
    base: Layout
    before_s: float
    planned_s: float
    slow: Mapping[int, float]


class Verdict(StrEnum):
    """The result of a plan in force, compared with its forecast."""

    AS_FORECAST = "as forecast"
    LESS = "less than forecast"
    NOTHING = "nothing"
    INCOMPARABLE = "incomparable"  # the slow ranks changed: the forecast was of another job


class WithdrawCause(StrEnum):
    """Why a plan ended without a verdict or a refusal."""

    EXPIRED = "expired"  # no operator answered in time
    STALE = "stale"  # its premises do not hold any more, or no rank applied it in time
    STOPPED = "stopped"  # an operator paused plans, or the job ended
    REPORT_ONLY = "report_only"  # the policy's mode or a dry run does not allow it
    DECIDED_AGAIN = "decided_again"  # its probe ended: the policy decides again
    REPLACED = "replaced"  # another layout is in force


class PhaseName(StrEnum):
    """The phases, as docs/plan-phases.md names them."""

    PROPOSED = "proposed"
    AWAITING_APPROVAL = "awaiting_approval"
    PROBING = "probing"
    OFFERED = "offered"
    APPLYING = "applying"
    IN_FORCE = "in_force"
    JUDGED = "judged"
    ROLLED_BACK = "rolled_back"
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"


class PlanEvent(StrEnum):
    """The events that move a plan from one phase to the next."""

    DECIDED = "decided"  # the policy chose the plan
    PROBE_ASKED = "probe asked"
    PROBE_ENDED = "probe ended"
    APPROVAL_ASKED = "approval asked"
    PROPOSAL_UPDATED = (
        "proposal updated"  # new prices, an operator's approval, a clock that was set
    )
    DENIED = "denied"
    OFFERED = "offered"
    RANKS_APPLIED = "ranks applied it"  # some of its ranks
    REJECTED = "rank rejected it"
    ALL_APPLIED = "all ranks applied it"
    STEPS_MEASURED = "steps measured"
    ROLLBACK_OFFERED = "rollback offered"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposed:
    """The policy chose the plan; within the same event it is probed, proposed, offered or ended."""

    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingApproval:
    """The plan waits for an operator, or was approved and is being priced again."""

    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """The plan waits for the probe with this number, which checks that its slow ranks are slow."""

    decision: Decision
    probe: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The plan is on offer to ranks that run `base_generation`.

    `slow_ranks`: as they were when it was decided on. `offered_s`: when it was first offered.
    """

    decision: Decision
    plan: Layout
    base_generation: int
    slow_ranks: frozenset[int]
    offered_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Applying:
    """Some ranks of the plan run it already."""

    offer: Offered


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """All ranks run the plan; its steps are measured. `forecast` None: it is not judged."""

    plan: Layout
    forecast: Forecast | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The plan is in force and was compared with its forecast."""

    forecast: Forecast
    verdict: Verdict
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """The layout before the plan was offered again; the plan is in force until that is applied."""

    judged: Judged
    rollback: Rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A rank rejected the plan, or an operator denied it: plans of its `level` wait."""

    level: MitigationLevel
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The plan ended without a verdict or a refusal."""

    cause: WithdrawCause


PlanPhase = (
    Proposed
    | AwaitingApproval
    | Probing
    | Offered
    | Applying
    | InForce
    | Judged
    | RolledBack
    | Refused
    | Withdrawn
)

NAMES: Mapping[type[PlanPhase], PhaseName] = {
    Proposed: PhaseName.PROPOSED,
    AwaitingApproval: PhaseName.AWAITING_APPROVAL,
    Probing: PhaseName.PROBING,
    Offered: PhaseName.OFFERED,
    Applying: PhaseName.APPLYING,
    InForce: PhaseName.IN_FORCE,
    Judged: PhaseName.JUDGED,
    RolledBack: PhaseName.ROLLED_BACK,
    Refused: PhaseName.REFUSED,
    Withdrawn: PhaseName.WITHDRAWN,
}

_P, _E = PhaseName, PlanEvent
TRANSITIONS: Mapping[tuple[PhaseName | None, PlanEvent], PhaseName] = {
    (None, _E.DECIDED): _P.PROPOSED,
    (_P.PROPOSED, _E.PROBE_ASKED): _P.PROBING,
    (_P.PROPOSED, _E.APPROVAL_ASKED): _P.AWAITING_APPROVAL,
    (_P.PROPOSED, _E.OFFERED): _P.OFFERED,
    (_P.PROPOSED, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.PROBING, _E.PROBE_ENDED): _P.WITHDRAWN,
    (_P.AWAITING_APPROVAL, _E.PROPOSAL_UPDATED): _P.AWAITING_APPROVAL,
    (_P.AWAITING_APPROVAL, _E.OFFERED): _P.OFFERED,
    (_P.AWAITING_APPROVAL, _E.DENIED): _P.REFUSED,
    (_P.AWAITING_APPROVAL, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.OFFERED, _E.RANKS_APPLIED): _P.APPLYING,
    (_P.OFFERED, _E.REJECTED): _P.REFUSED,
    (_P.OFFERED, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.APPLYING, _E.ALL_APPLIED): _P.IN_FORCE,
    (_P.APPLYING, _E.REJECTED): _P.REFUSED,
    (_P.APPLYING, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.IN_FORCE, _E.STEPS_MEASURED): _P.JUDGED,
    (_P.IN_FORCE, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.JUDGED, _E.ROLLBACK_OFFERED): _P.ROLLED_BACK,
    (_P.JUDGED, _E.WITHDRAWN): _P.WITHDRAWN,
    (_P.ROLLED_BACK, _E.ROLLBACK_OFFERED): _P.ROLLED_BACK,
    (_P.ROLLED_BACK, _E.WITHDRAWN): _P.WITHDRAWN,
}
"""The phase after each event in each phase; None: there is no plan yet. Other pairs are errors."""


class PlanPhaseError(Exception):
    """A transition that the table does not have: a fault of the controller itself."""


def name_of(phase: PlanPhase | None) -> PhaseName | None:
    """Return the name of a phase; None for no plan."""
    return None if phase is None else NAMES[type(phase)]


P = TypeVar("P", bound=PlanPhase)


def transition(before: PlanPhase | None, event: PlanEvent, after: P) -> P:
    """Return `after`, the phase of a plan after an event.

    Args:
        before: The phase the plan is in; None for a plan that is new.
        event: What happened to it.
        after: Its new phase with the data of that phase.

    Raises:
        PlanPhaseError: The table has no such transition.
    """
    target = TRANSITIONS.get((name_of(before), event))
    if target is not name_of(after):
        raise PlanPhaseError(f"a plan {name_of(before)} is {name_of(after)} after {event.value!r}")
    return after
