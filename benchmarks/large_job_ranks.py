"""The ranks of one large job on paper: how long each step takes them under a layout, and what the
agents of their nodes tell of it, as bytes that cost little to make.

Ranks compute `DENSE_S_PER_TOKEN` a token, `S_PER_ROW` a row of their experts and `S_PER_SQUARE` a
squared document length, with a little noise. Times are told, not spent. A plan is taken at one step
by all ranks, once each node has heard of it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from benchmarks.agent_swarm import varint
from benchmarks.fleet_reports import DEVICES, uuid_of
from pacekeeper.core.layout.codec import decode_layout, encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from pacekeeper.core.telemetry.records import LOADS_PER_RECORD
from pacekeeper.protos import telemetry_pb2 as t

JOB = "pretrain"
TOKENS_PER_RANK, EXPERTS_PER_TOKEN = 4096, 8
ROWS_PER_RANK = 8  # of the batch
DOCUMENT_TOKENS = 512
START_S, DENSE_S_PER_TOKEN, S_PER_ROW, S_PER_SQUARE = 0.02, 8e-5, 4e-6, 2e-8
JITTER, OVERHEAD_S = 0.01, 0.05
SLOTS = 2  # of a rank in each layer
Counts = tuple[int, int, int, bytes]
"""A record of loads: layer, first expert, how many, and their counts as they are sent."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """From `first` up to `end` a rank's work takes `slowdown` times as long, or its documents are
    `longer` times as long, or one expert is `hotter`."""

    first: int
    end: int = 1 << 30
    rank: int = 0
    slowdown: float = 1.0
    longer: float = 1.0
    hotter: float = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class PaperJob:
    """All ranks, eight on a node. `troubles`: what is wrong when; may be added to."""

    num_nodes: int
    num_layers: int
    num_experts: int
    replicas: int
    troubles: list[InjectedFault] = field(default_factory=list)
    step_every: int = 1  # reports
    dead: set[int] = field(default_factory=set)  # nodes
    layout: Layout = field(init=False)
    heard: set[int] = field(default_factory=set)  # nodes that heard of `plan`
    plan: Layout | None = None
    previous: int = 0  # generation before the one in force
    in_force: int = 0  # step at which it came
    taken: int = 0  # step at which `plan` will be in force; 0: not agreed
    regrouped: bytes = b""  # the survivors' layout, to be told
    is_over: bool = False  # all ranks have finished
    newest: int = 0  # step anybody has told
    _times: dict[int, tuple[Values, Values, Values, Values]] = field(default_factory=dict)
    _crcs: dict[int, int] = field(default_factory=dict)
    _counted: dict[tuple[InjectedFault, ...], list[Counts]] = field(default_factory=dict)
    _random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        self.layout = even_layout(
            ranks=range(self.num_ranks),
            num_layers=self.num_layers,
            num_experts=self.num_experts,
            replicas=self.replicas,
            domain_of=self.node_of,
        )

    @property
    def num_ranks(self) -> int:
        """Of all nodes."""
        return self.num_nodes * DEVICES

    @property
    def node_of(self) -> dict[int, str]:
        """By rank."""
        return {rank: f"node-{rank // DEVICES:05d}" for rank in range(self.num_ranks)}

    def hear(self, node: int, data: bytes, generation: int) -> None:
        """An offer reached a node; when all have it they agree on a step."""
        if generation <= self.layout.generation or self.taken:
            return
        if self.plan is None:
            self.plan, self.regrouped = decode_layout(data), b""
        self.heard.add(node)
        if not self.taken and len(self.heard) == self.num_nodes - len(self.dead):
            self.taken = self.newest + 2

    def die(self, node: int) -> None:
        """A node is lost; the others agree to go on without it."""
        self.dead.add(node)
        gone = {node * DEVICES + i for i in range(DEVICES)}
        floor = ReplicationFloor(replicas=2, domain_of=self.node_of, slots_per_rank=SLOTS)
        self.plan = shrink(
            self.layout, dead=gone, generation=self.layout.generation + 1, floor=floor
        )
        self.regrouped, self.taken = encode_layout(self.plan), self.newest + 2

    def greeting(self, node: int) -> bytes:
        """Who is here and what runs."""
        told = t.JobReport(job=JOB, run_id=1)
        for rank in _ranks(node):
            attached = told.attached.add(
                job=JOB,
                rank=rank,
                world_size=self.num_ranks,
                pid=1000 + rank,
                role="train",
                clock="cuda",
                device_uuid=uuid_of(node, rank % DEVICES),
                run_id=1,
            )
            attached.model.num_layers = self.num_layers
            attached.model.num_experts = self.num_experts
            attached.model.experts_per_token = EXPERTS_PER_TOKEN
            attached.model.rows_per_step = ROWS_PER_RANK * self.num_ranks
            attached.model.slots_per_rank = SLOTS
            attached.model.expert_bytes = 100 << 20
            attached.model.dense_bytes = 100 << 20
        self._applied(told, node, is_regroup=False)
        if node == 0:
            told.layouts.add(
                generation=self.layout.generation, layout_json=encode_layout(self.layout)
            )
        return t.NodeReport(jobs=[told]).SerializeToString()

    def step(self, node: int, number: int) -> bytes:
        """What a node's ranks tell of a step."""
        self.newest = max(self.newest, number)
        told = t.JobReport(job=JOB, run_id=1)
        if self.is_over:
            return self._exits(told, node)
        if self.plan is not None and 0 < self.taken <= number:
            self.previous, self.layout, self.in_force = self.layout.generation, self.plan, number
            self.plan, self.taken = None, 0
            self.heard.clear()
            self._times = {n: found for n, found in self._times.items() if n < number}
        if number == self.in_force and self.previous:
            self._applied(told, node, is_regroup=bool(self.regrouped))
            if self.regrouped and node == min(set(range(self.num_nodes)) - self.dead):
                generation = self.layout.generation
                told.layouts.add(generation=generation, layout_json=self.regrouped)
        ranks, generation = list(_ranks(node)), self.layout.generation
        if number < self.in_force:
            generation = self.previous  # a late node tells of a step before the plan
        tokens, squares, rows, times_s = self._of(number)
        at = slice(node * DEVICES, (node + 1) * DEVICES)
        told.micro_batches.CopyFrom(
            t.MicroBatchColumns(
                rank=ranks,
                step=[number] * DEVICES,
                micro_batch=[0] * DEVICES,
                generation=[generation] * DEVICES,
                tokens=tokens[at].astype(int).tolist(),
                sum_len_squared=squares[at].astype(int).tolist(),
                expert_rows=rows[at].astype(int).tolist(),
                num_active_experts=[self.num_layers] * DEVICES,
                compute_s=times_s[at].tolist(),
            )
        )
        told.steps.CopyFrom(
            t.StepColumns(
                rank=ranks,
                step=[number] * DEVICES,
                generation=[generation] * DEVICES,
                tokens=[TOKENS_PER_RANK * self.num_ranks] * DEVICES,
                duration_s=[float(times_s.max()) + OVERHEAD_S] * DEVICES,
                loss=[2.0] * DEVICES,
            )
        )
        loads, counts = told.expert_loads, self._counts(number)
        layers, experts, lengths, parts = zip(*counts, strict=True)
        loads.rank.extend([ranks[0]] * len(counts))  # an agent adds up what its ranks tell
        loads.step.extend([number] * len(counts))
        loads.generation.extend([generation] * len(counts))
        loads.layer.extend(layers)
        loads.first_expert.extend(experts)
        loads.num_counts.extend(lengths)
        loads.num_ranks.extend([DEVICES] * len(counts))
        data = told.SerializeToString()
        more = b"".join(parts)
        column = b"\x3a" + varint(len(more)) + more  # field 7 of the loads: counts
        data += b"\x2a" + varint(len(column)) + column  # field 5 of the job's report
        return b"\x1a" + varint(len(data)) + data  # field 3 of the node's

    def _applied(self, told: t.JobReport, node: int, *, is_regroup: bool) -> None:
        crc = self._crc_of(self.layout)
        columns = told.plans_applied
        for rank in _ranks(node):
            columns.rank.append(rank)
            columns.step.append(self.in_force)
            columns.generation.append(self.layout.generation)
            columns.previous_generation.append(self.previous)
            columns.layout_crc.append(crc)
            columns.moved_bytes.append(0)
            columns.duration_s.append(0.1)
            columns.is_regroup.append(is_regroup)

    def _exits(self, told: t.JobReport, node: int) -> bytes:
        for rank in _ranks(node):
            told.rank_exits.rank.append(rank)
            told.rank_exits.pid.append(1000 + rank)
            for name in ("exit_code", "signal", "detected_mono_s"):
                getattr(told.rank_exits, name).append(0)
        return t.NodeReport(jobs=[told]).SerializeToString()

    def _crc_of(self, layout: Layout) -> int:
        if layout.generation not in self._crcs:
            self._crcs[layout.generation] = layout_crc(layout)
        return self._crcs[layout.generation]

    def _wrong(self, number: int) -> Collection[InjectedFault]:
        return [one for one in self.troubles if one.first <= number < one.end]

    def _loads(self, number: int) -> Values:
        """Rows of each expert [layers, experts] of all ranks."""
        whole = TOKENS_PER_RANK * self.num_ranks * EXPERTS_PER_TOKEN
        weights = np.ones((self.num_layers, self.num_experts))
        for one in self._wrong(number):
            weights[0, 7] *= one.hotter
        return np.asarray(whole * weights / weights.sum(axis=1, keepdims=True))

    def _counts(self, number: int) -> list[Counts]:
        """One node's part of them, as it is sent."""
        wrong = tuple(self._wrong(number))
        if wrong not in self._counted:
            counts = (self._loads(number) / self.num_nodes).astype(int).tolist()
            self._counted[wrong] = [
                (layer, first, len(part), b"".join(map(varint, part)))
                for layer, row in enumerate(counts)
                for first in range(0, self.num_experts, LOADS_PER_RECORD)
                for part in (row[first : first + LOADS_PER_RECORD],)
            ]
        return self._counted[wrong]

    def _of(self, number: int) -> tuple[Values, Values, Values, Values]:
        """Tokens, squared lengths, expert rows and seconds of all ranks in a step."""
        if number in self._times:
            return self._times[number]
        shares = np.zeros(self.num_ranks)
        for rank, share in self.layout.batch_shares:
            shares[rank] = share
        uneven = self._random.uniform(0.95, 1.05, self.num_ranks)
        tokens = np.rint(TOKENS_PER_RANK * self.num_ranks * shares * uneven)
        squares = tokens * DOCUMENT_TOKENS * self._random.uniform(0.8, 1.2, self.num_ranks)
        rows, loads = np.zeros(self.num_ranks), self._loads(number)
        for layer, experts in enumerate(self.layout.experts):
            for expert, hosts in enumerate(experts):
                for host in hosts:
                    rows[host.rank] += host.share * loads[layer, expert]
        slowdown = self._random.normal(1.0, JITTER, self.num_ranks).clip(0.9, 1.1)
        for one in self._wrong(number):
            squares[one.rank] *= one.longer
            slowdown[one.rank] *= one.slowdown
        rows = np.rint(rows)
        times_s = START_S + DENSE_S_PER_TOKEN * tokens + S_PER_ROW * rows + S_PER_SQUARE * squares
        found = tokens, np.rint(squares), rows, times_s * slowdown
        self._times[number] = found
        return found


def _ranks(node: int) -> range:
    return range(node * DEVICES, (node + 1) * DEVICES)
