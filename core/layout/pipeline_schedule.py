"""The step program of a pipeline as data: the order of work in each stage, and its exchanges.

The trainer runs it, the predictor prices it, and a test proves that it cannot deadlock.

Each stage alternates chunks and exchanges. An exchange is one batch of point-to-point messages that
are posted together and end when all have arrived; both ends block (a message starts when sender and
receiver are ready). Proof of progress: a dry run gives every chunk a start time; a message that is
consumed at time t lies, on both its stages, in the gap before the first chunk that starts at t or
later. A stage blocked in a gap that ends at s waits only for stages blocked in gaps that end before
s, so the earliest of them is not blocked.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import chain, zip_longest


class Schedule(StrEnum):
    """The order of chunks on a stage."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"  # 1F1B, several model chunks per stage: reported, never run here
    ZERO_BUBBLE = "zero_bubble"  # ZB-H1: weight gradients fill bubbles; memory: `num_in_flight`


RUN_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
"""The schedules that have a program."""


def parse_schedule(name: object) -> Schedule | None:
    """The schedule of this name, or None for a name that this version does not know.

    Raises:
        ValueError: `name` is not a string.
    """
    if not isinstance(name, str):
        raise ValueError(f"schedule: expected a name, got {name!r:.40}")
    return Schedule(name) if name in list(Schedule) else None


class ChunkKind(IntEnum):
    """Part of the work of a micro-batch. BACKWARD includes the weight gradient unless split off."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT_GRADIENT = 2


@dataclass(frozen=True, slots=True, order=True)
class ChunkOp:
    """One chunk to compute: a part of the work of a stage on a micro-batch."""

    kind: ChunkKind
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one stage that are posted together, each identified by a chunk of this stage.

    `sends`: chunks whose output is sent; `receives`: chunks whose input is received. Forward
    outputs go to the next stage, gradients to the previous one.
    """

    sends: tuple[ChunkOp, ...]
    receives: tuple[ChunkOp, ...]


