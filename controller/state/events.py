"""Input and output of the machine: two closed unions of plain values."""

from dataclasses import dataclass

from pacekeeper.controller.state.device_history import Strike
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.incidents.findings import Decision, Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.telemetry.sign_of_life import RankStack


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAttached:
    """An agent opened its stream. `rack`: the rack of its node; empty: unknown."""

    node: str
    product_version: str
    agent_incarnation: str
    rack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDetached:
    """An agent's stream ended, for whatever reason."""

    node: str
    agent_incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReported:
    """A batch arrived from an agent."""

    node: str
    agent_incarnation: str
    report: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReported:
    """Batches of several agents, taken in together: one change of the table of nodes for all."""

    reports: tuple[NodeReported, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed: the policy, coverage and pending notices are due for a check.

    `unix_offset_s`: offset from the machine's clock to the wall clock; None: unchanged.
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
    """A person approves or denies a proposal; `operator`: the name, `reason`: why it is denied."""

    proposal_id: int
    is_approved: bool
    operator: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderGiven:
    """A person gives an order, or takes it back (`is_on` False)."""

    kind: OrderKind
    subject: str
    is_on: bool
    operator: str
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
class RequestDecision:
    """Run the policy on `view` in the background and return `DecisionMade`.

    For a large model this takes seconds; no event waits for it.
    """

    job: str
    asked: int
    view: PlanningSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferPlan:
    """Send an offer of `layout` to the agents of `nodes`; repeated each second until observed."""

    job: str
    nodes: tuple[str, ...]
    layout: Layout
    base_generation: int
    run_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyDeaths:
    """Send all dead ranks of `job`, not only the new ones, to the agents of `nodes`."""

    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    run_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifySuspects:
    """Send the ranks on nodes with an open finding, and only those, to the agents of `nodes`."""

    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    run_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProbe:
    """Ask all ranks for a probe through the agents of `nodes`; repeated until answered."""

    job: str
    nodes: tuple[str, ...]
    number: int
    run_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStacks:
    """Ask the agents of `nodes` for the stacks of these ranks' processes, once."""

    job: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    run_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStack:
    """Keep the stacks of a rank's process with the timeline of an incident."""

    incident_id: int
    stack: RankStack


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveIncident:
    """Store the incident (insert or replace) and publish it to watchers."""

    incident: Incident


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """A layout became the observed one of a job: store it with the reason it was chosen for."""

    job: str
    layout: Layout
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """A plan was decided on, or one was refused (level nothing, no layout): store it."""

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
class DeleteOrder:
    """The order was taken back."""

    kind: OrderKind
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStrike:
    """Store a strike of a slow device, which findings of other jobs refer to."""

    strike: Strike


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """Store the job's `JobRecord`.

    `may_wait`: agents report the change again when they reconnect, so that one write after some
    seconds does for several changes.
    """

    job: str
    may_wait: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetJob:
    """Remove the job from what a restart restores. Its history stays stored."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetLayouts:
    """The job begins anew: generations of its former run are numbers of other layouts now."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One complete step, published to watchers. Columns are in the order of `ranks`.

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
class Log:
    """One line for the log with its `key=value` fields; issued only when something changed."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An internal error of the controller: it is counted and logged once."""

    what: str
    error: Exception


Command = (
    RequestDecision
    | OfferPlan
    | NotifyDeaths
    | RequestProbe
    | NotifySuspects
    | RequestStacks
    | SaveIncident
    | SaveStack
    | SaveLayout
    | SaveDecision
    | SaveProposal
    | SaveOrder
    | DeleteOrder
    | SaveJob
    | SaveStrike
    | ForgetJob
    | ForgetLayouts
    | StepSummary
    | Log
    | Failed
)
