"""The longest path: closed forms, a ticking clock as its twin, and what must hold for any times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import (
    ChunkKind,
    ChunkOp,
    Exchange,
    Program,
    Schedule,
    pipeline_program,
)
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.longest_path import path_graph
from pacekeeper.predictor.cost.pipeline_time import (
    Collective,
    StepPrice,
    critical_path,
    gradient_sync,
)
from support.pipelines import computed, programs, tick

blocking = st.booleans()


def shape_of(program: Program) -> tuple[int, int, int, int]:
    return (3, program.num_stages, program.num_microbatches, program.num_model_chunks)


def each(forward_s: float, backward_s: float, weight_s: float = 0.0) -> Array:
    return np.array([forward_s, backward_s, weight_s]).reshape(3, 1, 1, 1)


def drawn(program: Program, seed: int, most: int = 4) -> tuple[Array, Array]:
    """Whole ticks for every chunk and message, some of them 0."""
    random = np.random.default_rng(seed)
    shape = shape_of(program)
    lasts, travels = random.integers(0, most + 1, shape), random.integers(0, most + 1, shape)
    return lasts.astype(np.float64), travels.astype(np.float64)


def price_of(
    program: Program, chunk_s: Array, transfer_s: Array | float = 0.0, *, is_blocking: bool = False
) -> StepPrice:
    graph = path_graph(program, is_blocking=is_blocking)
    messages = transfer_s if isinstance(transfer_s, float) else [transfer_s]
    return critical_path([graph], chunk_s=[chunk_s], transfer_s=messages)


@given(st.integers(1, 7), st.integers(1, 12), blocking)
def test_equal_one_f_one_b_takes_m_plus_p_minus_1_rounds(p: int, m: int, wait: bool) -> None:
    """Narayanan et al. 2021: (m + p - 1)(f + b); bubble share (p - 1) / (m + p - 1)."""
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=p, num_microbatches=m)
    price = price_of(program, each(1.0, 2.0), is_blocking=wait)
    assert price.step_s == (m + p - 1) * 3.0
    np.testing.assert_allclose(price.bubble_share, (p - 1) / (m + p - 1))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_interleaving_divides_the_bubble_by_the_model_chunks(p: int, groups: int, v: int) -> None:
    """Narayanan et al. 2021, 2.2: with whole groups, m v + p - 1 rounds of a chunk's f + b."""
    m = groups * p
    program = pipeline_program(
        Schedule.INTERLEAVED, num_stages=p, num_microbatches=m, num_model_chunks=v
    )
    price = price_of(program, each(1.0, 2.0))
    assert price.step_s == (m * v + p - 1) * 3.0
    np.testing.assert_allclose(price.bubble_share, (p - 1) / (m * v + p - 1))


@given(st.integers(1, 7), st.integers(0, 8), st.sampled_from([0.0, 0.125, 0.25]))
def test_zero_bubble_leaves_f_plus_b_minus_w_per_stage(p: int, extra: int, more: float) -> None:
    """Qi et al. 2024, ZB-H1: bubble (p - 1)(f + b - w), against (p - 1)(f + b + w) of 1F1B."""
    m = p + extra
    forward_s, backward_s, weight_s = 1.0, 1.0 + more, 1.0 - more
    program = pipeline_program(Schedule.ZERO_BUBBLE, num_stages=p, num_microbatches=m)
    price = price_of(program, each(forward_s, backward_s, weight_s))
    bubble_s = (p - 1) * (forward_s + backward_s - weight_s)
    assert price.step_s == m * (forward_s + backward_s + weight_s) + bubble_s


@settings(deadline=None)
@given(programs(most_stages=4, most_microbatches=5), st.integers(0, 999), blocking)
def test_the_price_is_what_a_ticking_clock_shows(program: Program, seed: int, wait: bool) -> None:
    lasts, travels = drawn(program, seed)
    price = price_of(program, lasts, travels, is_blocking=wait)
    ended, ends = tick(program, lasts, travels, is_blocking=wait)
    assert price.step_s == ended
    shown = {
        (stage, op): price.chunk_end_s[0][op.kind, stage, op.micro_batch, op.model_chunk]
        for stage, items in enumerate(program.stages)
        for op in computed(items)
    }
    assert shown == ends


