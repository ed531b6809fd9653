"""What the machine asks for is done: agents are told, people who watch, the planner, the log.

What must last is stored by then.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pacekeeper.controller.api.auth.listeners import Entrance
from pacekeeper.controller.api.status_service import Status
from pacekeeper.controller.ingest.agent_service import AgentControl
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.planner import Planner
from pacekeeper.controller.state_machine.events import (
    AskDecision,
    AskProbe,
    Command,
    DropOrder,
    Failed,
    ForgetJob,
    ForgetLayouts,
    NotifyDeaths,
    OfferPlan,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    SaveOrder,
    SaveProposal,
    SaveStrike,
    Say,
    StepSummary,
    TellSuspects,
)
from pacekeeper.protos import control_pb2
from pacekeeper.protos.control_pb2 import AttachResponse
from pacekeeper.protos.convert import reports

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obedience:
    """All that a command may reach. `on_failure` counts our own mistakes."""

    agents: AgentControl
    metrics: ControllerMetrics
    status: Status
    planner: Planner
    entrance: Entrance
    on_failure: Callable[[str, Exception], None]

    def obey(self, command: Command) -> None:
        """Do it now; nothing here waits."""
        match command:
            case OfferPlan(job=job, nodes=nodes, layout=layout, base_generation=base, life=life):
                offer = reports.offer_to_message(job, layout, base, life)
                self.agents.send(nodes, "plan", job, AttachResponse(offer_plan=offer))
            case NotifyDeaths(job=job, nodes=nodes, ranks=ranks, life=life):
                notice = control_pb2.NotifyDeaths(job=job, ranks=list(ranks), life=life)
                self.agents.send(nodes, "deaths", job, AttachResponse(notify_deaths=notice))
            case TellSuspects(job=job, nodes=nodes, ranks=ranks, life=life):
                told = control_pb2.TellSuspects(job=job, ranks=list(ranks), life=life)
                self.agents.send(nodes, "suspects", job, AttachResponse(tell_suspects=told))
            case AskProbe(job=job, nodes=nodes, number=number, life=life):
                asked = control_pb2.AskProbe(job=job, number=number, life=life)
                self.agents.send(nodes, "probe", job, AttachResponse(ask_probe=asked))
            case SaveIncident(incident=incident):
                self.metrics.count_incident(incident)
                self.status.publish_incident(incident)
            case StepSummary():
                self.status.publish_step(command)
            case AskDecision():
                self.planner.ask(command)
            case Say(text=text):
                _log.info("%s", text)
            case Failed(what=what, error=error):
                self.on_failure(what, error)
            case SaveDecision(job=job, decision=decision):
                self.metrics.count_decision(decision)
                if decision.layout is not None:
                    about = f"generation={decision.layout.generation} rung={decision.rung}"
                    self.entrance.note_plan(job, about, decision.reason)
            case SaveLayout() | SaveProposal() | SaveJob() | SaveStrike():
                pass  # stored already
            case ForgetJob() | ForgetLayouts() | SaveOrder() | DropOrder():
                pass  # so are these
