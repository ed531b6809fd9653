"""The dependency graph of a training step: which operations wait for which, and their own times.

Operations that synchronize (the two ends of a transfer, the members of a collective) form one
*meeting*; any other operation is a meeting of its own. A meeting begins when everything its members
wait for has ended, and each member ends after its own time (Lin et al., OSDI 2025, section 3: a
collective's own time is its end minus the latest start in its group).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags, Positions
from pacekeeper.predictor.recorded.trace import OpTable, OpType, Worker

COMPUTE = (OpType.FORWARD, OpType.BACKWARD)
OPENING = (OpType.PARAMS_ALL_GATHER,)
# Operations that a worker runs once after its last compute, in the order used for ties.
CLOSING = (
    OpType.GARBAGE_COLLECTION,
    OpType.LAYERNORM_GRADS_ALL_REDUCE,
    OpType.EMBEDDING_GRADS_ALL_REDUCE,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.CLIP_GRADS,
    OpType.OPTIMIZER,
)
DP_STREAM = (OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER)
# Transfer: (kind of compute that it serves, whether it precedes it, offset of the other stage).
TRANSFERS = {
    OpType.FORWARD_SEND: (OpType.FORWARD, False, +1),
    OpType.FORWARD_RECV: (OpType.FORWARD, True, -1),
    OpType.BACKWARD_SEND: (OpType.BACKWARD, False, -1),
    OpType.BACKWARD_RECV: (OpType.BACKWARD, True, +1),
}
CLOCK_ERROR_S = 5e-4  # of start times of different operations on one worker


class CutOff(ValueError):
    """The step's record is incomplete: its dependencies cannot be determined."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGraph:
    """The operations [n] of a step with their meetings.

    `levels` hold (operations, cuts, meetings): the meetings of a level wait for these operations,
    split at `cuts`, all of which belong to earlier levels.
    """

    step: int
    rows: Positions  # of the OpTable, [n]
    meeting: Positions  # of each operation, [n]
    own_s: Array  # [n]
    num_meetings: int
    levels: tuple[tuple[Positions, Positions, Positions], ...]

    def duration_s(self, own_s: Array) -> Array:
        """Step time [k] if its operations took `own_s` [n, k]: the longest path."""
        begin_s = np.zeros((self.num_meetings, own_s.shape[1]))
        for operations, cuts, meetings in self.levels:
            ends_s = begin_s[self.meeting[operations]] + own_s[operations]
            begin_s[meetings] = np.maximum.reduceat(ends_s, cuts, axis=0)
        longest_s: Array = (begin_s[self.meeting] + own_s).max(axis=0)
        return longest_s


def step_graph(
    ops: OpTable, rows: Positions, lanes: tuple[Worker, ...], num_stages: int
) -> StepGraph:
    """Build the graph of a step.

    The order of a worker's own operations is taken as recorded, so that any schedule (1F1B,
    interleaved, unequal micro-batch counts) is replayed as it ran.

    Args:
        ops: the timeline.
        rows: the step's rows of `ops`.
        lanes: the workers.
        num_stages: of the pipeline.

    Raises:
        CutOff: the step's record is incomplete.
    """
    place = {lane.rank: lane for lane in lanes}
    kept = rows[np.isin(ops.rank[rows], list(place))]
    kept = kept[np.lexsort((ops.sequence[kept], ops.start_s[kept], ops.rank[kept]))]
    ranks, firsts = np.unique(ops.rank[kept], return_index=True)
    if len(ranks) != len(lanes):
        raise CutOff("workers are missing")
    before: list[Positions] = []
    after: list[Positions] = []
    meeting_keys: list[tuple[object, ...]] = [("alone", at) for at in range(len(kept))]
    for rank, first, end in zip(ranks, firsts, [*firsts[1:], len(kept)], strict=True):
        worker = _Timeline(ops, kept[first:end], int(first), place[int(rank)], num_stages)
        for sources, targets in worker.edges():
            before.append(sources)
            after.append(targets)
        for at, key in worker.meetings():
            meeting_keys[at] = key
    numbers: dict[tuple[object, ...], int] = {}
    meeting = np.array([numbers.setdefault(key, len(numbers)) for key in meeting_keys], np.intp)
    sizes = np.bincount(meeting)
    shared = np.array([key[0] != "alone" for key in meeting_keys])
    paired = np.array([key[0] in TRANSFERS for key in meeting_keys])
    if (sizes[meeting][paired] != 2).any():
        raise CutOff("a transfer has lost its other end")
    return StepGraph(
        step=int(ops.step[kept[0]]),
        rows=kept,
        meeting=meeting,
        own_s=_own_times(ops, kept, meeting, shared),
        num_meetings=len(numbers),
        levels=_levels(np.concatenate(before), np.concatenate(after), meeting, len(numbers)),
    )


