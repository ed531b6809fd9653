"""Everything the controller knows, as one frozen value; only `machine.advance` makes a new one."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from pacekeeper.controller.state.device_history import Strikes
from pacekeeper.controller.state.expert_load_drafts import LoadDrafts
from pacekeeper.controller.state.persistent_map import NodeMap, RankMap
from pacekeeper.controller.state.rank_timings import Measured
from pacekeeper.core.incidents.findings import (
    Blindness,
    Decision,
    Incident,
    MitigationLevel,
    Tier,
    Watch,
)
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.node_report import AgentHealth, LazyNodeData, LazySamples
from pacekeeper.core.telemetry.records import MicroBatchRecord, ProbeRecord, StepRecord
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.predictor.assurance.canary import Canaries
from pacekeeper.predictor.assurance.sensitivity import Sight
from pacekeeper.predictor.imbalance.advice import SpreadWindow
from pacekeeper.predictor.job_level.online import JobPace
from pacekeeper.predictor.online.input_stall import Inputs
from pacekeeper.predictor.online.state import Evidence, begin

SavedStep = tuple[int, int]
"""Generation and step of a checkpoint: checkpoints are ordered by this."""
NO_SAVE: SavedStep = (0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Of one life of a job, at one level. `complete`: the newest that counts (step -1: none was
    told of), which took the rank that ended it `duration_s`. Of a snapshot each rank tells its own
    part: it counts with the first, and where another has not its part the next one is late.

    `trouble`, in the words of a rank, holds since `since_step`; `missed` checkpoints in a row, the
    last one at `last`, did not come about. Empty: none.
    """

    complete: SavedStep = NO_SAVE
    duration_s: float = 0.0
    trouble: str = ""
    reason: str = ""
    since_step: int = 0
    last: SavedStep = NO_SAVE
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraft:
    """A step that is not complete yet: its work, in the order it came, and the end of each rank,
    the newest, since a step may be done again.

    `told`: of a rank, how many rows of the tables it told, by generation. `first_missing`: where to
    look first for a rank that is still missing, a position in the ranks that must report; a hint,
    never believed.
    """

    tables: tuple[MicroBatchTable, ...] = ()
    told: RankMap[Mapping[int, int]] = field(default_factory=RankMap)
    ends: RankMap[StepRecord] = field(default_factory=RankMap)
    first_missing: int = 0

    def is_whole(self, rank: int) -> bool:
        """Did it commit the step, and report work under the same generation?"""
        end = self.ends.get(rank)
        return end is not None and end.generation in self.told.get(rank, {})

    def work_of(self, rank: int) -> tuple[MicroBatchRecord, ...]:
        """What one rank told of it. O(tables): for few ranks."""
        return tuple(record for table in self.tables for record in table.of_rank(rank))


