"""Step programs of any size: they end, compute all once and in order, and keep their memory."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Exchange,
    Program,
    Schedule,
    pipeline_program,
)
from support.pipelines import computed, programs, received, run_blocking, sent

KIND = {ChunkKind.FORWARD: "F", ChunkKind.BACKWARD: "B", ChunkKind.WEIGHT_GRADIENT: "W"}


def work_of(program: Program) -> Counter[tuple[int, ChunkOp]]:
    return Counter(
        (stage, op) for stage, items in enumerate(program.stages) for op in computed(items)
    )


@given(programs())
def test_with_blocking_messages_every_program_runs_to_its_end(program: Program) -> None:
    assert Counter(run_blocking(program)) == work_of(program)


@given(programs())
def test_every_micro_batch_passes_every_stage_once_each_way(program: Program) -> None:
    is_split = program.schedule is Schedule.ZERO_BUBBLE
    kinds = list(ChunkKind) if is_split else [ChunkKind.FORWARD, ChunkKind.BACKWARD]
    assert work_of(program) == Counter(
        (stage, ChunkOp(kind, micro_batch))
        for stage in range(program.num_stages)
        for kind in kinds
        for micro_batch in range(program.num_microbatches)
    )


@given(programs())
def test_forward_goes_up_the_model_backward_down_and_weight_gradients_last(
    program: Program,
) -> None:
    happened = {(stage, op): i for i, (stage, op) in enumerate(run_blocking(program))}
    top = program.num_stages - 1
    when = {(op.kind, op.micro_batch, stage): i for (stage, op), i in happened.items()}
    for (kind, micro_batch, place), i in when.items():
        if kind is ChunkKind.FORWARD and place > 0:
            assert when[kind, micro_batch, place - 1] < i
        if kind is ChunkKind.BACKWARD:
            assert when[ChunkKind.FORWARD, micro_batch, place] < i
            assert place == top or when[kind, micro_batch, place + 1] < i
        if kind is ChunkKind.WEIGHT_GRADIENT:
            assert when[ChunkKind.BACKWARD, micro_batch, place] < i


@given(programs())
def test_every_send_has_its_receive_and_no_more(program: Program) -> None:
    exchanges = [
        (stage, item)
        for stage, items in enumerate(program.stages)
        for item in items
        if isinstance(item, Exchange)
    ]
    sends = Counter(sent(program, s, op) for s, e in exchanges for op in e.sends)
    receives = Counter(received(s, op) for s, e in exchanges for op in e.receives)
    assert sends == receives
    hops = program.num_stages - 1
    assert sum(sends.values()) == len(sends) == 2 * hops * program.num_microbatches
    assert all(source != target for source, target, _ in sends)


@given(programs())
def test_activations_in_flight_stay_within_the_bound_of_the_schedule(program: Program) -> None:
    num_stages, num_microbatches = program.num_stages, program.num_microbatches
    for stage, items in enumerate(program.stages):
        for_backward = most_kept(items, ChunkKind.BACKWARD)
        assert for_backward == min(num_stages - stage, num_microbatches)
        if program.schedule is Schedule.ZERO_BUBBLE:
            # Qi et al.: all stages as many as the first stage of 1F1B.
            kept = most_kept(items, ChunkKind.WEIGHT_GRADIENT)
            assert kept == min(num_stages, num_microbatches)


def most_kept(items: tuple[ChunkOp | Exchange, ...], until: ChunkKind) -> int:
    kept = most = 0
    for op in items:
        if isinstance(op, ChunkOp):
            kept += (op.kind is ChunkKind.FORWARD) - (op.kind is until)
            most = max(most, kept)
    return most


@given(st.integers(2, 6), st.integers(1, 8))
def test_messages_one_by_one_instead_of_together_would_dead_lock(
    num_stages: int, extra: int
) -> None:
    """The runner can tell: with sends first, both ends of a link wait for each other."""
    program = pipeline_program(
        Schedule.ONE_F_ONE_B, num_stages=num_stages, num_microbatches=num_stages + extra
    )
    apart = tuple(
        tuple(
            part
            for item in items
            for part in (
                [Exchange(item.sends, ()), Exchange((), item.receives)]
                if isinstance(item, Exchange)
                else [item]
            )
        )
        for items in program.stages
    )
    assert len(run_blocking(replace(program, stages=apart))) < work_of(program).total()


def written(program: Program) -> list[str]:
    lines = []
    for items in program.stages:
        words = []
        for item in items:
            if isinstance(item, Exchange):
                words += [f">{KIND[op.kind]}{op.micro_batch}" for op in item.sends]
                words += [f"<{KIND[op.kind]}{op.micro_batch}" for op in item.receives]
            else:
                words.append(f"{KIND[item.kind]}{item.micro_batch}")
        lines.append(" ".join(words))
    return lines


def test_one_f_one_b_is_what_trainers_run() -> None:
    """The order recorded in production traces of 1F1B with fused sends and receives."""
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=3, num_microbatches=4)
    assert written(program) == [
        "F0 >F0 F1 >F1 F2 >F2 <B0 B0 F3 >F3 <B1 B1 <B2 B2 <B3 B3",
        "<F0 F0 >F0 <F1 F1 >F1 <B0 B0 >B0 <F2 F2 >F2 <B1 B1 >B1 <F3 F3 >F3 <B2 B2 >B2 <B3 B3 >B3",
        "<F0 F0 B0 >B0 <F1 F1 B1 >B1 <F2 F2 B2 >B2 <F3 F3 B3 >B3",
    ]


def test_zero_bubble_delays_weight_gradients_by_the_stage() -> None:
    program = pipeline_program(Schedule.ZERO_BUBBLE, num_stages=2, num_microbatches=3)
    assert [[f"{KIND[op.kind]}{op.micro_batch}" for op in computed(s)] for s in program.stages] == [
        ["F0", "F1", "B0", "W0", "F2", "B1", "W1", "B2", "W2"],
        ["F0", "B0", "F1", "B1", "W0", "F2", "B2", "W1", "W2"],
    ]


@pytest.mark.parametrize(
    ("schedule", "sizes", "key"),
    [
        (Schedule.ONE_F_ONE_B, (0, 1), "num_stages"),
        (Schedule.ONE_F_ONE_B, (1, 0), "num_microbatches"),
        (Schedule.INTERLEAVED, (2, 2), "interleaved"),
    ],
)
def test_sizes_that_make_no_program_are_refused(
    schedule: Schedule, sizes: tuple[int, int], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        pipeline_program(schedule, num_stages=sizes[0], num_microbatches=sizes[1])
