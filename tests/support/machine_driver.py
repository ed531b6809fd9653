"""Drives the controller's machine by hand: one line per report, time only where said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import (
    Command,
    DecisionMade,
    Event,
    Log,
    NodeAttached,
    NodeReported,
    ProposalAnswered,
    RequestDecision,
    Tick,
)
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.controller.storage.rows import incident_of, incident_row
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    PlanRefusedRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

JOB = "moe"
UNIX_OFFSET_S = 1000.0
SHAPE = ModelShape(
    num_layers=1,
    num_experts=4,
    experts_per_token=2,
    rows_per_step=32,
    slots_per_rank=4,
    expert_bytes=1000,
    dense_bytes=1000,
)
NODE_OF = {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}
FLOOR = ReplicationFloor(domain_of=NODE_OF)  # of its survivors
FIRST = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2, domain_of=NODE_OF)
C = TypeVar("C", bound=Command)


@dataclass(kw_only=True)
class Driver:
    """The machine's state, and what it said to the last event.

    Decisions are made in no time, unless `is_deciding` is off: then the test makes them.
    """

    config: ControllerConfig = field(default_factory=ControllerConfig)
    state: State = field(default_factory=lambda: State(unix_offset_s=UNIX_OFFSET_S))
    now_s: float = 100.0
    said: tuple[Command, ...] = ()
    is_deciding: bool = True

    @property
    def job(self) -> JobState:
        return self.state.jobs[JOB]

    def event(self, event: Event) -> None:
        self.state, self.said = advance(self.state, event, config=self.config, now_s=self.now_s)
        if self.is_deciding:
            for question in self.all_said(RequestDecision):
                said = self.said
                self.answer(question)
                self.said = (*said, *self.said)

    def answer(self, question: RequestDecision) -> None:
        """Make the decision that was asked for, and tell it."""
        decision = decide(question.view, self.config.policy)
        answer = DecisionMade(job=question.job, asked=question.asked, decision=decision)
        self.state, self.said = advance(self.state, answer, config=self.config, now_s=self.now_s)

    def start_again(self) -> None:
        """The controller is killed, and begins with what it had stored."""
        incidents = tuple(incident_of(incident_row(one)) for one in self.job.incidents)
        newest = max((incident.incident_id for incident in incidents), default=0)
        self.state = restored(
            [job_record(self.state, JOB)],
            incidents,
            next_incident_id=newest + 1,
            waiting=[one for one in [self.job.plan.open_proposal] if one is not None],
            next_proposal_id=self.state.next_proposal_id,
            unix_offset_s=UNIX_OFFSET_S,
        )
        self.said = ()

    def attach_again(self, layout: Layout, *, can_probe: bool = False) -> None:
        """After a restart the agents and ranks say everything again; they run `layout`."""
        for node, ranks in (("node-0", (0, 1)), ("node-1", (2, 3))):
            self.agent(node)
            attached = [attachment(rank, can_probe=can_probe) for rank in ranks]
            self.report(node=node, attached=attached, layouts=[layout])
        self.report(*applied(layout))

    def hear(
        self, proposal_id: int, *, is_approved: bool, operator: str = "ada", reason: str = ""
    ) -> None:
        """A person says this of a proposal."""
        self.event(
            ProposalAnswered(
                proposal_id=proposal_id, is_approved=is_approved, operator=operator, reason=reason
            )
        )

    def agent(self, node: str, *, rack: str = "") -> None:
        self.event(NodeAttached(node=node, product_version="1", agent_incarnation="a", rack=rack))

    def report(
        self,
        *records: Record,
        node: str = "node-0",
        attached: Sequence[Attachment] = (),
        layouts: Sequence[Layout] = (),
        run_id: int = 0,
        devices: Sequence[DeviceSample] = (),
        host: HostSample | None = None,
    ) -> None:
        part = JobReport(
            job=JOB,
            run_id=run_id,
            attached=tuple(attached),
            records=records,
            layouts=tuple((x.generation, encode_layout(x)) for x in layouts),
        )
        self.take(part, node=node, devices=devices, host=host)

    def take(
        self,
        part: JobReport,
        *,
        node: str = "node-0",
        devices: Sequence[DeviceSample] = (),
        host: HostSample | None = None,
    ) -> None:
        """One job's part of a report."""
        whole = NodeReport(
            sequence=1, sent_mono_s=self.now_s, jobs=(part,), devices=tuple(devices), host=host
        )
        self.event(NodeReported(node=node, agent_incarnation="a", report=whole))

    def tick(self, after_s: float = 0.2) -> None:
        self.now_s += after_s
        self.event(Tick())

    def all_said(self, kind: type[C]) -> list[C]:
        return [command for command in self.said if isinstance(command, kind)]

    @property
    def texts(self) -> str:
        return "\n".join(command.text for command in self.all_said(Log))


