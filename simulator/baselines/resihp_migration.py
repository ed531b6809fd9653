"""Micro-batches that change pipelines stage by stage while a step runs (ResiHP, Algorithm 1). Pure.

The schedule is walked in time, in one of the orders of `StageOrder`. A stage that is free takes the
next forward of the slowest pipeline's same stage where that is behind by more than delta, or dead;
its backward pass stays with it. Weight gradients that may wait are computed when there is nothing
else to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import NamedTuple


class StageOrder(StrEnum):
    """Order in which a free stage runs its chunks."""

    PROGRAM = "program"  # 1F1B: it waits for a forward while it may hold one more micro-batch
    READY = "ready"  # backward passes first, forwards while it may hold their activations
    EAGER = "eager"  # the same without a bound on activations
    SPLIT = "split"  # as READY; weight gradients wait for idle time


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """forward_s, backward_s [pipelines][stages] of one micro-batch; None: the stage is dead.

    weight_s: the part of it that may wait. message_s [pipelines][stages - 1]: to the next stage,
    and back; in_flight [stages]: micro-batches whose activations a stage may hold.
    """

    forward_s: tuple[tuple[float | None, ...], ...]
    backward_s: tuple[tuple[float | None, ...], ...]
    weight_s: tuple[tuple[float, ...], ...]
    message_s: tuple[tuple[float, ...], ...]
    num_microbatches: tuple[int, ...]
    in_flight: tuple[int, ...]
    order: StageOrder = StageOrder.READY


@dataclass(frozen=True, slots=True, order=True)
class Migration:
    """Stage `stage` of a pipeline's micro-batch runs on another pipeline's ranks."""

    pipeline: int
    stage: int
    micro_batch: int
    to_pipeline: int


class Migrated(NamedTuple):
    """How long a step takes, what changed hands, in order, and when each [pipeline][stage] ends."""

    step_s: float
    migrations: tuple[Migration, ...]
    ends_s: tuple[tuple[float, ...], ...]


def migrate_each(work: StageWork, *, deltas: Sequence[int]) -> tuple[Migrated, ...]:
    """Walk the step for each delta.

    Where no gap of progress passes a smaller delta it is the same walk.
    """
    found: dict[int, Migrated] = {}
    widest = None
    for delta in sorted(set(deltas), reverse=True):
        if widest is not None and widest <= delta:
            found[delta] = found[min(found)]
            continue
        walk = _Walk(work, delta)
        found[delta] = walk.run()
        widest = walk.widest
    return tuple(found[delta] for delta in deltas)


class _Walk:
    """One step in time. A task is (pipeline, micro-batch) on a stage."""

    def __init__(self, work: StageWork, delta: int) -> None:
        self.work = work
        self.delta = delta
        self.num_pipelines = len(work.forward_s)
        self.num_stages = len(work.in_flight)
        stages, pipelines = range(self.num_stages), range(self.num_pipelines)
        # Forwards that have their input, per pipeline and stage, the next one first.
        self.ready: list[list[list[int]]] = [[[] for _ in stages] for _ in pipelines]
        self.ready_back: list[list[list[tuple[int, int]]]] = [
            [[] for _ in stages] for _ in pipelines
        ]
        self.progress = [[0] * self.num_stages for _ in pipelines]  # forwards done, for themselves
        self.open = [[0] * self.num_stages for _ in pipelines]  # activations held
        self.waiting = [[0] * self.num_stages for _ in pipelines]  # weight gradients
        # Own forwards that nobody has begun.
        self.unbegun = [[count] * self.num_stages for count in work.num_microbatches]
        self.ends_s = [[0.0] * self.num_stages for _ in pipelines]
        self.is_patient = work.order is StageOrder.PROGRAM
        self.is_free = [[True] * self.num_stages for _ in pipelines]
        self.runs_on: dict[tuple[int, int, int], int] = {}
        self.events: list[tuple[float, int, int, int, int, int]] = []
        self.migrations: list[Migration] = []
        self.now_s = 0.0
        self.num_done = 0
        self.widest = 0  # gap of progress that was looked at

    def run(self) -> Migrated:
        for pipeline, count in enumerate(self.work.num_microbatches):
            self.ready[pipeline][0] = list(range(count))
        for pipeline in range(self.num_pipelines):
            self._start(pipeline, 0)
        while self.events or self._wait_no_longer():
            self.now_s = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] == self.now_s:
                touched.add(self._happened(*heappop(self.events)[1:]))
            for stage in sorted(touched):
                for pipeline, is_free in enumerate(self.is_free):
                    if is_free[stage]:
                        self._start(pipeline, stage)
        assert self.num_done == sum(self.work.num_microbatches), "the step ran to its end"
        ends_s = tuple(tuple(of_pipeline) for of_pipeline in self.ends_s)
        return Migrated(self.now_s, tuple(self.migrations), ends_s)

    def _wait_no_longer(self) -> bool:
        """Where all wait for forwards that others took, they go on with what is ready."""
        if not self.is_patient:
            return False
        self.is_patient = False
        for pipeline in range(self.num_pipelines):
            for stage in range(self.num_stages):
                self._start(pipeline, stage)
        return bool(self.events)

    def _happened(self, kind: int, on: int, stage: int, pipeline: int, batch: int) -> int:
        """Record one event; return the stage where work may begin now."""
        if kind == ARRIVED_FORWARD:
            self.ready[pipeline][stage].append(batch)
        elif kind == ARRIVED_BACKWARD:
            owner = self.runs_on[pipeline, stage, batch]
            heappush(self.ready_back[owner][stage], (batch, pipeline))
        else:
            self._ended(kind, on, stage, pipeline, batch)
        return stage

    def _ended(self, kind: int, on: int, stage: int, pipeline: int, batch: int) -> None:
        self.is_free[on][stage] = True
        self.ends_s[on][stage] = self.now_s
        if kind == ENDED_FORWARD:
            self.progress[pipeline][stage] += 1
            if stage + 1 < self.num_stages:
                arrives_s = self.now_s + self.work.message_s[on][stage]
                self._push(arrives_s, ARRIVED_FORWARD, on, stage + 1, pipeline, batch)
            else:
                heappush(self.ready_back[on][stage], (batch, pipeline))
            return
        if kind == ENDED_WEIGHT:
            self.open[on][stage] -= 1
            return
        if self.work.weight_s[on][stage]:
            self.waiting[on][stage] += 1
        else:
            self.open[on][stage] -= 1
        self.num_done += stage == 0
        if stage > 0:
            arrives_s = self.now_s + self.work.message_s[on][stage - 1]
            self._push(arrives_s, ARRIVED_BACKWARD, on, stage - 1, pipeline, batch)

    def _start(self, on: int, stage: int) -> None:
        forward_s = self.work.forward_s[on][stage]
        backward_s = self.work.backward_s[on][stage]
        if forward_s is None or backward_s is None or not self.is_free[on][stage]:
            return
        is_full = self.open[on][stage] >= self.work.in_flight[stage]
        taken_from = None if is_full else self._whose(on, stage)
        is_waiting = self.is_patient and not is_full
        if is_waiting and taken_from is None and self.unbegun[on][stage]:
            return
        if self.ready_back[on][stage] and not (is_waiting and taken_from is not None):
            batch, pipeline = heappop(self.ready_back[on][stage])
            self.is_free[on][stage] = False
            now_s = backward_s - self.work.weight_s[on][stage]
            self._push(self.now_s + now_s, ENDED_BACKWARD, on, stage, pipeline, batch)
            return
        if taken_from is None:
            self._catch_up(on, stage)
            return
        batch = self.ready[taken_from][stage].pop(0)
        self.runs_on[taken_from, stage, batch] = on
        self.unbegun[taken_from][stage] -= 1
        if taken_from != on:
            self.migrations.append(Migration(taken_from, stage, batch, on))
        self.open[on][stage] += 1
        self.is_free[on][stage] = False
        self._push(self.now_s + forward_s, ENDED_FORWARD, on, stage, taken_from, batch)

    def _catch_up(self, on: int, stage: int) -> None:
        """A weight gradient, where one waits."""
        if self.waiting[on][stage]:
            self.waiting[on][stage] -= 1
            self.is_free[on][stage] = False
            weight_s = self.work.weight_s[on][stage]
            self._push(self.now_s + weight_s, ENDED_WEIGHT, on, stage, on, 0)

    def _whose(self, on: int, stage: int) -> int | None:
        """The pipeline whose next forward this stage takes: its own, or that of one far behind."""
        dead, behind, mine = [], [], self.progress[on][stage]
        for pipeline, ready in enumerate(self.ready):
            if pipeline == on or not ready[stage]:
                continue
            if self.work.forward_s[pipeline][stage] is None:
                dead.append(pipeline)
            gap = mine - self.progress[pipeline][stage]
            self.widest = max(self.widest, gap)
            if gap > self.delta:
                behind.append(pipeline)
        if dead or behind:
            return min(dead or behind, key=lambda p: (self.progress[p][stage], p))
        return on if self.ready[on][stage] else None

    def _push(self, at_s: float, kind: int, on: int, stage: int, pipeline: int, batch: int) -> None:
        heappush(self.events, (at_s, kind, on, stage, pipeline, batch))


ENDED_BACKWARD, ENDED_FORWARD, ENDED_WEIGHT, ARRIVED_BACKWARD, ARRIVED_FORWARD = range(5)