StageProgram = tuple[ChunkOp | Exchange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The work of one pipeline in one step; `stages[s]` is in order."""

    schedule: Schedule
    num_microbatches: int
    stages: tuple[StageProgram, ...]

    @property
    def num_stages(self) -> int:
        return len(self.stages)


def pipeline_program(schedule: Schedule, *, num_stages: int, num_microbatches: int) -> Program:
    """The step program of a schedule.

    Args:
        schedule: the order of chunks, not `INTERLEAVED`.
        num_stages: pipeline stages, at least 1.
        num_microbatches: micro-batches of a step, at least 1; may be fewer than stages.

    Raises:
        ValueError: a count is below 1, or there is no program of this schedule.
    """
    for name, count in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise ValueError(f"{name}: expected at least 1, got {count}")
    orders = []
    for stage in range(num_stages):
        match schedule:
            case Schedule.ONE_F_ONE_B:
                order = _one_f_one_b(stage, num_stages, num_microbatches)
            case Schedule.ZERO_BUBBLE:
                order = _zero_bubble(stage, num_stages, num_microbatches)
            case Schedule.INTERLEAVED:
                raise ValueError(f"{schedule}: stages with several model chunks are not run")
        orders.append(order)
    return Program(
        schedule=schedule, num_microbatches=num_microbatches, stages=_with_exchanges(orders)
    )


def num_in_flight(schedule: Schedule, stage: int, *, num_stages: int, num_microbatches: int) -> int:
    """The most micro-batches whose activations a stage keeps at once.

    1F1B keeps them until the backward pass: the first stage `num_stages` of them, the last one.
    ZB-H1 keeps them until the weight gradient, which waits `stage` micro-batches: `num_stages` on
    every stage. That the weight gradient needs only a part of them is left out.
    """
    most = num_stages if schedule is Schedule.ZERO_BUBBLE else num_stages - stage
    return min(most, num_microbatches)


def input_stage(kind: ChunkKind, stage: int, *, num_stages: int) -> int | None:
    """The stage whose output of the same chunk is the input; None if the input is local.

    The last stage's backward follows its own forward, a weight gradient its own backward.
    """
    match kind:
        case ChunkKind.FORWARD if stage > 0:
            return stage - 1
        case ChunkKind.BACKWARD if stage < num_stages - 1:
            return stage + 1
        case _:
            return None


def output_stage(kind: ChunkKind, stage: int, *, num_stages: int) -> int | None:
    """The stage whose input of the same chunk is the output; None if no message carries it."""
    match kind:
        case ChunkKind.FORWARD if stage < num_stages - 1:
            return stage + 1
        case ChunkKind.BACKWARD if stage > 0:
            return stage - 1
        case _:
            return None


def _one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[ChunkOp]:
    """Narayanan et al. 2021 (PipeDream-flush): warm up, then one forward for each backward."""
    forwards = [ChunkOp(ChunkKind.FORWARD, i) for i in range(num_microbatches)]
    backwards = [ChunkOp(ChunkKind.BACKWARD, i) for i in range(num_microbatches)]
    warm_up = num_stages - stage - 1
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards[warm_up:]) :]


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> list[ChunkOp]:
    """Qi et al. 2024 (Zero Bubble), ZB-H1: 1F1B whose weight gradients wait `stage` micro-batches.

    So every stage holds num_stages micro-batches at most from forward to weight gradient.
    """
    order, num_backwards = [], 0
    for op in _one_f_one_b(stage, num_stages, num_microbatches):
        order.append(op)
        if op.kind is ChunkKind.BACKWARD:
            if num_backwards >= stage:
                order.append(ChunkOp(ChunkKind.WEIGHT_GRADIENT, num_backwards - stage))
            num_backwards += 1
    left = range(max(num_microbatches - stage, 0), num_microbatches)
    return order + [ChunkOp(ChunkKind.WEIGHT_GRADIENT, i) for i in left]


def _with_exchanges(orders: Sequence[Sequence[ChunkOp]]) -> tuple[StageProgram, ...]:
    """Chunks and exchanges of every stage. Chunks are numbered: large programs are repetition."""
    num_stages = len(orders)
    number = {op: i for i, op in enumerate(dict.fromkeys(chain.from_iterable(orders)))}
    ops = list(number)
    coded = [[number[op] for op in order] for order in orders]
    sources = [
        [input_stage(op.kind, stage, num_stages=num_stages) for op in ops]
        for stage in range(num_stages)
    ]
    starts = _dry_run(coded, sources)
    nothing: tuple[ChunkOp, ...] = ()
    sends = [[nothing] * (len(order) + 1) for order in orders]  # [stage][gap]
    receives = [[nothing] * (len(order) + 1) for order in orders]
    for stage, codes in enumerate(coded):
        for gap, code in enumerate(codes):
            other = sources[stage][code]
            if other is not None:
                sender_gap = bisect_left(starts[other], starts[stage][gap])
                receives[stage][gap] = (ops[code],)
                sends[other][sender_gap] += (ops[code],)
    programs = []
    for stage, codes in enumerate(coded):
        items: list[ChunkOp | Exchange] = []
        for code, leaving, arriving in zip_longest(codes, sends[stage], receives[stage]):
            if leaving or arriving:
                items.append(Exchange(leaving, arriving))
            if code is not None:
                items.append(ops[code])
        programs.append(tuple(items))
    return tuple(programs)


def _dry_run(
    orders: Sequence[Sequence[int]], sources: Sequence[Sequence[int | None]]
) -> list[list[int]]:
    """When each chunk of each order would start if every chunk took 1 and messages no time.

    With equal chunks neighbours keep in step: of the durations tried, blocking messages then wait
    least where backwards are longer.
    """
    ends = [[0] * len(of_stage) for of_stage in sources]
    starts: list[list[int]] = [[] for _ in orders]
    waiting: dict[tuple[int, int], int] = {}  # for a chunk's output: which stage
    runnable = list(range(len(orders)))
    while runnable:
        stage = runnable.pop()
        order, began, ended = orders[stage], starts[stage], ends[stage]
        free = began[-1] + 1 if began else 0
        while len(began) < len(order):
            code = order[len(began)]
            source = sources[stage][code]
            if source is not None:
                arrived = ends[source][code]
                if not arrived:
                    waiting[source, code] = stage
                    break
                free = max(free, arrived)
            began.append(free)
            free += 1
            ended[code] = free
            if waiting and (stage, code) in waiting:
                runnable.append(waiting.pop((stage, code)))
    assert all(len(s) == len(o) for s, o in zip(starts, orders, strict=True)), "orders progress"
    return starts


LETTERS = {ChunkKind.FORWARD: "F", ChunkKind.BACKWARD: "B", ChunkKind.WEIGHT_GRADIENT: "W"}


def format_program(program: Program) -> tuple[str, ...]:
    """The program as text: one line per stage, in the order of execution."""
    return tuple(" ".join(map(_item, stage)) for stage in program.stages)


def _item(item: ChunkOp | Exchange) -> str:
    match item:
        case ChunkOp():
            return _chunk(item)
        case Exchange():
            sends = [f">{_chunk(op)}" for op in item.sends]
            receives = [f"<{_chunk(op)}" for op in item.receives]
            return f"[{' '.join((*sends, *receives))}]"


def _chunk(op: ChunkOp) -> str:
    return f"{LETTERS[op.kind]}{op.micro_batch}"
