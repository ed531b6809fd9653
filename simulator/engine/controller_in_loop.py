"""Runs the controller's state machine on records of a simulated pipelined job.

In: micro-batches of each rank with their work and device time, reported by simulated agents. Out:
the open findings of the machine (`controller/machine/machine.py`). The job has warmed up before the
first fault; rows of experts are not reported. Steps are reported only from a change of speeds until
it is detected: false alarms of a healthy job are measured by `benchmarks/false_alarms.py`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.planning.model.partition import Partition, StageShard
from pacekeeper.controller.planning.partition_cost.compute import (
    LayerSums,
    layer_sums,
    shares_of,
)
from pacekeeper.controller.state.events import NodeAttached, NodeReported
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, RankExitRecord, Record, StepRecord
from pacekeeper.simulator.engine.detection_model import WANTED_SLOWDOWN, WARM_STEPS
from pacekeeper.simulator.jobs.document_lengths import Lengths
from pacekeeper.simulator.jobs.pipeline import PipelineJob

Array = npt.NDArray[np.float64]

JOB = "simulated"
MOST_STEPS = 60  # watched after a change: what is not seen by then, is not
JITTER = 0.02  # of each micro-batch on each device
LEAST_FULL = 0.9  # how full a packer makes a micro-batch, at least
MOST_WARM = 4  # jobs whose warmed-up state is kept
STEP_S = 1.0  # between two reports on the machine's clock: nothing here waits for a time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """The controller's state, and how the simulated job is numbered in it.

    Attributes:
        state: Of the controller.
        number_of: Rank by device; a device that returns gets a new rank.
        next_number: Rank of the next device that attaches.
        step: The last one reported.
        generation: Of the partition of that step.
        is_new: No step of this generation was reported yet.
    """

    state: State = field(default_factory=State)
    number_of: Mapping[int, int] = field(default_factory=dict)
    next_number: int = 0
    step: int = -1
    generation: int = 1
    is_new: bool = True

    @property
    def slow(self) -> dict[int, float]:
        """Open findings: device -> slowdown."""
        job = self.state.jobs.get(JOB)
        slow = {} if job is None else job.detection.evidence.slow
        return {d: slow[n] for d, n in self.number_of.items() if n in slow}

    def moved(self) -> "Watched":
        """The job runs a new partition."""
        return replace(self, generation=self.generation + 1, is_new=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Batches:
    """Micro-batches as they were filled: rows; `dearer`: quadratic attention over that of a mean
    one, in parts of a layer's time."""

    rows: Array
    dearer: Array
    sum_len_squared: npt.NDArray[Any]
    num_documents: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """One micro-batch of one rank."""

    tokens: int
    taken_s: float
    sum_len_squared: int = 0
    num_documents: int = 0


_IDLE = _Done(tokens=0, taken_s=0.0)
_WARM: dict[tuple[object, ...], tuple[Watched, Any]] = {}