def started(
    config: ControllerConfig | None = None, layout: Layout = FIRST, *, can_probe: bool = False
) -> Driver:
    """A job of four ranks on two nodes that runs `layout`."""
    driver = Driver(config=config or ControllerConfig())
    driver.agent("node-0")
    driver.agent("node-1")
    driver.report(attached=[attachment(r, can_probe=can_probe) for r in (0, 1)], layouts=[layout])
    driver.report(attached=[attachment(r, can_probe=can_probe) for r in (2, 3)], node="node-1")
    driver.report(*applied(layout))
    return driver


def attachment(
    rank: int,
    *,
    pid: int | None = None,
    model: ModelShape | None = SHAPE,
    run_id: int = 0,
    device_uuid: str = "",
    can_probe: bool = False,
) -> Attachment:
    return Attachment(
        job=JOB,
        rank=rank,
        world_size=4,
        pid=100 + rank if pid is None else pid,
        model=model,
        run_id=run_id,
        device_uuid=device_uuid,
        can_probe=can_probe,
    )


def applied(layout: Layout, ranks: Iterable[int] | None = None) -> list[Record]:
    """The ranks say that they run the layout."""
    return [
        PlanAppliedRecord(
            rank=rank,
            step=0,
            generation=layout.generation,
            previous_generation=0,
            duration_s=0.01,
            moved_bytes=0,
            is_regroup=False,
            layout_crc=layout_crc(layout),
        )
        for rank in (layout.ranks if ranks is None else ranks)
    ]


def exited(rank: int, *, signal: int = 9, exit_code: int = 0, pid: int | None = None) -> Record:
    return RankExitRecord(
        rank=rank, pid=100 + rank if pid is None else pid, exit_code=exit_code, signal=signal
    )


def refused(plan: Layout, rank: int, reason: str) -> Record:
    """A rank, which runs FIRST, can not follow the plan."""
    return PlanRefusedRecord(
        rank=rank,
        generation=FIRST.generation,
        plan_generation=plan.generation,
        layout_crc=layout_crc(plan),
        reason=reason,
    )


def step(
    number: int,
    *,
    ranks: Iterable[int] = range(4),
    generation: int = 1,
    slow: int | None = None,
    slowdown: float = 1.6,
    hot: float = 1.0,
) -> list[Record]:
    """All records of one step: even work, every rank alike but `slow`; expert 0 is `hot`."""
    records: list[Record] = []
    for rank in ranks:
        factor = slowdown if rank == slow else 1.0
        records += [
            MicroBatchRecord(
                rank=rank,
                step=number,
                micro_batch=0,
                generation=generation,
                compute_s=0.1 * factor * (1.0 + 0.002 * ((number + rank) % 5)),
                tokens=1280,
                sum_len_squared=80_000,
                expert_rows=2560,
                num_active_experts=2,
            ),
            ExpertLoadRecord(
                rank=rank,
                step=number,
                generation=generation,
                layer=0,
                first_expert=0,
                counts=(round(640 * hot), 640, 640, 640),
            ),
            StepRecord(
                rank=rank,
                step=number,
                generation=generation,
                duration_s=0.1 * factor + 0.02,
                tokens=5120,
                loss=2.0,
            ),
        ]
    return records


def train(
    driver: Driver, first: int, end: int, *, generation: int = 1, slow: int | None = None
) -> None:
    """Steps [first, end); stops where a plan is offered."""
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*step(number, generation=generation, slow=slow))
        if driver.job.plan.desired is not None:
            return


QUICK = ControllerConfig(detector=DetectorConfig(warmup_steps=8))
WARM = 12  # steps after which the cost model is fitted


def with_plan(config: ControllerConfig = QUICK) -> Driver:
    """Rank 2 is slow and a plan for it was just offered."""
    driver = started(config)
    train(driver, 0, WARM)
    train(driver, WARM, WARM + 12, slow=2)
    assert driver.job.plan.desired is not None
    return driver


def steps_of(driver: Driver, duration_s: float) -> None:
    """The newest step took so long."""
    job = replace(
        driver.job,
        progress=replace(
            driver.job.progress, recent_step_s=(*driver.job.progress.recent_step_s, duration_s)
        ),
    )
    driver.state = replace(driver.state, jobs={**driver.state.jobs, JOB: job})
