"""The parts of a job's state: layouts, plan, detection, progress, workload, coverage, notices.

Each part is frozen and is replaced as a whole by the packages above. Nothing here decides anything;
the constructors `ended` give a part as it is once the job has ended.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from pacekeeper.controller.state.expert_load_drafts import LoadDrafts
from pacekeeper.controller.state.persistent_map import RankMap
from pacekeeper.controller.state.plan_phase import (
    Applying,
    AwaitingApproval,
    InForce,
    Judged,
    Offered,
    Probing,
    Refusal,
    Refused,
    Rollback,
    RolledBack,
    Verdict,
    Withdrawn,
)
from pacekeeper.controller.state.rank_timings import RankTimings
from pacekeeper.core.incidents.findings import (
    Blindness,
    CoverageState,
    Decision,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.records import (
    MicroBatchRecord,
    PairRecord,
    ProbeRecord,
    StepRecord,
)
from pacekeeper.core.telemetry.sign_of_life import STOPPED, Phase
from pacekeeper.predictor.assurance.canary import Canaries
from pacekeeper.predictor.assurance.sensitivity import Sensitivity
from pacekeeper.predictor.detector.input_stall import Inputs
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.imbalance.advice import SpreadWindow
from pacekeeper.predictor.job_level.iteration import IterationState
from pacekeeper.predictor.job_level.online import JobLevelState
from pacekeeper.predictor.links.pair_rates import LinkVerdict, PairHistory

SavedStep = tuple[int, int]
"""Generation and step of a checkpoint: checkpoints are ordered by this."""


NO_SAVE: SavedStep = (0, -1)


class SaveTrouble(StrEnum):
    """Why checkpoints are missing."""

    LATE = "late"  # skipped, because the one before is still being written
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Checkpoints of one run of a job at one level, storage or memory.

    Each rank reports its own part of a snapshot: the first part makes it complete, and a missing
    part makes the next one late.

    Attributes:
        complete: The newest usable checkpoint; step -1: none was reported.
        duration_s: How long it took its last rank.
        trouble: Why later checkpoints are missing; None: none is missing.
        reason: The same as a rank reported it.
        since_step: The step of the first missing one.
        last: The last missing one.
        missed: The number of checkpoints in a row that failed or were skipped.
    """

    complete: SavedStep = NO_SAVE
    duration_s: float = 0.0
    trouble: SaveTrouble | None = None
    reason: str = ""
    since_step: int = 0
    last: SavedStep = NO_SAVE
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraft:
    """A step that is not complete yet.

    Attributes:
        tables: Its micro-batches, in order of arrival.
        num_rows: For each rank, the number of its micro-batches by generation.
        ends: The newest end of the step that each rank reported.
        first_missing: Position in the ranks that must report, where the search for a missing one
            begins; a hint only.
    """

    tables: tuple[MicroBatchTable, ...] = ()
    num_rows: RankMap[Mapping[int, int]] = field(default_factory=RankMap)
    ends: RankMap[StepRecord] = field(default_factory=RankMap)
    first_missing: int = 0

    def is_whole(self, rank: int) -> bool:
        """Did it commit the step, and report work under the same generation?"""
        end = self.ends.get(rank)
        return end is not None and end.generation in self.num_rows.get(rank, {})

    def work_of(self, rank: int) -> tuple[MicroBatchRecord, ...]:
        """Return one rank's records of the step. O(tables): for few ranks."""
        return tuple(record for table in self.tables for record in table.of_rank(rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOnset:
    """The onset of a finding on the clock of one node, and the job's processes there."""

    onset_s: float
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseSearch:
    """A search for the cause of an open finding, up to `until_unix_s`.

    `peers`: ranks to compare with; `places`: their nodes and its own; `sure`: the confidence of the
    cause reported so far, None where none was seen.
    """

    peers: tuple[int, ...]
    places: Mapping[str, NodeOnset]
    until_unix_s: float
    sure: Tier | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenProbe:
    """A probe requested from all ranks of a layout, with the records received so far."""

    number: int
    ranks: tuple[int, ...]
    asked_s: float
    said_s: float
    records: Mapping[int, ProbeRecord] = field(default_factory=dict)
    pairs: Mapping[tuple[int, int], PairRecord] = field(default_factory=dict)  # by rank and peer


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbes:
    """Results of the probes that measure the links between pairs of a job's ranks.

    Attributes:
        history: The usual rates of pairs.
        verdict: The result of the last probe for the open link incidents; None: there was none.
        baseline_ranks: The ranks of the last probe that was requested with no link incident open.
        asked_s: When a probe was requested last, on the machine's clock.
        num_unlocated: Number of probes in a row that did not locate the slow link.
    """

    history: PairHistory = field(default_factory=PairHistory)
    verdict: LinkVerdict | None = None
    baseline_ranks: tuple[int, ...] = ()
    asked_s: float = -inf
    num_unlocated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMove:
    """The measured cost of applying a plan: slowest rank's time, bytes in total and per rank."""

    ranks: frozenset[int] = frozenset()
    duration_s: float = 0.0
    total_bytes: int = 0
    busiest_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutState:
    """The layouts of a job.

    Attributes:
        current: The observed layout: all its ranks run it. None until one is known.
        reason: Why `current` was chosen, for operators.
        is_provisional: `current` was made for a past situation: by survivors of a failure, or for
            a finding that has closed.
        baseline: The layout to restore once all incidents are closed; None: none.
        known: Layouts that ranks may report to run, by generation: offered ones and those that
            survivors wrote.
        checksums: CRC32 of the text of known layouts that ranks wrote, by generation: those of an
            older version write another text for the same layout.
        offer_reasons: The reason of each layout that the controller offered, by generation.
        first_behind: Position of a rank that did not run a known layout yet, where the next search
            begins. A hint only.
        newest_generation: The highest generation seen or offered.
        first_step: First step under `current`.
    """

    current: Layout | None = None
    reason: str = ""
    is_provisional: bool = False
    baseline: Layout | None = None
    known: Mapping[int, Layout] = field(default_factory=dict)
    checksums: Mapping[int, int] = field(default_factory=dict)
    offer_reasons: Mapping[int, str] = field(default_factory=dict)
    first_behind: int = 0
    newest_generation: int = 0
    first_step: int = 0

    def ended(self) -> "LayoutState":
        """Return the layouts of the job once it has ended: the last one, nothing on offer."""
        return LayoutState(
            current=self.current,
            reason=self.reason,
            is_provisional=self.is_provisional,
            first_behind=self.first_behind,
            newest_generation=self.newest_generation,
            first_step=self.first_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """The plans of a job by phase (see plan_phase.py), and how earlier plans went.

    Attributes:
        probing: The plan that waits for a probe; None: none.
        pending: The plan that waits for an operator or is on offer; None: none.
        current: The offered plan in force; None: the layout in force was not offered.
        last_outcome: How the last plan ended that was refused or withdrawn.
        closed_proposals: Proposals that ended, oldest first.
        refusals: The last refusal of each level of plans.
        rollbacks: The last rollback of each level of plans.
        moves: How the ranks applied the newest plans, by generation.
        last_decision: The newest decision.
        decided_on: The inputs of the last decision; equal inputs are not decided on again.
        asked: Number of the pending question to the planner; 0: none.
        asked_s: When that question was asked.
        asked_on: The preconditions of that question; its answer is dropped where they changed.
    """

    probing: Probing | None = None
    pending: AwaitingApproval | Offered | Applying | None = None
    current: InForce | Judged | RolledBack | None = None
    last_outcome: Refused | Withdrawn | None = None
    closed_proposals: tuple[Proposal, ...] = ()
    refusals: Mapping[MitigationLevel, Refusal] = field(default_factory=dict)
    rollbacks: Mapping[MitigationLevel, Rollback] = field(default_factory=dict)
    moves: Mapping[int, MeasuredMove] = field(default_factory=dict)
    last_decision: Decision | None = None
    decided_on: Hashable = None
    asked: int = 0
    asked_s: float = 0.0
    asked_on: Hashable = None

    def ended(self) -> "PlanState":
        """Return the plans of the job once it has ended: history, nothing pending or asked."""
        return PlanState(
            current=self.current,
            last_outcome=self.last_outcome,
            closed_proposals=self.closed_proposals,
            refusals=self.refusals,
            rollbacks=self.rollbacks,
            moves=self.moves,
            last_decision=self.last_decision,
            asked_s=self.asked_s,
        )

    @property
    def offer(self) -> Offered | None:
        """The plan on offer, also where some ranks run it already."""
        match self.pending:
            case Offered() as offer:
                return offer
            case Applying(offer=offer):
                return offer
            case _:
                return None

    @property
    def desired(self) -> Layout | None:
        """The layout on offer; None: no offer."""
        return None if self.offer is None else self.offer.plan

    @property
    def open_proposal(self) -> Proposal | None:
        """The proposal that waits for an operator, or was approved and is not offered yet."""
        return self.pending.proposal if isinstance(self.pending, AwaitingApproval) else None

    @property
    def approved(self) -> Proposal | None:
        """The proposal that an operator approved and that is not offered yet."""
        proposal = self.open_proposal
        is_approved = proposal is not None and proposal.answer is ProposalState.APPROVED
        return proposal if is_approved else None

    @property
    def proposals(self) -> tuple[Proposal, ...]:
        """All remembered proposals, newest last; only the last one may be open."""
        newest = self.open_proposal
        return self.closed_proposals if newest is None else (*self.closed_proposals, newest)

    @property
    def failed(self) -> Judged | None:
        """The plan in force, where its steps are no faster than those before it."""
        match self.current:
            case Judged(verdict=Verdict.NOTHING) as judged:
                return judged
            case RolledBack(judged=judged):
                return judged
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRank:
    """A rank that stands still, as its agent last reported it; see `RankPhase` for the fields.

    Times are on the machine's clock. `stopped_s`: when its process was first reported as stopped.
    """

    phase: Phase
    since_s: float
    reported_s: float = 0.0
    stopped_s: float | None = None
    usual_s: float | None = None
    process_state: str = ""
    kernel_wait: str = ""
    cpu_ratio: float | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a tracer has stopped its process."""
        return self.process_state in STOPPED

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for other ranks."""
        return self.phase is Phase.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedStack:
    """A stack dump that was asked for so many times, last at `asked_s`."""

    times: int = 0
    asked_s: float = -inf
    is_answered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HangState:
    """Ranks that stand still, and the dumps that were asked for while a hang is open, by rank."""

    standing: Mapping[int, StandingRank] = field(default_factory=dict)
    asked: Mapping[int, AskedStack] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionState:
    """The state of the detectors of a job.

    Attributes:
        evidence: Detector state of compute times. For a job with several roles it holds only the
            slow ranks; the roles' own states are in `by_role` (see
            controller/detection/peer_groups.py).
        by_role: Detector state of each role, where there are several.
        links: Detector state of transfers.
        inputs: Detector state of waits for input.
        measured: The newest timings of each rank.
        tells_work: Some rank has reported a micro-batch.
        whole: Detector state of whole steps, used where no rank reports compute times.
        iteration: Detector state of the steps of a pipelined job, relative to their schedule.
        spread: How unevenly the work was distributed while all ranks were healthy.
        hangs: Ranks that stand still.
        searches: Open searches for the cause of a finding, by slow rank.
        canaries: Injected slowdowns that test the detector on copies.
        probe: The open probe; None: none.
        newest_probe: Number of the last probe.
        link_probes: What probes of pairs showed.
        stood_by_asked_s: When a probe of standby ranks was last requested.
    """

    evidence: Evidence = field(default_factory=begin)
    by_role: Mapping[str, Evidence] = field(default_factory=dict)
    links: Evidence = field(default_factory=begin)
    inputs: Inputs = field(default_factory=Inputs)
    measured: RankTimings = field(default_factory=RankTimings)
    tells_work: bool = False
    whole: JobLevelState = field(default_factory=JobLevelState)
    iteration: IterationState = field(default_factory=IterationState)
    spread: SpreadWindow = field(default_factory=SpreadWindow)
    hangs: HangState = field(default_factory=HangState)
    searches: Mapping[int, CauseSearch] = field(default_factory=dict)
    canaries: Canaries = field(default_factory=Canaries)
    probe: OpenProbe | None = None
    newest_probe: int = 0
    link_probes: LinkProbes = field(default_factory=LinkProbes)
    stood_by_asked_s: float = -inf

    def ended(self) -> "DetectionState":
        """Return the detection state of the job once it has ended: last timings, no evidence."""
        return DetectionState(
            inputs=self.inputs,
            measured=self.measured,
            tells_work=self.tells_work,
            whole=self.whole,
            searches=self.searches,
            newest_probe=self.newest_probe,
            stood_by_asked_s=self.stood_by_asked_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress:
    """The steps of a job: complete, pending and saved.

    Attributes:
        step: The newest complete step; -1: none.
        recent_step_s: Step times under the present layout, newest last.
        tokens_per_s: Rate of the newest step.
        loss: Training loss of the newest step that reported one.
        pending: Steps that are not complete yet, by number.
        again: Steps below `step` that ranks ended anew, lowest by rank.
        ended_mono_s: End of each rank's newest step, on its node's clock.
        saves: Checkpoints in storage; None: none was reported.
        snapshots: Checkpoints in memory; None: none was reported.
    """

    step: int = -1
    recent_step_s: tuple[float, ...] = ()
    tokens_per_s: float = 0.0
    loss: float | None = None
    pending: Mapping[int, StepDraft] = field(default_factory=dict)
    again: Mapping[int, int] = field(default_factory=dict)
    ended_mono_s: RankMap[float] = field(default_factory=RankMap)
    saves: Saves | None = None
    snapshots: Saves | None = None

    def ended(self) -> "StepProgress":
        """Return the progress of the job once it has ended: its newest step and its saves."""
        return StepProgress(
            step=self.step, loss=self.loss, saves=self.saves, snapshots=self.snapshots
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadState:
    """The mean work of a job's steps, as forecasts of other layouts need it.

    `loads[layer][expert]` is the running mean of token rows per step over `num_load_steps` steps,
    made from `load_drafts` (see controller/machine/expert_loads.py).
    """

    load_drafts: LoadDrafts = field(default_factory=LoadDrafts)
    loads: tuple[tuple[float, ...], ...] = ()
    num_load_steps: int = 0
    tokens_per_step: float = 0.0
    squares_per_step: float = 0.0
    documents_per_step: float = 0.0
    head_tokens_per_step: float = 0.0
    expert_rows_per_step: float = 0.0
    active_experts_per_step: float = 0.0

    def without_loads(self) -> "WorkloadState":
        """Return the same without expert loads, as for a job that has ended."""
        return WorkloadState(
            tokens_per_step=self.tokens_per_step,
            squares_per_step=self.squares_per_step,
            documents_per_step=self.documents_per_step,
            head_tokens_per_step=self.head_tokens_per_step,
            expert_rows_per_step=self.expert_rows_per_step,
            active_experts_per_step=self.active_experts_per_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Whether a slowdown of the job's ranks would be detected now.

    Attributes:
        state: Measuring, healthy, degraded, blind and so on.
        reason: Why the job is in that state, for operators.
        blind: Why some slowdown would be missed; None: none would be.
        sensitivity: The smallest slowdown that would be attributed to a rank; None: not measured.
        silent: Ranks that run and have sent no record for too long.
        judged_s: When a step was judged last.
    """

    state: CoverageState = CoverageState.BLIND
    reason: str = ""
    blind: Blindness | None = Blindness.NO_RECORDS
    sensitivity: Sensitivity | None = None
    silent: tuple[int, ...] = ()
    judged_s: float | None = None


ENDED = Coverage(state=CoverageState.ENDED, reason="no rank runs any more", blind=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeState:
    """Which notices the job's agents were sent: deaths, suspects, repeated offers.

    Attributes:
        repeated_s: When offers and deaths were last sent again.
        deaths_sent_s: When the list of dead ranks was last sent.
        has_unsent_deaths: Ranks died since.
        suspects: Suspect ranks, as last sent to all nodes.
        suspects_sent_s: When; minus infinity: there never were any.
    """

    repeated_s: float = 0.0
    deaths_sent_s: float = -inf
    has_unsent_deaths: bool = False
    suspects: tuple[int, ...] = ()
    suspects_sent_s: float = -inf
