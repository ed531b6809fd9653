"""Timelines of pipeline training with known causes, played operation by operation.

A dumb twin of the replay: no graph, no arrays, one memoised question for each operation ("when did
you end?"). Work is given per compute, so a test knows what an even job would have taken.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from pacekeeper.predictor.recorded.trace import OpTable, OpType, Trace, Worker, compute_of

Compute = tuple[OpType, int, int]  # forward or backward, model chunk, micro-batch
Place = tuple[int, int]  # dp, stage
# (step, dp, stage, compute) -> its time
WorkTime = Callable[[int, int, int, Compute], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's shape; `micro_batches` of each dp rank; with model chunks, multiples of `pp`."""

    pp: int = 4
    micro_batches: tuple[int, ...] = (8, 8)
    chunks: int = 1
    steps: int = 6
    transfer_s: float = 0.001
    gather_s: float = 0.02
    scatter_s: float = 0.05
    embedding_s: float = 0.01
    clip_s: float = 0.005
    optimizer_s: float = 0.03

    @property
    def dp(self) -> int:
        return len(self.micro_batches)


def order_of(job: Job, dp: int, stage: int) -> list[Compute]:
    """1F1B, or interleaved 1F1B (Narayanan et al., SC 2021): the computes of one worker."""
    count = job.micro_batches[dp] * job.chunks

    def compute(kind: OpType, at: int) -> Compute:
        if job.chunks == 1:
            return kind, 0, at
        turn, rest = divmod(at, job.pp * job.chunks)
        chunk = rest // job.pp if kind is OpType.FORWARD else job.chunks - 1 - rest // job.pp
        return kind, chunk, turn * job.pp + rest % job.pp

    warm_up = job.pp - stage - 1
    if job.chunks > 1:
        warm_up = warm_up * 2 + (job.chunks - 1) * job.pp
    warm_up = min(warm_up, count)
    found = [compute(OpType.FORWARD, at) for at in range(warm_up)]
    for at in range(count - warm_up):
        found.append(compute(OpType.FORWARD, warm_up + at))
        found.append(compute(OpType.BACKWARD, at))
    return found + [compute(OpType.BACKWARD, at) for at in range(count - warm_up, count)]


