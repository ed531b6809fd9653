"""Findings, incidents and decisions; each has a reason in text.

Detection makes findings, the state machine keeps incidents, the policy makes decisions; the store,
the API and the command line show them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pacekeeper.core.incidents.link_places import LinkPlace
from pacekeeper.core.incidents.rank_failures import RankFailures, open_failed_ranks
from pacekeeper.core.incidents.rank_ranges import RankRanges
from pacekeeper.core.layout.layout import Layout


class FindingKind(StrEnum):
    """The subject of a finding."""

    DEVICE = "device"
    LINK = "link"
    HOST = "host"
    INPUT = "input"  # loading what is trained on
    DEATH = "death"
    HANG = "hang"  # a rank stands still while others wait, or all ranks do
    # Explained by how the work is spread: advice, not a fault, and nobody's in particular.
    SEQUENCE_IMBALANCE = "sequence_imbalance"
    EXPERT_IMBALANCE = "expert_imbalance"
    STAGE_IMBALANCE = "stage_imbalance"

    @property
    def is_advice(self) -> bool:
        """Whether the finding is about the distribution of work instead of a rank, a link or a
        host.
        """
        return self in ADVISORY_KINDS


ADVISORY_KINDS = frozenset(
    {
        FindingKind.SEQUENCE_IMBALANCE,
        FindingKind.EXPERT_IMBALANCE,
        FindingKind.STAGE_IMBALANCE,
    }
)
"""Kinds of findings about uneven work."""


class Tier(StrEnum):
    """Confidence of a finding, ascending."""

    SUSPECTED = "suspected"
    PROBABLE = "probable"
    CONFIRMED = "confirmed"


class CoverageState(StrEnum):
    """The state of detection for one job; missing data never counts as healthy."""

    BLIND = "blind"  # a rank could become slow and nobody would be told: see Blindness
    MEASURING = "measuring"  # too few records yet
    HEALTHY = "healthy"
    JOB_LEVEL = "job_level"  # no rank tells its compute times: only the job as a whole is watched
    SUSPICIOUS = "suspicious"
    DEGRADED = "degraded"  # at least one open incident
    ENDED = "ended"  # no rank runs any more


class Blindness(StrEnum):
    """Why detection is blind."""

    NO_RECORDS = "no_records"  # of a rank that should run
    NO_STEPS = "no_steps"  # records arrive, but no step can be judged
    NO_TIMES = "no_times"  # of a rank: its steps arrive without any compute time
    NO_PEERS = "no_peers"  # one rank alone can not be told from everybody
    FROZEN = "frozen"  # steps are seen, but the charts do not advance
    MISSING_RANK = "missing_rank"  # a rank is in none of the steps that are judged
    STALE_MODEL = "stale_model"  # the cost model can not be fitted any more
    NOISE = "noise"  # only what is far too slow would stand out
    CANARY = "canary"  # a slowdown put in on purpose was not found
    FAILED = "failed"  # a mistake of our own that this job brings out


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault or an imbalance that the detector reports once its evidence crosses a threshold.

    Attributes:
        rank: the affected rank; None if the finding is not about one rank.
        slowdown: observed / expected time (1.0 = healthy, inf for a death or a hang); for advice:
            step time divided by step time with even work.
        onset_step: the first step of the evidence.
        step: the newest step when the finding was made.
        cause: events around the onset that would explain the slowdown, or that none were found;
            empty: no cause was searched for.
        normal_signals: if no cause was found, the signals that were examined and normal.
        missing_signals: if no cause was found, the signals that the node did not report.
        probe: the result of the probe that measured the rank or its links, or why there is no
            result; empty: no probe was requested.
        places: for a slow link, the candidate places that a probe of pairs of ranks found, between
            which it cannot decide. Empty: not located. Not stored: `probe` has them in text, and
            after a restart the controller requests another probe.
        role: the role whose ranks slowed down together; empty: the finding is not about one role.
    """

    kind: FindingKind
    tier: Tier
    rank: int | None
    slowdown: float
    onset_step: int
    step: int
    reason: str
    cause: str = ""
    probe: str = ""
    places: tuple[LinkPlace, ...] = ()
    role: str = ""
    normal_signals: tuple[str, ...] = ()
    missing_signals: tuple[str, ...] = ()

    @property
    def cause_text(self) -> str:
        """The cause with the signals that were examined, for logs and alerts."""
        return describe_cause(self.cause, self.normal_signals, self.missing_signals)


def describe_cause(cause: str, normal: Sequence[str], missing: Sequence[str]) -> str:
    """Write a cause and the examined signals as one line.

    Args:
        cause: What was observed; empty: no cause was searched for.
        normal: Signals that were examined and not unusual.
        missing: Signals that the node did not report.
    """
    parts = [cause] if cause else []
    if normal:
        parts.append(f"not unusual: {', '.join(normal)}")
    if missing:
        parts.append(f"not reported: {', '.join(missing)}")
    return "; ".join(parts)