class Watcher:
    """One job's machine. `config` is the controller's; jitter and documents are drawn by `seed`.

    `lengths`: of the documents that are packed; None: all micro-batches of a size cost the same.
    """

    def __init__(
        self, job: PipelineJob, config: ControllerConfig, seed: int, lengths: Lengths | None = None
    ) -> None:
        self.job, self.config, self.seed, self.lengths = job, config, seed, lengths
        self.draw = np.random.default_rng(seed)
        self.sums = layer_sums(job.problem.model, job.problem.links)

    def begun(self, devices: Collection[int], partition: Partition) -> Watched:
        """All attached, and warmed up on healthy steps: the same for all that begin alike."""
        key = (self.job, self.config, self.seed, self.lengths, tuple(devices), partition)
        if key not in _WARM:
            watched = self.joined(Watched(), devices)
            detector = self.config.detector
            for _ in range(detector.skip_steps + max(WARM_STEPS, detector.warmup_steps)):
                watched = self.observed(watched, partition, {})
            if len(_WARM) == MOST_WARM:
                del _WARM[next(iter(_WARM))]
            _WARM[key] = replace(watched, is_new=False), self.draw.bit_generator.state
        watched, self.draw.bit_generator.state = _WARM[key]
        return watched

    def joined(self, watched: Watched, devices: Collection[int]) -> Watched:
        """Attach devices under new ranks."""
        fresh = {d: watched.next_number + i for i, d in enumerate(sorted(devices))}
        size = watched.next_number + len(fresh)
        numbers = {**watched.number_of, **fresh}
        watched = replace(watched, number_of=numbers, next_number=size)
        state = watched.state
        for node, own in self._by_node(devices).items():
            attached = tuple(
                Attachment(job=JOB, rank=fresh[d], world_size=size, pid=1 + fresh[d]) for d in own
            )
            if node not in state.nodes:
                event = NodeAttached(node=node, product_version="", agent_incarnation="1")
                state, _ = advance(state, event, config=self.config, now_s=0.0)
            state = self._reported(state, node, (), attached)
        return replace(watched, state=state)

    def gone(self, watched: Watched, devices: Collection[int]) -> Watched:
        """Report the ends of these devices' processes."""
        state = watched.state
        for node, own in self._by_node(devices).items():
            exits = tuple(
                RankExitRecord(
                    rank=watched.number_of[d],
                    pid=1 + watched.number_of[d],
                    exit_code=0,
                    signal=9,
                )
                for d in own
            )
            state = self._reported(state, node, exits)
        left = {d: n for d, n in watched.number_of.items() if d not in set(devices)}
        return replace(watched, state=state, number_of=left)

    def until_seen(
        self, watched: Watched, partition: Partition, speed: Mapping[int, float]
    ) -> tuple[int, Watched]:
        """After how many steps at these speeds its findings are those of the ranks that are slow
        and have work; MOST_STEPS where they never are.
        """
        detector = self.config.detector
        if watched.is_new:  # its first step on a partition is judged by nobody
            before = {d: 1.0 / slowdown for d, slowdown in watched.slow.items()}
            watched = self.observed(watched, partition, before)
        working = set(partition.ranks)
        wanted = {d for d, pace in speed.items() if d in working and 1.0 / pace >= WANTED_SLOWDOWN}
        # Of ranks that are known already it has to measure anew how slow they are.
        least = detector.measure_steps if wanted == set(watched.slow) else 1
        for number in range(1, MOST_STEPS + 1):
            watched = self.observed(watched, partition, speed)
            if number >= least and set(watched.slow) & working == wanted:
                return number, watched
        return MOST_STEPS, watched

    def observed(
        self, watched: Watched, partition: Partition, speed: Mapping[int, float]
    ) -> Watched:
        """Report one step of all ranks."""
        step = watched.step + 1
        records = self._records(watched, partition, speed, step)
        state = watched.state
        for node, own in self._by_node(watched.number_of).items():
            state = self._reported(state, node, tuple(r for d in own for r in records[d]), at=step)
        return replace(watched, state=state, step=step, is_new=False)

    def _records(
        self, watched: Watched, partition: Partition, speed: Mapping[int, float], step: int
    ) -> dict[int, list[Record]]:
        """By device. Who stands by has done nothing, in no time."""
        work: dict[int, list[_Done]] = {d: [_IDLE] for d in watched.number_of}
        for pipeline in partition.pipelines:
            batches = self._filled(pipeline.micro_batches)
            for cell in pipeline.cells:
                for device in cell.ranks:
                    work[device] = self._work(cell, device, batches, speed.get(device, 1.0))
        generation = watched.generation
        return {
            device: [
                *(
                    MicroBatchRecord(
                        rank=watched.number_of[device],
                        step=step,
                        micro_batch=at,
                        generation=generation,
                        compute_s=batch.taken_s,
                        tokens=batch.tokens,
                        sum_len_squared=batch.sum_len_squared,
                        num_documents=batch.num_documents,
                    )
                    for at, batch in enumerate(done)
                ),
                StepRecord(
                    rank=watched.number_of[device],
                    step=step,
                    generation=generation,
                    duration_s=STEP_S,
                    tokens=sum(batch.tokens for batch in done),
                    ended_mono_s=step * STEP_S,
                ),
            ]
            for device, done in work.items()
        }

    def _filled(self, micro_batches: Sequence[int]) -> _Batches:
        """What a packer makes of micro-batches of so many rows."""
        rows = np.array(micro_batches, dtype=np.float64)
        if self.lengths is None:
            none = np.zeros(len(rows))
            full = rows * self.draw.uniform(LEAST_FULL, 1.0, len(rows))
            return _Batches(rows=full, dearer=none, sum_len_squared=none, num_documents=none)
        budgets = [int(size) * self.job.tokens_per_row for size in micro_batches]
        packed = self.lengths.packed(budgets, self.draw)
        return _Batches(
            rows=rows,
            dearer=self.lengths.price(packed, self.job.micro_batch_tokens) - 1.0,
            sum_len_squared=packed.sum_len_squared,
            num_documents=packed.num_documents,
        )

    def _work(self, cell: StageShard, device: int, batches: _Batches, speed: float) -> list[_Done]:
        """Tokens count what a rank does of them: as many as would take as long in one whole layer;
        squares likewise, which whose heads it computes costs.
        """
        sums, model, rows = self.sums, self.job.problem.model, batches.rows
        heads, columns = shares_of(cell.attention), shares_of(cell.mlp)
        row_s = (
            heads.get(device, 0.0) * _between(cell, sums, "attention_s")
            + columns.get(device, 0.0) * _between(cell, sums, "mlp_s")
            + _between(cell, sums, "replicated_s")
        )
        layer = model.layers[0]
        layer_s = layer.attention_s + layer.mlp_s + layer.replicated_s
        layers = row_s / layer_s
        squares = heads.get(device, 0.0) * cell.num_layers  # layers of it
        both = 1.0 + model.backward_ratio
        jitter = np.exp(self.draw.normal(0.0, JITTER, len(rows)))
        work_s = (row_s + squares * layer_s * batches.dearer) * rows
        taken_s = both * (work_s + cell.num_layers * model.launch_s) * jitter / speed
        return [
            _Done(tokens=tokens, taken_s=seconds, sum_len_squared=squared, num_documents=documents)
            for tokens, seconds, squared, documents in zip(
                np.rint(rows * self.job.tokens_per_row * layers).astype(int).tolist(),
                taken_s.tolist(),
                np.rint(batches.sum_len_squared * squares).astype(int).tolist(),
                batches.num_documents.astype(int).tolist(),
                strict=True,
            )
        ]

    def _by_node(self, devices: Collection[int]) -> dict[str, list[int]]:
        device_of = self.job.problem.device_of
        found: dict[str, list[int]] = {}
        for device in sorted(devices):
            found.setdefault(f"node-{device_of[device].node}", []).append(device)
        return found

    def _reported(
        self,
        state: State,
        node: str,
        records: tuple[Record, ...],
        attached: tuple[Attachment, ...] = (),
        *,
        at: int = 0,
    ) -> State:
        part = JobReport(job=JOB, attached=attached, records=records)
        report = NodeReport(sequence=at + 1, sent_mono_s=at * STEP_S, jobs=(part,))
        event = NodeReported(node=node, agent_incarnation="1", report=report)
        state, _ = advance(state, event, config=self.config, now_s=at * STEP_S)
        return state


def _between(cell: StageShard, sums: LayerSums, name: str) -> float:
    of_layers = getattr(sums, name)
    return float(of_layers[cell.end_layer] - of_layers[cell.first_layer])
