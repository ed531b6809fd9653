"""Dumb twins of a pipeline: a runner with blocking messages, a clock that ticks."""

import numpy as np
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Exchange,
    Program,
    Schedule,
    StageProgram,
    pipeline_program,
)

Message = tuple[int, int, str]  # from stage, to stage, what


@st.composite
def programs(draw: st.DrawFn, most_stages: int = 6, most_microbatches: int = 11) -> Program:
    return pipeline_program(
        draw(st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])),
        num_stages=draw(st.integers(1, most_stages)),
        num_microbatches=draw(st.integers(1, most_microbatches)),
    )


def sent(program: Program, stage: int, op: ChunkOp) -> Message:
    """The message that carries an output."""
    target = stage + (1 if op.kind is ChunkKind.FORWARD else -1)
    assert 0 <= target < program.num_stages, "leaves the model"
    return stage, target, f"{op.kind} {op.micro_batch}"


def received(stage: int, op: ChunkOp) -> Message:
    source = stage - (1 if op.kind is ChunkKind.FORWARD else -1)
    return source, stage, f"{op.kind} {op.micro_batch}"


def messages_of(program: Program, stage: int, exchange: Exchange) -> list[Message]:
    """What the stage waits for in an exchange, both directions."""
    return [sent(program, stage, op) for op in exchange.sends] + [
        received(stage, op) for op in exchange.receives
    ]


def computed(stage: StageProgram) -> list[ChunkOp]:
    return [item for item in stage if isinstance(item, ChunkOp)]


def run_blocking(program: Program) -> list[tuple[int, ChunkOp]]:
    """Run with rendezvous messages until nothing moves; what was computed, in an order that was
    possible. An exchange holds its stage until every partner is at the exchange with its end.
    """
    at = [0] * program.num_stages
    happened: list[tuple[int, ChunkOp]] = []
    gone: set[tuple[int, Message]] = set()  # messages this stage is through with
    moved = True
    while moved:
        moved = False
        offered = {
            (stage, message)
            for stage, items in enumerate(program.stages)
            if at[stage] < len(items) and isinstance(item := items[at[stage]], Exchange)
            for message in messages_of(program, stage, item)
        }
        gone |= {
            (stage, message)
            for stage, message in offered
            if all((end, message) in offered | gone for end in message[:2])
        }
        for stage, items in enumerate(program.stages):
            if at[stage] == len(items):
                continue
            item = items[at[stage]]
            if isinstance(item, ChunkOp):
                happened.append((stage, item))
            elif any((stage, m) not in gone for m in messages_of(program, stage, item)):
                continue
            at[stage] += 1
            moved = True
    return happened


def tick(
    program: Program, lasts: np.ndarray, travels: np.ndarray
) -> dict[tuple[int, ChunkOp], int]:
    """A clock of whole ticks: when each chunk ended. Messages travel while their sender goes on.

    lasts, travels [kinds, stages, micro-batches]: whole numbers.
    """
    orders = [computed(items) for items in program.stages]
    ends: dict[tuple[int, ChunkOp], int] = {}
    at, busy_until = [0] * program.num_stages, [0] * program.num_stages

    def step(now: int, stage: int) -> bool:
        """Let the stage begin a chunk."""
        if busy_until[stage] > now or at[stage] == len(orders[stage]):
            return False
        op = orders[stage][at[stage]]
        source = stage - {ChunkKind.FORWARD: 1, ChunkKind.BACKWARD: -1}.get(op.kind, 0)
        if source != stage and 0 <= source < program.num_stages:
            travel = int(travels[op.kind, source, op.micro_batch])
            if (source, op) not in ends or ends[source, op] + travel > now:
                return False
        ends[stage, op] = busy_until[stage] = now + int(lasts[op.kind, stage, op.micro_batch])
        at[stage] += 1
        return True

    for now in range(100_000):
        while any([step(now, stage) for stage in range(program.num_stages)]):
            pass
        if all(i == len(order) for i, order in zip(at, orders, strict=True)):
            return ends
    raise AssertionError("the clock ran out: deadlock")