def slowdown_text(slowdown: float) -> str:
    """Return a slowdown as the object of "takes", such as "1.60 times the expected time"."""
    return f"{slowdown:.2f} times the expected time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A finding over time: opened, perhaps measured again, closed after recovery.

    Attributes:
        rank_failures: all failed ranks of a death incident; the finding names the first that was
            reported. Empty: only that one.
        nodes: the names of their nodes.
        is_persistent: the fault outlasted the horizon of the policy; reported once per incident.
    """

    incident_id: int
    job: str
    finding: Finding
    opened_unix_s: float
    closed_unix_s: float | None = None
    closed_step: int | None = None
    actions: tuple[str, ...] = ()
    rank_failures: tuple[RankFailures, ...] = ()
    nodes: tuple[str, ...] = ()
    is_persistent: bool = False

    @property
    def is_open(self) -> bool:
        return self.closed_unix_s is None

    @property
    def all_rank_failures(self) -> tuple[RankFailures, ...]:
        """The failed ranks, also where only the finding names one."""
        finding = self.finding
        if self.rank_failures or finding.kind is not FindingKind.DEATH or finding.rank is None:
            return self.rank_failures
        only = RankFailures(
            ranks=((finding.rank, finding.rank),),
            reason=finding.reason.removeprefix(f"rank {finding.rank} is dead: "),
            step=finding.step,
            unix_s=self.opened_unix_s,
            closed_unix_s=self.closed_unix_s,
            closed_step=self.closed_step,
        )
        return (only,)

    @property
    def unresolved_ranks(self) -> RankRanges:
        """The failed ranks that the job has not continued without."""
        return open_failed_ranks(self.all_rank_failures) if self.is_open else ()


class MitigationLevel(StrEnum):
    """Actions in ascending order of cost, then the two ways back."""

    NOTHING = "nothing"
    TOKEN_SHARES = "token_shares"
    BATCH_SHARES = "batch_shares"
    MOVE_REPLICAS = "move_replicas"
    TENSOR_SHARDS = "tensor_shards"  # other runs of shards in the same groups
    MOVE_LAYERS = "move_layers"  # other layers, or other ranks, in stages and groups
    LEAVE_OUT = "leave_out"  # a living rank gets no work
    RETURN_HOME = "return_home"
    ROLL_BACK = "roll_back"  # to the layout before a plan that did not bring what was forecast


STATE_MOVING_LEVELS = (
    MitigationLevel.MOVE_REPLICAS,
    MitigationLevel.TENSOR_SHARDS,
    MitigationLevel.MOVE_LAYERS,
    MitigationLevel.LEAVE_OUT,
)
"""Levels that move state: a probe comes before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredLayout:
    """A layout that was priced for a decision. `why_not`: why it was not chosen; empty: chosen."""

    level: MitigationLevel
    planned_step_s: float
    cost_s: float
    moved_bytes: int
    why_not: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Experts that the failure of one node or rack would still lose, and why.

    Attributes:
        num_experts: experts on fewer failure domains than required.
        required: the required number of domains in words, like "2 nodes"; empty if no expert is
            on fewer.
        num_nodes: the number of nodes of the job if it is below `min_nodes`; None: it is not.
        nodes_without_rack: nodes that report no rack, so that racks are not counted.
    """

    num_experts: int = 0
    required: str = ""
    num_nodes: int | None = None
    min_nodes: int = 0
    nodes_without_rack: tuple[str, ...] = ()

    @property
    def is_any(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.num_experts or self.num_nodes is not None or self.nodes_without_rack)

    @property
    def text(self) -> str:
        """The exposure as an addition to the reason of a decision."""
        parts = []
        if self.num_experts:
            parts.append(
                f"; experts on fewer than {self.required}: {self.num_experts} (where they lack one "
                "no replica can make room, or it would slow the step)"
            )
        elif self.num_nodes is not None:
            where = "one node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
            parts.append(f"; all ranks are on {where}: experts cannot be on {self.min_nodes}")
        if self.nodes_without_rack:
            names = ", ".join(self.nodes_without_rack)
            parts.append(f"; racks are not counted: {names} reported none")
        return "".join(parts)


class NoPlanCode(StrEnum):
    """Why a decision has no plan."""

    TOO_MANY_SLOW = "too_many_slow"  # more ranks are slow than `max_acted_ratio` allows
    NOT_PRICEABLE = "not_priceable"
    LOADS_UNSETTLED = "loads_unsettled"  # expert loads were measured over too few steps
    LAYOUT_TOO_NEW = "layout_too_new"
    NO_BETTER_LAYOUT = "no_better_layout"
    NOT_PAID_BACK = "not_paid_back"  # a better layout costs more than it gains, or must wait
    GAIN_TOO_SMALL = "gain_too_small"
    NO_WAY_BACK = "no_way_back"  # an approved return or rollback is not possible any more
    CORDONED = "cordoned"  # the approved plan would give work to cordoned ranks
    NO_LONGER_PAYS = "no_longer_pays"  # the approved plan, at present prices
    REJECTED = "rejected"  # a rank rejected the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A new layout or none, with the reason and the prices it rests on (seconds).

    Attributes:
        unconfirmed: ranks whose slowness a probe must confirm before the decision is applied.
        considered: the layouts that were priced; empty: none, or not recorded.
        exposure: the experts that the failure of one node or rack would still lose. None: not
            computed.
        is_exposure_in_reason: `reason` ends with the exposure, because it changed.
        no_plan: why there is no plan; None: there is one, or the decision was restored.
    """

    level: MitigationLevel
    layout: Layout | None
    reason: str
    current_step_s: float = 0.0
    planned_step_s: float = 0.0
    fluid_step_s: float = 0.0
    cost_s: float = 0.0
    moved_bytes: int = 0
    unconfirmed: tuple[int, ...] = ()
    considered: tuple[ConsideredLayout, ...] = ()
    exposure: Exposure | None = None
    is_exposure_in_reason: bool = False
    no_plan: NoPlanCode | None = None

    @property
    def text(self) -> str:
        """The reason with the exposure, whether or not that changed."""
        if self.exposure is None or self.is_exposure_in_reason:
            return self.reason
        return self.reason + self.exposure.text
