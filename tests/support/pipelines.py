"""Dumb twins of a pipeline: a runner with blocking messages, a clock that ticks."""

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Exchange,
    Program,
    Schedule,
    StageProgram,
    input_of,
    pipeline_program,
)

Message = tuple[int, int, str]  # from stage, to stage, what


@st.composite
def programs(draw: st.DrawFn, most_stages: int = 6, most_microbatches: int = 11) -> Program:
    schedule = draw(st.sampled_from(list(Schedule)))
    interleaved = schedule is Schedule.INTERLEAVED
    return pipeline_program(
        schedule,
        num_stages=draw(st.integers(1, most_stages)),
        num_microbatches=draw(st.integers(1, most_microbatches)),
        num_model_chunks=draw(st.integers(2, 4)) if interleaved else 1,
    )


def place_in_model(program: Program, stage: int, op: ChunkOp) -> int:
    return op.model_chunk * program.num_stages + stage


def sent(program: Program, stage: int, op: ChunkOp) -> Message:
    """The message that carries an output, worked out from places in the model alone."""
    step = 1 if op.kind is ChunkKind.FORWARD else -1
    target = place_in_model(program, stage, op) + step
    assert 0 <= target < program.num_stages * program.num_model_chunks, "leaves the model"
    name = f"{op.kind} {op.micro_batch} for {target}"
    return stage, target % program.num_stages, name


def received(program: Program, stage: int, op: ChunkOp) -> Message:
    step = 1 if op.kind is ChunkKind.FORWARD else -1
    target = place_in_model(program, stage, op)
    return (target - step) % program.num_stages, stage, f"{op.kind} {op.micro_batch} for {target}"


def messages_of(program: Program, stage: int, exchange: Exchange) -> list[Message]:
    """What the stage waits for in an exchange, both directions."""
    return [sent(program, stage, op) for op in exchange.sends] + [
        received(program, stage, op) for op in exchange.receives
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
    program: Program, lasts: np.ndarray, travels: np.ndarray, *, is_blocking: bool
) -> tuple[int, dict[tuple[int, ChunkOp], int]]:
    """A clock of whole ticks: when everything has ended, and when each chunk ended.

    lasts, travels [kinds, stages, micro-batches, chunks]: whole numbers.
    """
    ends: dict[tuple[int, ChunkOp], int] = {}
    arrivals: dict[Message, int] = {}
    posts: dict[Message, set[int]] = {}
    at, busy_until = [0] * program.num_stages, [0] * program.num_stages

    def step(now: int, stage: int) -> bool:
        """Let the stage begin or leave one item; or a message arrive, which others may see."""
        items = program.stages[stage]
        if busy_until[stage] > now or at[stage] == len(items):
            return False
        item = items[at[stage]]
        if isinstance(item, ChunkOp):
            if not is_blocking and not _is_there(program, stage, item, ends, travels, now):
                return False
            place = (item.kind, stage, item.micro_batch, item.model_chunk)
            ends[stage, item] = busy_until[stage] = now + int(lasts[place])
        elif is_blocking:
            num_arrived = len(arrivals)
            for message, cost in _costs(program, stage, item, travels):
                ends_here = posts.setdefault(message, set())
                ends_here.add(stage)
                if ends_here == set(message[:2]):
                    arrivals.setdefault(message, now + cost)
            if any(arrivals.get(m, now + 1) > now for m in messages_of(program, stage, item)):
                return len(arrivals) > num_arrived
        at[stage] += 1
        return True

    for now in range(100_000):
        while any([step(now, stage) for stage in range(program.num_stages)]):
            pass
        if all(i == len(items) for i, items in zip(at, program.stages, strict=True)):
            return max(now, *busy_until), ends
    raise AssertionError("the clock ran out: dead-lock")


def _is_there(
    program: Program,
    stage: int,
    op: ChunkOp,
    ends: dict[tuple[int, ChunkOp], int],
    travels: np.ndarray,
    now: int,
) -> bool:
    source = input_of(
        op, stage, num_stages=program.num_stages, num_model_chunks=program.num_model_chunks
    )
    if source is None:
        return True
    place = (source[1].kind, source[0], source[1].micro_batch, source[1].model_chunk)
    travel = 0 if source[0] == stage else int(travels[place])
    return source in ends and ends[source] + travel <= now


def _costs(
    program: Program, stage: int, exchange: Exchange, travels: np.ndarray
) -> Iterator[tuple[Message, int]]:
    for op in exchange.sends:
        place = (op.kind, stage, op.micro_batch, op.model_chunk)
        yield sent(program, stage, op), int(travels[place])
    for op in exchange.receives:
        source = input_of(
            op, stage, num_stages=program.num_stages, num_model_chunks=program.num_model_chunks
        )
        assert source is not None
        place = (source[1].kind, source[0], source[1].micro_batch, source[1].model_chunk)
        yield received(program, stage, op), int(travels[place])