@settings(deadline=None)
@given(programs(), st.integers(0, 999), blocking)
def test_the_path_has_no_gap_and_its_parts_are_real(
    program: Program, seed: int, wait: bool
) -> None:
    lasts, travels = drawn(program, seed)
    price = price_of(program, lasts, travels, is_blocking=wait)
    at_s = 0.0
    for part in price.path:
        assert part.start_s == at_s
        at_s = part.end_s
        assert part.op is not None
        place = (part.op.kind, part.stage, part.op.micro_batch, part.op.model_chunk)
        real = travels if part.name == "transfer" else lasts
        assert part.end_s - part.start_s == real[place]
        if part.name != "transfer":
            assert price.chunk_start_s[0][place] == part.start_s
    assert at_s == price.step_s


@settings(deadline=None)
@given(programs(), st.integers(0, 999), st.integers(0, 10**6), blocking)
def test_a_longer_chunk_never_shortens_a_step_and_on_the_path_counts_in_full(
    program: Program, seed: int, pick: int, wait: bool
) -> None:
    lasts, travels = drawn(program, seed)
    price = price_of(program, lasts, travels, is_blocking=wait)
    work = [(stage, op) for stage, items in enumerate(program.stages) for op in computed(items)]
    stage, op = work[pick % len(work)]
    longer = lasts.copy()
    longer[op.kind, stage, op.micro_batch, op.model_chunk] += 5.0
    after = price_of(program, longer, travels, is_blocking=wait).step_s
    on_path = {(part.stage, part.op) for part in price.path if part.name != "transfer"}
    assert price.step_s <= after <= price.step_s + 5.0
    if (stage, op) in on_path:
        assert after == price.step_s + 5.0


@settings(deadline=None)
@given(programs(), st.integers(0, 999))
def test_waiting_for_the_other_end_costs_and_never_gains(program: Program, seed: int) -> None:
    lasts, travels = drawn(program, seed)
    free = price_of(program, lasts, travels, is_blocking=False)
    assert free.step_s <= price_of(program, lasts, travels, is_blocking=True).step_s


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=3),
    st.integers(0, 999),
)
def test_data_parallel_ranks_meet_once_at_the_end(
    num_stages: int, counts: list[int], seed: int
) -> None:
    """Each stage's sync begins with its last rank; ranks may differ in micro-batches."""
    family = [
        pipeline_program(Schedule.ONE_F_ONE_B, num_stages=num_stages, num_microbatches=count)
        for count in counts
    ]
    times = [drawn(program, seed + i)[0] for i, program in enumerate(family)]
    sync_s = [float(stage + 1) for stage in range(num_stages)]
    price = critical_path(
        [path_graph(program) for program in family],
        chunk_s=times,
        after=gradient_sync(len(counts), sync_s),
    )
    alone = [price_of(program, own) for program, own in zip(family, times, strict=True)]
    last_backwards = np.array([np.nanmax(one.chunk_end_s[0], axis=(0, 2, 3)) for one in alone])
    assert price.step_s == (last_backwards.max(axis=0) + sync_s).max()
    assert price.path[-1].name == "gradient_sync"
    busy = np.array([own[:2].sum(axis=(0, 2, 3)) for own in times])
    np.testing.assert_allclose(price.bubble_share, 1.0 - busy / price.step_s)
    parts = sum(part.end_s - part.start_s for part in price.path if part.op is not None)
    assert price.path_share.sum() == pytest.approx(parts / price.step_s)


def test_a_slow_stage_is_where_the_path_stays() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=4, num_microbatches=20)
    chunk_s = np.broadcast_to(each(1.0, 2.0), shape_of(program)).copy()
    chunk_s[:, 2] *= 1.5
    price = price_of(program, chunk_s, 0.1)
    assert price.path_share[0].argmax() == 2 and price.path_share[0, 2] > 0.8
    assert price.bubble_share[0].argmin() == 2
    names = {part.name for part in price.path}
    assert names == {"forward", "backward", "transfer"}