class _Timeline:
    """The operations of one worker in one step, by start; `offset`: graph index of the first."""

    def __init__(
        self, ops: OpTable, rows: Positions, offset: int, lane: Worker, num_stages: int
    ) -> None:
        self.offset, self.lane, self.num_stages = offset, lane, num_stages
        self.op, self.chunk = ops.op[rows], np.maximum(ops.model_chunk[rows], 0)
        self.micro_batch, self.sequence = ops.micro_batch[rows], ops.sequence[rows]
        self.start_s, self.end_s = ops.start_s[rows], ops.start_s[rows] + ops.duration_s[rows]
        self.compute = np.flatnonzero(np.isin(self.op, COMPUTE))
        if not len(self.compute):
            raise CutOff("a worker has no compute")
        self.num_chunks = int(self.chunk[self.compute].max()) + 1
        self.served = {op: self._served_by(op) for op in TRANSFERS}

    def edges(self) -> Iterator[tuple[Positions, Positions]]:
        """Yield pairs of arrays: operations, and those that wait for them, as graph indices."""
        for sources, targets in self._edges():
            yield sources + self.offset, targets + self.offset

    def meetings(self) -> Iterator[tuple[int, tuple[object, ...]]]:
        """Yield the operations that meet others, with the key of their meeting."""
        for op, (_, _, way) in TRANSFERS.items():
            kind = OpType.FORWARD_SEND if op < OpType.BACKWARD_SEND else OpType.BACKWARD_SEND
            transfers, computes = self.served[op]
            place = self.chunk[computes] * self.num_stages + self.lane.stage
            batches = self.micro_batch[computes].tolist()
            for at, own, batch in zip(transfers.tolist(), place.tolist(), batches, strict=True):
                if 0 <= own + way < self.num_chunks * self.num_stages:
                    yield at + self.offset, (kind, self.lane.dp, min(own, own + way), batch)
        whole = {OpType.EMBEDDING_GRADS_ALL_REDUCE: (self.lane.dp,), OpType.CLIP_GRADS: ()}
        whole |= dict.fromkeys(DP_STREAM, (self.lane.stage,))
        for op, group in whole.items():
            for at in np.flatnonzero(self.op == op):
                yield int(at) + self.offset, ("group", op, group, int(self.sequence[at]))

    def _edges(self) -> Iterator[tuple[Positions, Positions]]:
        yield self.compute[:-1], self.compute[1:]
        dp_stream = np.flatnonzero(np.isin(self.op, DP_STREAM))
        yield dp_stream[:-1], dp_stream[1:]
        for op, (kind, is_before, _) in TRANSFERS.items():
            stream = np.flatnonzero(self.op == op)
            yield stream[:-1], stream[1:]
            transfers, computes = self.served[op]
            if not is_before:
                yield computes, transfers
                continue
            yield transfers, computes
            # Posted when the previous compute of the same kind has been launched.
            of_kind = np.flatnonzero(self.op == kind)
            order = np.searchsorted(of_kind, computes)
            yield of_kind[order[order > 0] - 1], transfers[order > 0]
        yield from self._first_backward_transfers()
        yield from self._opening()
        yield from self._closing()

    def _first_backward_transfers(self) -> Iterator[tuple[Positions, Positions]]:
        """End of the warm-up: they are posted with the result of the second-to-last forward."""
        backward = self.op[self.compute] == OpType.BACKWARD
        if not backward.any() or (first := int(backward.argmax())) < 2:
            return
        for op in (OpType.BACKWARD_RECV, OpType.BACKWARD_SEND):
            stream = self.served[op][0][:1]
            yield np.repeat(self.compute[first - 2], len(stream)), stream

    def _opening(self) -> Iterator[tuple[Positions, Positions]]:
        gathers = np.flatnonzero(np.isin(self.op, OPENING))
        for chunk in np.unique(self.chunk[gathers]):
            of_chunk = self._of(OpType.FORWARD, chunk)
            if len(of_chunk):
                yield gathers[self.chunk[gathers] == chunk][-1:], of_chunk[:1]

    def _closing(self) -> Iterator[tuple[Positions, Positions]]:
        last = self.compute[-1:]
        closing = np.flatnonzero(np.isin(self.op, CLOSING))
        # Gradients may be reduced while later backward passes still run.
        overlapped = (self.op[closing] == OpType.GRADS_REDUCE_SCATTER) & (
            self.start_s[closing] < self.start_s[last] + CLOCK_ERROR_S
        )
        for at in closing[overlapped]:
            of_chunk = self._of(OpType.BACKWARD, self.chunk[at])
            ended = of_chunk[self.start_s[of_chunk] < self.start_s[at]]
            yield ended[-1:], np.repeat(at, len(ended[-1:]))
        order = np.array([CLOSING.index(OpType(int(op))) for op in self.op[closing]])
        after = closing[~overlapped]
        after = after[np.lexsort((order[~overlapped], self.start_s[after]))]
        chain = np.concatenate([last, after])
        yield chain[:-1], chain[1:]
        if overlapped.any() and len(after):
            yield closing[overlapped][-1:], after[:1]

    def _of(self, op: OpType, chunk: int) -> Positions:
        return np.flatnonzero((self.op == op) & (self.chunk == chunk))

    def _served_by(self, op: OpType) -> tuple[Positions, Positions]:
        """Return the transfers of this type, and the compute that each of them serves.

        Recorders also list transfers that never ran: those beyond the model's ends, or before the
        first and after the last compute. The latter are left out here.

        Raises:
            CutOff: transfers are missing.
        """
        kind, is_before, way = TRANSFERS[op]
        found = np.flatnonzero(self.op == op)
        computes = np.flatnonzero(self.op == kind)
        place = self.chunk[computes] * self.num_stages + self.lane.stage + way
        needed = computes[(place >= 0) & (place < self.num_chunks * self.num_stages)]
        if len(found) > len(computes):
            if is_before:
                found = found[self.start_s[found] <= self.start_s[computes].max() + CLOCK_ERROR_S]
            else:
                found = found[self.end_s[found] >= self.end_s[computes].min() - CLOCK_ERROR_S]
        if len(found) == len(computes):
            return found, computes
        if len(found) == len(needed):
            return found, needed
        if is_before and len(found) == len(computes) - 1:
            return found, computes[1:]
        raise CutOff("transfers are missing")


