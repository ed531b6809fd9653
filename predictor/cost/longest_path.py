"""A step program as a graph whose longest path is the step's time: built once, priced often. Pure.

Nodes stand in an order in which each comes after all it waits for; each waits for at most two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Exchange,
    Program,
    input_of,
)
from pacekeeper.predictor.cost.features import Positions

Message = tuple[int, ChunkOp]  # the stage and the chunk whose output it carries
NO_COST = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathGraph:
    """Nodes 0..num_stages-1 are the stages' beginnings; the rest follow in topological order.

    Node i begins when `first[i]` has ended and `second[i]` has ended + lag. Costs and lags are
    positions in one array: 0 stands for nothing, then the chunk seconds, then the message seconds,
    both flattened from [kinds, stages, micro-batches, model chunks]. `last`: each stage's last
    node.
    """

    program: Program
    shape: tuple[int, int, int, int]
    first: Sequence[int]
    second: Sequence[int]
    cost_at: Positions
    lag_at: Positions
    last: Sequence[int]


def path_graph(program: Program, *, is_blocking: bool = False) -> PathGraph:
    """The graph of one data-parallel rank's program.

    Not blocking: an output travels as soon as it is there, its sender goes on (data edges and
    resource edges of ResiHP, eq. 2). Blocking: exchanges are rendezvous, as trainers with batched
    send and receive run them: a message begins when both ends are there, and both wait for its end.
    Raises ValueError for a program that can not be run to its end.
    """
    builder = _Builder(program, is_blocking=is_blocking)
    runnable = list(range(program.num_stages))
    while runnable:
        stage = runnable.pop()
        while builder.advance(stage, runnable):
            pass
    if not builder.is_done():
        raise ValueError("the program dead-locks")
    return builder.graph()


class _Builder:
    """Runs the program without a clock and writes down who waited for whom."""

    def __init__(self, program: Program, *, is_blocking: bool) -> None:
        p = program.num_stages
        self.program = program
        self.is_blocking = is_blocking
        self.shape = (len(ChunkKind), p, program.num_microbatches, program.num_model_chunks)
        self.size = int(np.prod(self.shape))
        self.first, self.second = list(range(p)), list(range(p))
        self.costs, self.lags = [NO_COST] * p, [NO_COST] * p
        self.at = [0] * p
        self.ready = [(stage, stage) for stage in range(p)]  # what the next item waits for
        self.done: list[dict[ChunkOp, int]] = [{} for _ in range(p)]
        self.waiting: dict[Message, int] = {}  # for an output: which stage
        self.posted: dict[Message, tuple[int, int]] = {}  # one end is there: its stage and node
        self.carried: dict[Message, int] = {}

    def is_done(self) -> bool:
        stages = self.program.stages
        return all(at == len(items) for at, items in zip(self.at, stages, strict=True))

    def advance(self, stage: int, runnable: list[int]) -> bool:
        """Take the stage's next item if what it waits for is known."""
        items = self.program.stages[stage]
        if self.at[stage] == len(items):
            return False
        item = items[self.at[stage]]
        if isinstance(item, Exchange):
            taken = not self.is_blocking or self._exchange(stage, item, runnable)
        else:
            taken = self._compute(stage, item, runnable)
        self.at[stage] += taken
        return taken

    def _source(self, op: ChunkOp, stage: int) -> Message | None:
        return input_of(
            op,
            stage,
            num_stages=self.program.num_stages,
            num_model_chunks=self.program.num_model_chunks,
        )

    def _compute(self, stage: int, op: ChunkOp, runnable: list[int]) -> bool:
        first, second = self.ready[stage]
        lag = NO_COST
        source = self._source(op, stage)
        if source is not None and source[0] != stage and self.is_blocking:
            if source not in self.carried:
                raise ValueError(f"stage {stage}: the input of {op} is not received before it")
        elif source is not None:
            node = self.done[source[0]].get(source[1])
            if node is None:
                self.waiting[source] = stage
                return False
            second = node
            lag = NO_COST if source[0] == stage else self._slot(*source) + self.size
        node = self._node(first, second, self._slot(stage, op), lag)
        self.done[stage][op] = node
        self.ready[stage] = (node, node)
        if (stage, op) in self.waiting:
            runnable.append(self.waiting.pop((stage, op)))
        return True

    def _exchange(self, stage: int, exchange: Exchange, runnable: list[int]) -> bool:
        """Post all messages; go on when the other end of each has posted too."""
        messages: list[Message] = [(stage, op) for op in exchange.sends]
        if any(op not in self.done[stage] for op in exchange.sends):
            raise ValueError(f"stage {stage} sends what is not computed yet: {exchange.sends}")
        for op in exchange.receives:
            source = self._source(op, stage)
            if source is None:
                raise ValueError(f"{op} of stage {stage} receives nothing")
            messages.append(source)
        here = self._joined(self.ready[stage])
        self.ready[stage] = (here, here)
        for message in messages:
            if message in self.carried:
                continue
            there, node = self.posted.setdefault(message, (stage, here))
            if there != stage:
                cost = self._slot(*message) + self.size
                self.carried[message] = self._node(node, here, cost, NO_COST)
                runnable.append(there)
        if any(message not in self.carried for message in messages):
            return False
        ends = [self.carried[message] for message in messages]
        while len(ends) > 2:
            ends[-2:] = [self._joined((ends[-2], ends[-1]))]
        self.ready[stage] = (ends[0], ends[-1])
        return True

    def _joined(self, nodes: tuple[int, int]) -> int:
        return nodes[0] if nodes[0] == nodes[1] else self._node(*nodes, NO_COST, NO_COST)

    def _slot(self, stage: int, op: ChunkOp) -> int:
        _, stages, micro_batches, chunks = self.shape
        place = (op.kind * stages + stage) * micro_batches + op.micro_batch
        return 1 + place * chunks + op.model_chunk

    def _node(self, first: int, second: int, cost_at: int, lag_at: int) -> int:
        self.first.append(first)
        self.second.append(second)
        self.costs.append(cost_at)
        self.lags.append(lag_at)
        return len(self.first) - 1

    def graph(self) -> PathGraph:
        return PathGraph(
            program=self.program,
            shape=self.shape,
            last=[self._joined(nodes) for nodes in self.ready],
            first=self.first,
            second=self.second,
            cost_at=np.array(self.costs, dtype=np.intp),
            lag_at=np.array(self.lags, dtype=np.intp),
        )
