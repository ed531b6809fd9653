"""A closed loop on paper: a training job, its agents and the real machine, in virtual time, seeded.

The job follows plans and deaths as the trainer does; the network between agents and controller
loses, repeats and reorders. Facts that agents keep until they are acknowledged arrive late at
worst; measurements in a lost report are gone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import (
    Command,
    DecisionMade,
    Event,
    NodeAttached,
    NodeReported,
    NotifyDeaths,
    OfferPlan,
    RequestDecision,
    RequestProbe,
    SaveIncident,
    SaveJob,
    Tick,
)
from pacekeeper.controller.state.state import JobRecord, JobState, State
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import Incident
from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import (
    MicroBatchRecord,
    RankExitRecord,
    Record,
)
from support.paper_work import (
    ROW_TOKENS,
    applied,
    as_received,
    attachment,
    end_of_step,
    facts_of,
    held_part,
    hot_loads,
    pipelined_s,
    probe_record,
)

JOB = "paper"
NODES = {"node-0": (0, 1), "node-1": (2, 3)}
SHAPE = ModelShape(
    num_layers=2,
    num_experts=4,
    experts_per_token=2,
    rows_per_step=32,
    slots_per_rank=4,
    expert_bytes=100_000,
    dense_bytes=1_000_000,
)
# Seconds per micro-batch, token, token^2, expert row, active expert.
COEFFICIENTS = np.array([0.02, 2e-5, 5e-9, 1.5e-5, 4e-4])
POLL_S, TICK_S = 0.1, 0.2
OVERHEAD_S = 0.03  # of a step, beside the passes
MAX_DELAY_S = 1.5
DECIDE_S = 0.25  # while a decision is made, training goes on: some are made for what is over
UNIX_OFFSET_S = 1_000_000.0


@dataclass(kw_only=True)
class PaperCluster:
    """`loss`: share of reports that the network mistreats; `offer_loss`: of commands it drops.

    With several micro-batches a step has as many times the rows, as gradient accumulation does.
    With stages, or tensor groups, ranks say which part of the model's dense work they hold.
    `can_probe`: they answer a probe, in their speeds. `nodes`: the ranks of each; `racks`: of each
    node that tells its own.
    """

    seed: int
    config: ControllerConfig
    loss: float = 0.0
    offer_loss: float = 0.0
    noise: float = 0.02
    num_microbatches: int = 1
    num_layers: int = SHAPE.num_layers
    num_stages: int = 1
    tensor_size: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    can_probe: bool = False
    nodes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: NODES)
    racks: Mapping[str, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)
    on_advance: Callable[[Event, float, tuple[Command, ...], State], None] | None = None
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.dice = Random(self.seed)
        self.random = np.random.default_rng(self.seed)
        rows = SHAPE.rows_per_step * self.num_microbatches
        self.shape = replace(
            SHAPE, rows_per_step=rows, num_layers=self.num_layers, schedule=self.schedule
        )
        self.node_of = {rank: node for node, ranks in self.nodes.items() for rank in ranks}
        self.layout = even_layout(
            ranks=self.node_of,
            num_layers=self.num_layers,
            num_experts=SHAPE.num_experts,
            replicas=2,
            domain_of=self.node_of,
            num_virtual_shards=1 if self.tensor_size == 1 else 8,
            num_stages=self.num_stages,
            tensor_size=self.tensor_size,
        )
        self.first_layout = self.layout
        self.applied = [self.layout]  # every layout the job ever ran
        self.living = list(self.layout.ranks)
        self.step = 0
        self.step_s: list[float] = []
        self.state = State(unix_offset_s=UNIX_OFFSET_S)
        self.stored: dict[str, JobRecord] = {}
        self.incidents: dict[int, Incident] = {}
        self.commands: list[Command] = []
        self.seen_offers: dict[str, OfferPlan] = {}
        self.told_dead: set[int] = set()
        self._probed: dict[str, int] = {}
        self._life = 0
        self._outbox: dict[str, JobReport] = {node: JobReport(job=JOB) for node in self.nodes}
        self._in_flight: list[tuple[float, int, str, JobReport]] = []
        self._decisions: list[tuple[float, DecisionMade]] = []
        self._sent = 0
        self._poll_s = self._tick_s = self.now_s
        self._attach()
        self._report_applied(previous=0, is_regroup=False)

    @property
    def job(self) -> JobState:
        return self.state.jobs[JOB]

    def run(self, steps: int) -> None:
        """Train this many steps."""
        for _ in range(steps):
            self._follow_plan()
            self._train_step()

    def kill(self, *dead: int) -> None:
        """The ranks die at once; the survivors regroup by themselves, as the trainer's do.

        Raises LostStateError where an expert dies with them.
        """
        for rank in dead:
            self.living.remove(rank)
            gone = RankExitRecord(rank=rank, pid=1000 + rank, exit_code=0, signal=9)
            self._keep(self.node_of[rank], records=(gone,))
        self.let_pass(0.3)
        previous = self.layout.generation
        newest = max([previous, *(o.layout.generation for o in self.seen_offers.values())])
        self._enter(
            shrink(
                self.layout,
                dead=dead,
                generation=newest + 1,
                floor=ReplicationFloor(domain_of=self.node_of),
            )
        )
        for node, ranks in self.nodes.items():
            if set(ranks) & set(self.living):
                text = encode_layout(self.layout)
                self._keep(node, layouts=((self.layout.generation, text),))
        self._report_applied(previous=previous, is_regroup=True)

    @property
    def faults(self) -> dict[int, Incident]:
        """The incidents that accuse somebody: loads do lie unevenly here now and then."""
        return {i: each for i, each in self.incidents.items() if not each.finding.kind.is_advice}

    @property
    def has_open_fault(self) -> bool:
        return any(incident.is_open for incident in self.faults.values())

    def restart_controller(self) -> None:
        """kill -9 and start again: only what was stored is left; agents say everything again."""
        newest = max(self.incidents, default=0)
        self._decisions.clear()
        self.state = restored(
            tuple(self.stored.values()),
            tuple(self.incidents[i] for i in sorted(self.incidents)),
            next_incident_id=newest + 1,
            unix_offset_s=UNIX_OFFSET_S,
        )
        self._attach()

    def _attach(self) -> None:
        """Agents come, and say what they know: also which layouts were written by ranks."""
        written = tuple(
            (layout.generation, encode_layout(layout))
            for layout in self.applied
            if layout is self.first_layout or len(layout.ranks) < len(self.node_of)
        )
        for node, ranks in self.nodes.items():
            rack = self.racks.get(node, "")
            self._advance(
                NodeAttached(node=node, product_version="0", agent_incarnation="a", rack=rack)
            )
            world = len(self.node_of)
            known = [
                as_received(
                    attachment(JOB, r, self.shape, world_size=world, can_probe=self.can_probe)
                )
                for r in ranks
            ]
            self._keep(node, attached=tuple(known), layouts=written)

    # The job.

    def _follow_plan(self) -> None:
        """Every living node must have seen the same plan, made for the present layout."""
        offers = [
            self.seen_offers.get(node)
            for node, ranks in self.nodes.items()
            if set(ranks) & set(self.living)
        ]
        first = offers[0]
        if first is None or any(o is None or o.layout != first.layout for o in offers):
            return
        if first.base_generation != self.layout.generation:
            return
        assert first.layout.generation > self.layout.generation, "generations ascend"
        assert first.layout.ranks == tuple(self.living), "a plan is for those who live"
        previous = self.layout.generation
        self._enter(first.layout)
        self._report_applied(previous=previous, is_regroup=False)

    def _enter(self, layout: Layout) -> None:
        self.layout = layout
        self.applied.append(layout)

    def _train_step(self) -> None:
        loads = hot_loads(self.random, self.shape)
        work: dict[int, list[MicroBatchRecord]] = {rank: [] for rank in self.layout.working}
        for rank in work:
            rows = self.layout.rows_of(self.shape.rows_per_step)[
                self.layout.pipelines[self.layout.place_of(rank)[1]].leader
            ]
            parts = apportion(rows, [1.0 / self.num_microbatches] * self.num_microbatches)
            for micro_batch, part in enumerate(parts):
                work[rank].append(self._compute(rank, micro_batch, part, loads))
        compute_s = {rank: sum(r.compute_s for r in done) for rank, done in work.items()}
        passes_s = pipelined_s(self.layout, compute_s, self.num_microbatches, self.schedule)
        duration_s = passes_s + OVERHEAD_S
        # Each micro-batch is reported when it is over: a report may hold a part of a step.
        for micro_batch in range(self.num_microbatches):
            self.let_pass(duration_s / self.num_microbatches)
            for rank, done in work.items():
                self._keep(self.node_of[rank], records=(done[micro_batch],))
        for rank in self.living:
            rows = self.shape.rows_per_step
            ended = end_of_step(self.layout, rank, self.step, loads, rows, duration_s)
            self._keep(self.node_of[rank], records=ended)
        self.step_s.append(duration_s)
        self.step += 1

    def _compute(
        self, rank: int, micro_batch: int, rows: int, loads: list[list[float]]
    ) -> MicroBatchRecord:
        tokens = rows * ROW_TOKENS
        squares = int(tokens * 60 * self.random.lognormal(0.0, 0.1))
        expert_rows, active = 0.0, 0
        for layer, layer_loads in enumerate(loads):
            for hosts, load in zip(self.layout.experts[layer], layer_loads, strict=True):
                mine = sum(host.share for host in hosts if host.rank == rank)
                expert_rows += mine * load / self.num_microbatches
                active += mine > 0.0
        part = held_part(self.layout, rank)
        work = np.array([1.0, part * tokens, part * squares, round(expert_rows), active])
        took_s = float(work @ COEFFICIENTS) / self.speeds.get(rank, 1.0)
        took_s *= float(self.random.lognormal(0.0, self.noise))
        return MicroBatchRecord(
            rank=rank,
            step=self.step,
            micro_batch=micro_batch,
            generation=self.layout.generation,
            compute_s=took_s,
            tokens=tokens,
            sum_len_squared=squares,
            expert_rows=round(expert_rows),
            num_active_experts=active,
            tensor_share=part,
        )

    def _probe(self, node: str, number: int) -> None:
        """The ranks of a node run it once."""
        if self._probed.get(node, 0) >= number:
            return
        self._probed[node] = number
        for rank in set(self.nodes[node]) & set(self.living):
            record = probe_record(
                rank,
                self.step,
                self.layout.generation,
                number=number,
                slowdown=1.0 / self.speeds.get(rank, 1.0),
            )
            self._keep(node, records=(record,))

    def _report_applied(self, *, previous: int, is_regroup: bool) -> None:
        for rank in self.living:
            record = applied(self.layout, rank, self.step, previous, is_regroup=is_regroup)
            self._keep(self.node_of[rank], records=(record,))

    # Agents, network and time.

    def _keep(
        self,
        node: str,
        *,
        attached: tuple[Attachment, ...] = (),
        records: tuple[Record, ...] = (),
        layouts: tuple[tuple[int, bytes], ...] = (),
    ) -> None:
        held = self._outbox[node]
        self._outbox[node] = replace(
            held,
            attached=held.attached + attached,
            records=held.records + records,
            layouts=held.layouts + layouts,
        )

    def let_pass(self, seconds: float) -> None:
        """No step ends, but the network gets everything through."""
        end_s = self.now_s + seconds
        while True:
            due_s = [self._poll_s, self._tick_s, *(flight[0] for flight in self._in_flight)]
            due_s += [at_s for at_s, _ in self._decisions]
            if min(due_s) > end_s:
                self.now_s = end_s
                return
            self.now_s = max(self.now_s, min(due_s))
            if self._poll_s <= self.now_s:
                self._poll_s += POLL_S
                self._poll()
            if self._tick_s <= self.now_s:
                self._tick_s += TICK_S
                self._advance(Tick())
            for flight in sorted(f for f in self._in_flight if f[0] <= self.now_s):
                self._in_flight.remove(flight)
                self._deliver(flight[2], flight[3])
            while self._decisions and self._decisions[0][0] <= self.now_s:
                self._advance(self._decisions.pop(0)[1])

    def _poll(self) -> None:
        for node, report in self._outbox.items():
            if report == JobReport(job=JOB):
                continue
            self._outbox[node] = JobReport(job=JOB)
            mishap = self.dice.random()
            later_s = self.now_s + self.dice.uniform(0.1, MAX_DELAY_S)
            if mishap >= self.loss:
                self._send(self.now_s, node, report)
            elif mishap < self.loss / 3:
                self._send(later_s, node, facts_of(report))  # lost; what matters is said again
            elif mishap < self.loss * 2 / 3:
                self._send(later_s, node, report)  # overtaken by later ones
            else:
                self._send(self.now_s, node, report)
                self._send(later_s, node, report)  # said twice

    def _send(self, at_s: float, node: str, report: JobReport) -> None:
        self._sent += 1
        self._in_flight.append((at_s, self._sent, node, report))

    def _deliver(self, node: str, report: JobReport) -> None:
        whole = NodeReport(sequence=self._sent, sent_mono_s=self.now_s, jobs=(report,))
        self._advance(NodeReported(node=node, agent_incarnation="a", report=whole))

    def _advance(self, event: Event) -> None:
        self.state, commands = advance(self.state, event, config=self.config, now_s=self.now_s)
        self.commands += commands
        for command in commands:
            match command:
                case SaveJob(job=job):
                    self.stored[job] = job_record(self.state, job)
                case SaveIncident(incident=incident):
                    self.incidents[incident.incident_id] = incident
                case OfferPlan():
                    for node in command.nodes:
                        if self.dice.random() >= self.offer_loss:
                            self.seen_offers[node] = command
                case RequestProbe(nodes=nodes, number=number):
                    for node in nodes:
                        self._probe(node, number)
                case NotifyDeaths():
                    self.told_dead |= set(command.ranks)
                case RequestDecision(job=job, asked=asked, view=view):
                    decision = decide(view, self.config.policy)
                    answer = DecisionMade(job=job, asked=asked, decision=decision)
                    self._decisions.append((self.now_s + DECIDE_S, answer))
        if self.on_advance is not None:
            self.on_advance(event, self.now_s, commands, self.state)