def _own_times(ops: OpTable, rows: Positions, meeting: Positions, shared: Flags) -> Array:
    """Recorded times, without the waiting for operations that meet; 0 if clocks disagree."""
    start_s = ops.start_s[rows]
    latest_s = np.full(int(meeting.max()) + 1, -np.inf)
    np.maximum.at(latest_s, meeting, start_s)
    duration_s = ops.duration_s[rows]
    transfer_s = np.maximum(start_s + duration_s - latest_s[meeting], 0.0)
    return np.where(shared, transfer_s, duration_s)


def _levels(
    before: Positions, after: Positions, meeting: Positions, num_meetings: int
) -> tuple[tuple[Positions, Positions, Positions], ...]:
    """Group meetings by the length of the longest chain to them. Raises CutOff on a cycle."""
    sources, targets = meeting[before], meeting[after]
    level = np.zeros(num_meetings, dtype=np.intp)
    waiting = np.bincount(targets, minlength=num_meetings)
    order = np.argsort(sources, kind="stable")
    bounds = np.searchsorted(sources[order], np.arange(num_meetings + 1))
    ready, depth, seen = np.flatnonzero(waiting == 0), 0, 0
    while len(ready):
        level[ready] = depth
        seen, depth = seen + len(ready), depth + 1
        spans = [order[bounds[at] : bounds[at + 1]] for at in ready]
        freed = targets[np.concatenate(spans)]
        np.subtract.at(waiting, freed, 1)
        freed = np.unique(freed)
        ready = freed[waiting[freed] == 0]
    if seen < num_meetings:
        raise CutOff("operations wait for each other in a circle")
    if not len(targets):
        return ()
    order = np.lexsort((targets, level[targets]))
    edges, ends = before[order], targets[order]
    cuts = np.flatnonzero(np.diff(ends, prepend=-1))
    steps = np.flatnonzero(np.diff(level[ends[cuts]], prepend=-1))
    found = []
    for first, last in zip(steps, [*steps[1:], len(cuts)], strict=True):
        begin = int(cuts[first])
        end = int(cuts[last]) if last < len(cuts) else len(edges)
        inner = cuts[first:last]
        found.append((edges[begin:end], inner - begin, ends[inner]))
    return tuple(found)
