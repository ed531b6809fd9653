"""The longest path: closed forms, a ticking clock as its twin, and what must hold for any times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.layout.pipeline_schedule import Program, Schedule, pipeline_program
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.cost.longest_path import path_graph, stage_ends
from support.pipelines import computed, programs, tick


def shape_of(program: Program) -> tuple[int, int, int]:
    return (3, program.num_stages, program.num_microbatches)


def each(program: Program, forward_s: float, backward_s: float, weight_s: float = 0.0) -> Array:
    chunk_s = np.array([forward_s, backward_s, weight_s]).reshape(3, 1, 1)
    return np.broadcast_to(chunk_s, shape_of(program))


def drawn(program: Program, seed: int, most: int = 4) -> tuple[Array, Array]:
    """Whole ticks for every chunk and message, some of them 0."""
    random = np.random.default_rng(seed)
    shape = shape_of(program)
    lasts, travels = random.integers(0, most + 1, shape), random.integers(0, most + 1, shape)
    return lasts.astype(np.float64), travels.astype(np.float64)


def ends_of(program: Program, chunk_s: Array, message_s: Array | None = None) -> Array:
    messages = np.zeros(shape_of(program)) if message_s is None else message_s
    return stage_ends(path_graph(program), chunk_s=chunk_s, message_s=messages)


@given(st.integers(1, 7), st.integers(1, 12))
def test_equal_one_f_one_b_takes_m_plus_p_minus_1_rounds(p: int, m: int) -> None:
    """Narayanan et al. 2021: (m + p - 1)(f + b); each stage ends one backward after the next."""
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=p, num_microbatches=m)
    ends = ends_of(program, each(program, 1.0, 2.0))
    assert ends.tolist() == [(m + p - 1) * 3.0 - 2.0 * stage for stage in range(p)]


@given(st.integers(1, 7), st.integers(0, 8), st.sampled_from([0.0, 0.125, 0.25]))
def test_zero_bubble_leaves_f_plus_b_minus_w_per_stage(p: int, extra: int, more: float) -> None:
    """Qi et al. 2024, ZB-H1: bubble (p - 1)(f + b - w), against (p - 1)(f + b + w) of 1F1B."""
    m = p + extra
    forward_s, backward_s, weight_s = 1.0, 1.0 + more, 1.0 - more
    program = pipeline_program(Schedule.ZERO_BUBBLE, num_stages=p, num_microbatches=m)
    ends = ends_of(program, each(program, forward_s, backward_s, weight_s))
    bubble_s = (p - 1) * (forward_s + backward_s - weight_s)
    assert ends.max() == m * (forward_s + backward_s + weight_s) + bubble_s


@settings(deadline=None)
@given(programs(most_stages=4, most_microbatches=5), st.integers(0, 999))
def test_the_price_is_what_a_ticking_clock_shows(program: Program, seed: int) -> None:
    lasts, travels = drawn(program, seed)
    shown = tick(program, lasts, travels)
    assert ends_of(program, lasts, travels).tolist() == [
        max(shown[stage, op] for op in computed(items))
        for stage, items in enumerate(program.stages)
    ]


@settings(deadline=None)
@given(programs(), st.integers(0, 999), st.integers(0, 10**6))
def test_a_longer_chunk_never_shortens_a_step(program: Program, seed: int, pick: int) -> None:
    lasts, travels = drawn(program, seed)
    before = ends_of(program, lasts, travels)
    work = [(stage, op) for stage, items in enumerate(program.stages) for op in computed(items)]
    stage, op = work[pick % len(work)]
    longer = lasts.copy()
    longer[op.kind, stage, op.micro_batch] += 5.0
    after = ends_of(program, longer, travels)
    assert (before <= after).all() and (after <= before + 5.0).all()
    own = [longer[done.kind, stage, done.micro_batch] for s, done in work if s == stage]
    assert after[stage] >= sum(own)


def test_what_can_not_be_priced_is_refused() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=2, num_microbatches=3)
    fine = each(program, 1.0, 1.0)
    with pytest.raises(ValueError, match="finite"):
        ends_of(program, each(program, 1.0, -1.0))
    with pytest.raises(ValueError, match="finite"):
        ends_of(program, fine, fine * float("nan"))
    with pytest.raises(ValueError, match="shape"):
        ends_of(program, np.ones((3, 5, 3)))
    with pytest.raises(ValueError, match="shape"):
        ends_of(program, fine, np.ones((3, 2, 2)))


def test_programs_that_can_not_run_are_refused() -> None:
    program = pipeline_program(Schedule.ONE_F_ONE_B, num_stages=2, num_microbatches=2)
    first, second = program.stages
    backwards_first = Program(
        schedule=program.schedule,
        num_microbatches=2,
        stages=(tuple(reversed(first)), second),
    )
    with pytest.raises(ValueError, match="deadlock"):
        path_graph(backwards_first)
