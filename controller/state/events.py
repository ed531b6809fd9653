"""Input and output of the machine: two closed unions of plain values."""

from dataclasses import dataclass

from pacekeeper.controller.state.device_history import Strike
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.incidents.findings import Decision, Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.node_report import NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAttached:
    """An agent opened its stream. `rack`: what its node stands in; empty: not told."""

    node: str
    product_version: str
    agent_life: str
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDetached:
    """An agent's stream ended, for whatever reason."""

    node: str
    agent_life: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A batch arrived from an agent."""

    node: str
    agent_life: str
    report: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReported:
    """Batches of several agents, taken in together: one change of the table of nodes for all."""

    reports: tuple[NodeReported, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time went by: look at the policy, at blindness, at what must be said again.

    `unix_offset_s`: from our clock to the wall's, as it is now; None: as it was.
    """

    unix_offset_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMade:
    """The answer to the question with the number `asked`; None: it could not be made."""

    job: str
    asked: int
    decision: Decision | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalAnswered:
    """A person approves or denies a proposal; `said_by`: who, `reason`: why it is denied."""

    proposal_id: int
    is_approved: bool
    said_by: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderGiven:
    """A person gives an order, or takes it back (`is_on` False)."""

    kind: OrderKind
    subject: str
    is_on: bool
    said_by: str
    reason: str = ""


Event = (
    NodeAttached
    | NodeDetached
    | NodeReported
    | NodesReported
    | Tick
    | DecisionMade
    | ProposalAnswered
    | OrderGiven
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskDecision:
    """Decide on `view`, beside everything else, and say it with `DecisionMade`.

    At the size of a large model that takes seconds: nobody may wait for it.
    """

    job: str
    asked: int
    view: PlanningSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPlan:
    """Tell the agents of `nodes` to offer `layout`; repeated each second until it is observed."""

    job: str
    nodes: tuple[str, ...]
    layout: Layout
    base_generation: int
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyDeaths:
    """Tell the agents of `nodes` which ranks of `job` are dead (all of them, not only the new)."""

    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TellSuspects:
    """Tell the agents of `nodes` which ranks stand on nodes with an open finding (these only)."""

    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AskProbe:
    """Tell the agents of `nodes` to ask all ranks for a probe; repeated until it is answered."""

    job: str
    nodes: tuple[str, ...]
    number: int
    life: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveIncident:
    """Store the incident (insert or replace) and tell those who watch."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """A layout became the observed one of a job: store it with the reason it was chosen for."""

    job: str
    layout: Layout
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """A plan was decided on, or one was refused (rung nothing, no layout): store it."""

    job: str
    step: int
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProposal:
    """Store the proposal (insert or replace): what is open outlives the controller."""

    proposal: Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """Store an order: it outlives the controller."""

    order: OperatorOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOrder:
    """The order was taken back."""

    kind: OrderKind
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStrike:
    """A device was found slow: other jobs that come to it are told."""

    strike: Strike


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """What must outlive the controller changed: store the job's `JobRecord`.

    `may_wait`: what changed is told again by agents that come back; some seconds are soon enough,
    and one write then does for all of them.
    """

    job: str
    may_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJob:
    """The job is over: a restart needs not bring it back. What happened to it stays stored."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetLayouts:
    """The job begins anew: generations of its former life are numbers of other layouts now."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One complete step: a command to tell those who watch. Columns in the order of `ranks`.

    `expected_s` and `slowdown` are empty while measuring.
    """

    job: str
    step: int
    generation: int
    tokens: int
    duration_s: float
    loss: float | None
    ranks: tuple[int, ...]
    observed_s: tuple[float, ...]
    expected_s: tuple[float, ...]
    slowdown: tuple[float, ...]
    watch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One line for the log, `key=value` fields included; said only when something changed."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A mistake of our own: count it, and say it loudly once."""

    what: str
    error: Exception


Command = (
    AskDecision
    | OfferPlan
    | NotifyDeaths
    | AskProbe
    | TellSuspects
    | SaveIncident
    | SaveLayout
    | SaveDecision
    | SaveProposal
    | SaveOrder
    | DropOrder
    | SaveJob
    | SaveStrike
    | ForgetJob
    | ForgetLayouts
    | StepSummary
    | Say
    | Failed
)