@dataclass(slots=True, kw_only=True)
class _Step:
    """One step, played: when each operation of each worker starts and ends."""

    job: Job
    step: int
    time_of: WorkTime
    orders: dict[Place, list[Compute]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [(dp, stage) for dp in range(self.job.dp) for stage in range(self.job.pp)]
        self.orders = {place: order_of(self.job, *place) for place in places}

    def operations(self) -> list[tuple[Place, OpType, int, int, float, float]]:
        """(place, type, micro-batch, model chunk, start, end) of everything that was recorded."""
        job, found = self.job, []
        compute_end, transfer, transfer_start = self._questions()
        before_sync: dict[Place, float] = {}
        for place, order in self.orders.items():
            found.append((place, OpType.PARAMS_ALL_GATHER, -1, 0, 0.0, job.gather_s))
            for at, (kind, chunk, micro_batch) in enumerate(order):
                end_s = compute_end(place, at)
                took_s = self.time_of(self.step, *place, order[at])
                found.append((place, kind, micro_batch, chunk, end_s - took_s, end_s))
                for is_send in (False, True):
                    if self._other(place, order[at], is_send) is not None:
                        start_s = transfer_start(place, order[at], is_send)
                        both_s = transfer(place, order[at], is_send)
                        op = _transfer_type(kind, is_send)
                        found.append((place, op, -1, -1, start_s, both_s))
            before_sync[place] = compute_end(place, len(order) - 1)
        return found + self._closing(before_sync)

    def _closing(
        self, before_sync: dict[Place, float]
    ) -> list[tuple[Place, OpType, int, int, float, float]]:
        job, found, ready = self.job, [], dict(before_sync)

        def collective(op: OpType, members: list[Place], took_s: float, chunk: int) -> None:
            end_s = max(ready[place] for place in members) + took_s
            for place in members:
                found.append((place, op, -1, chunk, ready[place], end_s))
                ready[place] = end_s

        for dp in range(job.dp):
            ends = sorted({(dp, 0), (dp, job.pp - 1)})
            collective(OpType.EMBEDDING_GRADS_ALL_REDUCE, ends, job.embedding_s, -1)
        for stage in range(job.pp):
            peers = [(dp, stage) for dp in range(job.dp)]
            collective(OpType.GRADS_REDUCE_SCATTER, peers, job.scatter_s, 0)
        collective(OpType.CLIP_GRADS, list(ready), job.clip_s, -1)
        for place in list(ready):
            collective(OpType.OPTIMIZER, [place], job.optimizer_s, -1)
        return found

    def _other(self, place: Place, compute: Compute, is_send: bool) -> tuple[Place, Compute] | None:
        """The far end of the transfer before (or after) a compute; None at the model's ends."""
        (dp, stage), (kind, chunk, micro_batch) = place, compute
        way = 1 if (kind is OpType.FORWARD) == is_send else -1
        position = chunk * self.job.pp + stage + way
        if not 0 <= position < self.job.pp * self.job.chunks:
            return None
        far_chunk, far_stage = divmod(position, self.job.pp)
        return (dp, far_stage), (kind, far_chunk, micro_batch)

    def _questions(
        self,
    ) -> tuple[
        Callable[[Place, int], float],
        Callable[[Place, Compute, bool], float],
        Callable[[Place, Compute, bool], float],
    ]:
        @cache
        def compute_end(place: Place, at: int) -> float:
            compute = self.orders[place][at]
            start_s = compute_end(place, at - 1) if at else 0.0
            first = next(c for c in self.orders[place] if c[0] is OpType.FORWARD and c[1] == 0)
            if compute == first:
                start_s = max(start_s, self.job.gather_s)
            if self._other(place, compute, False) is not None:
                start_s = max(start_s, transfer(place, compute, False))
            return start_s + self.time_of(self.step, *place, compute)

        @cache
        def position(place: Place) -> dict[Compute, int]:
            return {compute: at for at, compute in enumerate(self.orders[place])}

        @cache
        def stream_of(
            place: Place, kind: OpType, is_send: bool
        ) -> tuple[list[Compute], list[Compute]]:
            """All computes of this kind, and those of them that are sent or received."""
            of_kind = [c for c in self.orders[place] if c[0] is kind]
            return of_kind, [c for c in of_kind if self._other(place, c, is_send) is not None]

        @cache
        def transfer_start(place: Place, compute: Compute, is_send: bool) -> float:
            """After the same stream's transfer before it, and what it carries or makes room for."""
            order, at = self.orders[place], position(place)[compute]
            of_kind, stream = stream_of(place, compute[0], is_send)
            waits = [compute_end(place, at)] if is_send else [0.0]
            before = of_kind.index(compute) - 1
            if not is_send and before >= 0:
                waits.append(compute_end(place, position(place)[of_kind[before]]))
            if compute != stream[0]:
                waits.append(transfer(place, stream[stream.index(compute) - 1], is_send))
            elif compute[0] is OpType.BACKWARD:
                first = next(i for i, c in enumerate(order) if c[0] is OpType.BACKWARD)
                if first >= 2:
                    waits.append(compute_end(place, first - 2))
            return max(waits)

        @cache
        def transfer(place: Place, compute: Compute, is_send: bool) -> float:
            far = self._other(place, compute, is_send)
            assert far is not None
            starts_s = transfer_start(place, compute, is_send), transfer_start(*far, not is_send)
            return max(starts_s) + self.job.transfer_s

        return compute_end, transfer, transfer_start


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """For a while only: with such a limit deeply nested JSON overflows the decoder's own stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def timeline(job: Job, time_of: WorkTime, name: str = "synthetic") -> Trace:
    """The recorded run of a job whose computes take `time_of`."""
    rows: list[tuple[float, ...]] = []
    for step in range(job.steps):
        with _deep_recursion():
            played = _Step(job=job, step=step, time_of=time_of).operations()
        counted: dict[tuple[Place, OpType], int] = {}
        for place, op, micro_batch, chunk, start_s, end_s in sorted(played, key=lambda r: r[4:]):
            sequence = counted[place, op] = counted.get((place, op), -1) + 1
            rank = place[1] * job.dp + place[0]
            rows.append((step, rank, op, micro_batch, chunk, sequence, start_s, end_s - start_s))
    columns = np.array(rows).T
    whole = [column.astype(np.intp) for column in columns[:6]]
    ops = OpTable(
        step=whole[0], rank=whole[1], op=whole[2], micro_batch=whole[3], model_chunk=whole[4],
        sequence=whole[5], start_s=columns[6], duration_s=columns[7],
    )  # fmt: skip
    workers = tuple(
        Worker(rank=stage * job.dp + dp, stage=stage, dp=dp)
        for stage in range(job.pp)
        for dp in range(job.dp)
    )
    return Trace(name=name, source="synthetic", workers=workers, ops=ops, compute=compute_of(ops))


def step_times(job: Job, time_of: WorkTime) -> list[float]:
    """How long each step takes."""
    with _deep_recursion():
        return [
            max(row[5] for row in _Step(job=job, step=step, time_of=time_of).operations())
            for step in range(job.steps)
        ]


def only_rows(trace: Trace, kept: np.typing.NDArray[np.bool_]) -> Trace:
    """The trace with only some of its operations: a damaged record."""
    assert trace.ops is not None
    ops = OpTable(**{name: getattr(trace.ops, name)[kept] for name in OpTable.__slots__})
    return replace(trace, ops=ops, compute=compute_of(ops))


def _transfer_type(kind: OpType, is_send: bool) -> OpType:
    if kind is OpType.FORWARD:
        return OpType.FORWARD_SEND if is_send else OpType.FORWARD_RECV
    return OpType.BACKWARD_SEND if is_send else OpType.BACKWARD_RECV