def test_collectives_join_only_their_workers_in_their_order() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=2, num_microbatches=1)
    price = critical_path(
        [path_graph(program)],
        chunk_s=[each(1.0, 1.0)],
        before=[Collective(name="load", workers=((0, 0),), duration_s=2.0)],
        after=[
            Collective(name="sync", workers=((0, 1),), duration_s=7.0),
            Collective(name="clip", workers=((0, 0), (0, 1)), duration_s=0.5),
        ],
    )
    # load 0-2, F0 2-3, F1 3-4, B1 4-5, sync 5-12 beside B0 5-6, clip 12-12.5
    names = [(part.name, part.stage, part.start_s, part.end_s) for part in price.path]
    assert names == [
        ("load", 0, 0.0, 2.0),
        ("forward", 0, 2.0, 3.0),
        ("transfer", 0, 3.0, 3.0),
        ("forward", 1, 3.0, 4.0),
        ("backward", 1, 4.0, 5.0),
        ("sync", 1, 5.0, 12.0),
        ("clip", 1, 12.0, 12.5),
    ]
    assert price.step_s == 12.5
    assert np.isnan(price.chunk_end_s[0][ChunkKind.WEIGHT_GRADIENT]).all()


def test_what_can_not_be_priced_is_refused() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=2, num_microbatches=3)
    graph = path_graph(program)
    with pytest.raises(ValueError, match="finite and not below 0"):
        critical_path([graph], chunk_s=[each(1.0, -1.0)])
    with pytest.raises(ValueError, match="finite and not below 0"):
        critical_path([graph], chunk_s=[each(1.0, 1.0)], transfer_s=float("nan"))
    with pytest.raises(ValueError, match="do not fit"):
        critical_path([graph], chunk_s=[np.ones((3, 5, 3, 1))])
    with pytest.raises(ValueError, match="expected chunk seconds for 1 ranks, got 2"):
        critical_path([graph], chunk_s=[each(1.0, 1.0)] * 2)
    with pytest.raises(ValueError, match=r"sync: there is no worker \[\(0, 2\)\]"):
        stray = Collective(name="sync", workers=((0, 2),), duration_s=1.0)
        critical_path([graph], chunk_s=[each(1.0, 1.0)], after=[stray])
    with pytest.raises(ValueError, match="equally many stages"):
        critical_path([], chunk_s=[])
    with pytest.raises(ValueError, match="a time of 0 or more"):
        Collective(name="x", workers=((0, 0),), duration_s=-1.0)


def test_programs_that_can_not_run_are_refused() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=2, num_microbatches=2)
    first, second = program.stages
    swapped = Program(
        schedule=program.schedule,
        num_microbatches=2,
        num_model_chunks=1,
        stages=(first, second[1:] + second[:1]),
    )
    with pytest.raises(ValueError, match="not received before it"):
        path_graph(swapped, is_blocking=True)
    backwards_first = Program(
        schedule=program.schedule,
        num_microbatches=2,
        num_model_chunks=1,
        stages=(tuple(reversed(first)), second),
    )
    with pytest.raises(ValueError, match="dead-locks"):
        path_graph(backwards_first)
    too_soon = Program(
        schedule=program.schedule,
        num_microbatches=2,
        num_model_chunks=1,
        stages=((first[1], first[0], *first[2:]), second),
    )
    with pytest.raises(ValueError, match="sends what is not computed yet"):
        path_graph(too_soon, is_blocking=True)


@pytest.mark.parametrize("slowest", [0, 1, 2])
def test_an_exchange_ends_with_its_last_message(slowest: int) -> None:
    """Three micro-batches sent as one batch each way: a program nobody generates, priced as is."""
    forwards = tuple(ChunkOp(ChunkKind.FORWARD, i) for i in range(3))
    backwards = tuple(ChunkOp(ChunkKind.BACKWARD, i) for i in range(3))
    program = Program(
        schedule=Schedule.ONE_F_ONE_B,
        num_microbatches=3,
        num_model_chunks=1,
        stages=(
            (*forwards, Exchange(forwards, ()), Exchange((), backwards), *backwards),
            (Exchange((), forwards), *forwards, *backwards, Exchange(backwards, ())),
        ),
    )
    transfer_s = np.zeros(shape_of(program))
    transfer_s[0, 0, slowest] = 5.0
    price = price_of(program, each(1.0, 2.0), transfer_s, is_blocking=True)
    assert price.step_s == 3.0 + 5.0 + 9.0 + 6.0
