"""Executes the commands of the state machine.

It sends to agents, publishes to watchers, queues planning and logs. `controller` calls it after
everything that must last is stored.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pacekeeper.controller.api.auth.listeners import ListenerSetup
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.ingest.agent_service import AgentControl
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import (
    Command,
    DecisionMade,
    DeleteOrder,
    Event,
    Failed,
    ForgetJob,
    ForgetLayouts,
    Log,
    NotifyDeaths,
    NotifySuspects,
    OfferPlan,
    RequestDecision,
    RequestProbe,
    RequestStacks,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    SaveOrder,
    SaveProposal,
    SaveStack,
    SaveStrike,
    StepSummary,
)
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.protos import control_pb2
from pacekeeper.protos.control_pb2 import AttachResponse
from pacekeeper.protos.convert import reports


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="planner")


@dataclass(slots=True, eq=False, kw_only=True)
class Planner:
    """Runs the policy in a thread and answers each question with one event."""

    policy: PolicyConfig
    put: Callable[[Event], Awaitable[None]]
    on_failure: Callable[[str, Exception], None]
    _pool: ThreadPoolExecutor = field(default_factory=_one_thread)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def ask(self, question: RequestDecision) -> None:
        """Queue a question; the answer goes to `put`."""
        task = asyncio.create_task(self._answer(question))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop answering; a decision being computed is discarded."""
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, question: RequestDecision) -> None:
        decision = None
        loop = asyncio.get_running_loop()
        try:
            decision = await loop.run_in_executor(self._pool, decide, question.view, self.policy)
        except Exception as error:
            # Our bug: said and counted like that of an event; the machine may ask anew later.
            self.on_failure(f"no decision: job={question.job}", error)
        await self.put(DecisionMade(job=question.job, asked=question.asked, decision=decision))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandExecutor:
    """Executes commands; `on_failure` counts internal errors."""

    agents: AgentControl
    metrics: ControllerMetrics
    status: StatusService
    planner: Planner
    listener_setup: ListenerSetup
    on_failure: Callable[[str, Exception], None]

    def execute(self, command: Command) -> None:
        """Execute one command without waiting."""
        match command:
            case OfferPlan(
                job=job, nodes=nodes, layout=layout, base_generation=base, run_id=run_id
            ):
                offer = reports.offer_to_message(job, layout, base, run_id)
                self.agents.send(nodes, "plan", job, AttachResponse(offer_plan=offer))
            case NotifyDeaths(job=job, nodes=nodes, ranks=ranks, run_id=run_id):
                notice = control_pb2.NotifyDeaths(job=job, ranks=list(ranks), run_id=run_id)
                self.agents.send(nodes, "deaths", job, AttachResponse(notify_deaths=notice))
            case NotifySuspects(job=job, nodes=nodes, ranks=ranks, run_id=run_id):
                told = control_pb2.SetSuspects(job=job, ranks=list(ranks), run_id=run_id)
                self.agents.send(nodes, "suspects", job, AttachResponse(set_suspects=told))
            case RequestProbe(job=job, nodes=nodes, number=number, run_id=run_id):
                asked = control_pb2.RequestProbe(job=job, number=number, run_id=run_id)
                self.agents.send(nodes, "probe", job, AttachResponse(request_probe=asked))
            case RequestStacks(job=job, nodes=nodes, ranks=ranks, run_id=run_id):
                request = control_pb2.RequestStacks(job=job, ranks=list(ranks), run_id=run_id)
                self.agents.send(nodes, "stacks", job, AttachResponse(request_stacks=request))
            case SaveIncident(incident=incident):
                self.metrics.count_incident(incident)
                self.status.publish_incident(incident)
            case StepSummary():
                self.status.publish_step(command)
            case RequestDecision():
                self.planner.ask(command)
            case Log(text=text):
                _log.info("%s", text)
            case Failed(what=what, error=error):
                self.on_failure(what, error)
            case SaveDecision(job=job, decision=decision):
                self.metrics.count_decision(decision)
                if decision.layout is not None:
                    about = f"generation={decision.layout.generation} level={decision.level}"
                    self.listener_setup.audit_plan(job, about, decision.reason)
            case SaveLayout() | SaveProposal() | SaveJob() | SaveStrike() | SaveStack():
                pass  # stored already
            case ForgetJob() | ForgetLayouts() | SaveOrder() | DeleteOrder():
                pass  # so are these
