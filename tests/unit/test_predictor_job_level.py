"""What is said of a whole job at the edges of what can be known."""

import numpy as np
import pytest

from pacekeeper.predictor.job_level import MIN_STEPS, job_faults, judge_job
from pacekeeper.predictor.trace import Trace
from support.step_times import job, slowed

FLAT_S = np.full(1000, 0.06)


def replicates(num: int = 3) -> list[Trace]:
    return [job(FLAT_S, seed=1 + i) for i in range(num)]


def test_a_job_without_step_times_is_not_judged() -> None:
    nothing = Trace(name="", source="", workers=())
    few = job(np.full(MIN_STEPS, 0.06))
    for trace in (nothing, few):
        assert judge_job(trace).notes == ("too few step times to judge the job",)
        assert judge_job(trace, replicates=replicates()).troubles == ()


def test_a_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 classes for 1000 steps"):
        job_faults(job(FLAT_S), schedule=np.zeros(3, dtype=np.intp))


def test_a_run_slower_throughout_is_told_and_not_accused() -> None:
    verdict = judge_job(job(FLAT_S * 1.2), replicates=replicates())
    assert verdict.troubles == ()
    assert "slow from the start: x1.20" in verdict.notes[0]
    assert judge_job(job(FLAT_S * 1.02), replicates=replicates()).notes == ()


def test_a_hiccup_is_no_persistent_slowdown() -> None:
    pace_s = slowed(FLAT_S, 500, 500 + MIN_STEPS // 2, 1.5)
    assert job_faults(job(pace_s), replicates=replicates()) == ()


def test_single_stalls_accuse_nobody() -> None:
    pace_s = FLAT_S.copy()
    pace_s[::25] *= 20.0
    assert job_faults(job(pace_s), replicates=replicates()) == ()
    assert job_faults(job(pace_s)) == ()


def test_a_slow_replicate_does_not_hide_a_fault_nor_make_one() -> None:
    beside = [*replicates(2), job(slowed(FLAT_S, 300, 600, 1.3), seed=9)]
    assert job_faults(job(FLAT_S), replicates=beside) == ()
    (found,) = job_faults(job(slowed(FLAT_S, 400, 500, 1.1)), replicates=beside)
    assert abs(found.first_step - 400) <= 5


def test_replicates_that_ended_early_are_left_out_and_told() -> None:
    verdict = judge_job(job(FLAT_S), replicates=[job(FLAT_S[:100])])
    assert verdict.notes[0] == "1 replicates share too few steps"


def test_a_pace_that_comes_again_is_work_where_nothing_is_known() -> None:
    """Two phases of the same height, as a recipe with two kinds of data would have."""
    pace_s = slowed(slowed(FLAT_S, 200, 350, 1.3), 600, 750, 1.3)
    verdict = judge_job(job(pace_s))
    assert verdict.troubles == ()
    assert any("workload unknown" in note for note in verdict.notes)


def test_steps_in_any_order_or_told_twice_say_the_same() -> None:
    trace = job(slowed(FLAT_S, 400, 500, 1.1))
    (told,) = job_faults(trace, replicates=replicates())
    steps = trace.steps
    assert steps is not None
    mixed = np.concatenate([np.random.default_rng(0).permutation(steps.step.size), [3, 4]])
    for column in ("step", "duration_s", "tokens", "sum_len_squared"):
        object.__setattr__(steps, column, getattr(steps, column)[mixed])
    (same,) = job_faults(trace, replicates=replicates())
    assert same == told


def test_a_job_that_settles_is_told_and_not_accused() -> None:
    trace = job(slowed(FLAT_S, 0, 60, 1.5))
    verdict = judge_job(trace, schedule=np.zeros(1000, dtype=np.intp))
    assert verdict.troubles == ()
    assert "slower from the start to step" in verdict.notes[0]
    (found,) = job_faults(trace, replicates=replicates())  # others did not have to settle
    assert found.first_step == 0