class RankLife(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank as the controller sees it."""

    attachment: Attachment
    node: str
    life: RankLife = RankLife.ALIVE
    observed_generation: int = 0  # the newest it said it runs
    observed_crc: int | None = None  # of that layout; None where it only named the number
    attached_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node as a finding sees it: the onset on its clock, and its processes of the job."""

    onset_s: float
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The cause of an open finding is still looked for, up to `until_unix_s`.

    `peers` are ranks to compare with, `places` their nodes and its own; `sure`: how sure the cause
    is that was told, None where nothing was seen.
    """

    peers: tuple[int, ...]
    places: Mapping[str, Place]
    until_unix_s: float
    sure: Tier | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """A probe that `ranks`, all of a layout, were asked for; `records`: who has answered."""

    number: int
    ranks: tuple[int, ...]
    asked_s: float
    said_s: float
    records: Mapping[int, ProbeRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """`rank` could not follow `plan`; no plan of its rung is offered before `until_s`.

    `rank` None: the person `denied_by` did not want it, or, where that is empty, it was taken and
    did not bring what was forecast. `count`: how often in a row.
    """

    plan: Layout
    rank: int | None
    reason: str
    count: int
    until_s: float
    denied_by: str = ""

    @property
    def text(self) -> str:
        """For people: who refused what, and why."""
        if self.denied_by:
            times = f" (denial {self.count} in a row)" if self.count > 1 else ""
            why = f": {self.reason}" if self.reason else ""
            return f"denied by {self.denied_by}{times}{why}"
        if self.rank is None:
            times = f" (time {self.count} in a row)" if self.count > 1 else ""
            return f"plan {self.plan.generation} was undone{times}: it {self.reason}"
        times = f" (refusal {self.count} in a row)" if self.count > 1 else ""
        return f"rank {self.rank} refused plan {self.plan.generation}{times}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How a plan was put in force, as far as its ranks have said: the slowest one's time, bytes of
    all and of the one with most.
    """

    ranks: frozenset[int] = frozenset()
    duration_s: float = 0.0
    total_bytes: int = 0
    busiest_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What was forecast of the `plan` in force: steps of `planned_s` instead of `before_s` on
    `base`, with these ranks `slow`. `measured_s`: what a step takes instead, if no less.
    """

    plan: Layout
    rung: MitigationLevel
    base: Layout
    before_s: float
    planned_s: float
    slow: Mapping[int, float]
    measured_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """One job in its present `life` (0: unknown). `layout` is the observed one, `desired` the one
    offered (None: nothing offered) to ranks that run generation `desired_base`.

    `known_layouts` are layouts that ranks may say they run: offered ones and those survivors wrote;
    `offered` gives the reason of each that we offered. `home` is the layout to go back to when the
    open incidents are over. `remembered`: ranks of a stored past that have not attached to us yet.
    `pending` holds the steps that are not complete yet, by number. `loads[layer][expert]` is
    the running mean of token rows per step over `num_load_steps` steps: see expert_loads.py.
    """

    name: str
    life: int = 0
    ranks: Mapping[int, RankState] = field(default_factory=dict)
    layout: Layout | None = None
    layout_reason: str = ""
    is_makeshift: bool = False  # made for what is over: by survivors, or around a past finding
    desired: Layout | None = None
    desired_base: int = 0
    desired_for: frozenset[int] = frozenset()  # ranks that were slow when it was decided on
    offered_s: float = 0.0  # when the offer was first made
    said_s: float = 0.0  # when offers and deaths were last said again
    deaths_said_s: float = -inf  # when who is dead was last said
    has_untold_deaths: bool = False  # since then
    suspects_said: tuple[int, ...] = ()  # to all its nodes, as they were then
    suspects_said_s: float = -inf  # infinity: there never were any
    refusals: Mapping[MitigationLevel, Refusal] = field(
        default_factory=dict
    )  # the last of each kind of plan
    unkept: Mapping[MitigationLevel, Refusal] = field(
        default_factory=dict
    )  # the same of plans undone
    promise: Promise | None = None  # of the layout in force, until it is judged
    proposals: tuple[Proposal, ...] = ()  # for people, newest last; only that one may be open
    moves: Mapping[int, Move] = field(default_factory=dict)  # of the newest plans, by generation
    home: Layout | None = None
    cordoned: frozenset[int] = (
        frozenset()
    )  # ranks that are to have no work: see controller/mitigation/overrides.py
    losses: tuple[
        float, ...
    ] = ()  # of its ranks, the part that each loss took: see controller/policy/failure_rates.py
    known_layouts: Mapping[int, Layout] = field(default_factory=dict)
    offered: Mapping[int, str] = field(default_factory=dict)
    first_behind: int = 0  # a hint like that of StepDraft: who does not run a known layout yet
    remembered: Mapping[int, "RankRecord"] = field(default_factory=dict)
    newest_generation: int = 0
    world_size: int = 0  # as its ranks say
    evidence: Evidence = field(default_factory=begin)
    by_role: Mapping[str, Evidence] = field(
        default_factory=dict
    )  # see controller/detection/peer_groups.py
    measured: Measured = field(default_factory=Measured)  # what the newest step says of each rank
    heard_s: RankMap[float] = field(default_factory=RankMap)  # when a rank's last record came
    ended_mono_s: RankMap[float] = field(default_factory=RankMap)  # of a rank's newest step
    again: Mapping[int, int] = field(default_factory=dict)  # steps below `step`, done anew, by rank
    pending: Mapping[int, StepDraft] = field(default_factory=dict)
    load_drafts: LoadDrafts = field(default_factory=LoadDrafts)
    loads: tuple[tuple[float, ...], ...] = ()
    num_load_steps: int = 0
    tokens_per_step: float = 0.0
    squares_per_step: float = 0.0
    documents_per_step: float = 0.0
    head_tokens_per_step: float = 0.0
    incidents: tuple[Incident, ...] = ()
    links: Evidence = field(default_factory=begin)  # the same of transfers
    inputs: Inputs = field(default_factory=Inputs)  # the same of waits for input
    tells_work: bool = False  # has any rank told a micro-batch?
    whole: JobPace = field(default_factory=JobPace)  # where no rank tells any compute time
    spread: SpreadWindow = field(default_factory=SpreadWindow)  # of the work, while all are well
    probe: ProbeQuestion | None = None  # that is open
    newest_probe: int = 0  # number of the last one asked for
    stood_by_asked_s: float = -inf  # when one was last asked for on account of who stands by
    searches: Mapping[int, Search] = field(default_factory=dict)  # for causes, by slow rank
    step: int = -1
    recent_step_s: tuple[float, ...] = ()  # of the present layout, newest last
    tokens_per_s: float = 0.0
    loss: float | None = None
    watch: Watch = Watch.BLIND
    watch_reason: str = ""
    blind: Blindness | None = Blindness.NO_RECORDS  # what can not be seen; None: nothing is missed
    sight: Sight | None = None  # the smallest slowdown that would be named; None: not measured
    canaries: Canaries = field(default_factory=Canaries)  # slow ranks made up, in copies
    saves: Saves | None = None  # what was told of checkpoints; None: nothing
    snapshots: Saves | None = None  # the same of those in memory
    silent: tuple[int, ...] = ()  # ranks that run and have said nothing for too long
    judged_s: float | None = None  # when a step was judged last
    reported_s: float | None = None  # when an agent last spoke of it; None: not since our start
    ended_s: float | None = None  # when its last rank was seen to have ended
    layout_step: int = 0  # first step of the present layout
    last_decision: Decision | None = None
    decided_on: Hashable = None  # what the last decision rested on: the same is not decided twice
    asked: int = 0  # number of the question whose decision is being made; 0: none
    asked_s: float = 0.0
    asked_on: Hashable = None  # what must still hold for its answer to be of any use

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that are known and neither dead nor finished, ascending."""
        return tuple(r for r in sorted(self.ranks) if self.ranks[r].life is RankLife.ALIVE)

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks that died, ascending, also those only remembered."""
        dead = {r for r, kept in self.remembered.items() if kept.life is RankLife.DEAD}
        dead |= {r for r, known in self.ranks.items() if known.life is RankLife.DEAD}
        return tuple(sorted(dead))

    @property
    def unattached(self) -> tuple[int, ...]:
        """Ranks that should run, and of which nobody has said that they do, ascending.

        Those of the layout, or of the whole world where there is none. Nothing known of an earlier
        end speaks for them.
        """
        meant = range(self.world_size) if self.layout is None else self.layout.ranks
        ended = {r for r, kept in self.remembered.items() if kept.life is not RankLife.ALIVE}
        return tuple(rank for rank in meant if rank not in self.ranks and rank not in ended)

    def last_heard_s(self, rank: int) -> float:
        """When this rank last said anything, if only that it is there."""
        heard_s: float = self.heard_s.get(rank, 0.0)
        return max(heard_s, self.ranks[rank].attached_s)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its ranks, in order of name."""
        return tuple(sorted({rank.node for rank in self.ranks.values()}))

    @property
    def shape(self) -> ModelShape | None:
        """What the ranks said of their model; None for a trainer that can not move work."""
        return next((r.attachment.model for r in self.ranks.values()), None)

    @property
    def open_proposal(self) -> Proposal | None:
        """What waits for a person, or was approved and is not offered yet."""
        newest = self.proposals[-1] if self.proposals else None
        return newest if newest is not None and newest.is_open else None

    @property
    def approved(self) -> Proposal | None:
        """What a person has approved and is not offered yet."""
        proposal = self.open_proposal
        is_approved = proposal is not None and proposal.answer is ProposalState.APPROVED
        return proposal if is_approved else None

    @property
    def open_incidents(self) -> tuple[Incident, ...]:
        return tuple(incident for incident in self.incidents if incident.is_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node's agent. `devices` (by uuid) and `host`: the last minute, oldest sample first.

    `rack`: what it stands in, empty where it has not told. What nobody has looked at yet lies in
    `unread_devices` and `unread_host` (see controller/detection/root_cause.py); `newest` is the
    last of it.
    """

    name: str
    agent_life: str
    product_version: str = ""
    rack: str = ""
    is_connected: bool = True
    health: AgentHealth = field(default_factory=AgentHealth)
    devices: Mapping[str, tuple[DeviceSample, ...]] = field(default_factory=dict)
    host: tuple[HostSample, ...] = ()
    unread_devices: tuple[LazySamples[tuple[DeviceSample, ...]], ...] = ()
    unread_host: tuple[LazySamples[HostSample], ...] = ()
    newest: LazyNodeData | None = None
    last_report_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All jobs and nodes. `unix_offset_s` turns the machine's clock into Unix time."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    nodes: Mapping[str, NodeState] = field(default_factory=NodeMap)
    next_incident_id: int = 1
    next_proposal_id: int = 1
    num_asked: int = 0  # decisions asked for, of all jobs
    orders: tuple[OperatorOrder, ...] = ()  # of people, that stand
    strikes: Strikes = field(default_factory=dict)  # see controller/state/device_history.py
    ticked_s: float = 0.0  # these three: whose turn it is, see tick.py
    ranks_left: float = 0.0
    looked_at: str = ""
    unix_offset_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """Which process a rank was, and whether it lived: tells a new life of a job from the old."""

    rank: int
    pid: int
    life: RankLife


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What of a job outlives the controller (with its incidents and layouts)."""

    name: str
    newest_generation: int
    step: int
    layout: Layout | None
    layout_reason: str
    desired: Layout | None
    home: Layout | None
    ranks: tuple[RankRecord, ...] = ()
    life: int = 0
    is_makeshift: bool = False


KEPT_INCIDENTS = 256  # of one job, beside the open ones; the store keeps all


def newest(incidents: Sequence[Incident]) -> tuple[Incident, ...]:
    """Those to remember: the last ones and all that are open."""
    older, last = incidents[:-KEPT_INCIDENTS], incidents[-KEPT_INCIDENTS:]
    return (*(incident for incident in older if incident.is_open), *last)
