"""What is said of a whole job at the edges of what can be known."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.job_level.blocks import (
    Knowledge,
    block_size,
    blocks_of,
)
from pacekeeper.predictor.job_level.detect import (
    MIN_STEPS,
    judge_job,
    measured,
    min_sigmas,
)
from pacekeeper.predictor.job_level.step_time_model import unknown, usable_steps
from pacekeeper.predictor.recorded.trace import Trace
from support.step_times import job, slowed, with_work

FLAT_S = np.full(1000, 0.06)


def replicates(num: int = 3) -> list[Trace]:
    return [job(FLAT_S, seed=1 + i) for i in range(num)]


def test_a_job_without_step_times_is_not_judged() -> None:
    nothing = Trace(name="", source="", workers=())
    few = job(np.full(MIN_STEPS, 0.06))
    for trace in (nothing, few):
        assert judge_job(trace).notes == ("too few step times to judge the job",)
        assert judge_job(trace, replicates=replicates()).anomalies == ()


def test_a_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 classes for 1000 steps"):
        judge_job(job(FLAT_S), schedule=np.zeros(3, dtype=np.intp))


def test_a_run_slower_throughout_is_told_and_not_accused() -> None:
    verdict = judge_job(job(FLAT_S * 1.2), replicates=replicates())
    assert verdict.anomalies == ()
    assert "slow from the start: x1.20" in verdict.notes[0]
    assert judge_job(job(FLAT_S * 1.02), replicates=replicates()).notes == ()


def test_a_hiccup_is_no_persistent_slowdown() -> None:
    pace_s = slowed(FLAT_S, 500, 500 + MIN_STEPS // 2, 1.5)
    assert judge_job(job(pace_s), replicates=replicates()).anomalies == ()


def test_single_stalls_accuse_nobody() -> None:
    pace_s = FLAT_S.copy()
    pace_s[::25] *= 20.0
    assert judge_job(job(pace_s), replicates=replicates()).anomalies == ()
    assert judge_job(job(pace_s)).anomalies == ()


def test_a_slow_replicate_does_not_hide_a_fault_nor_make_one() -> None:
    beside = [*replicates(2), job(slowed(FLAT_S, 300, 600, 1.3), seed=9)]
    assert judge_job(job(FLAT_S), replicates=beside).anomalies == ()
    (found,) = judge_job(job(slowed(FLAT_S, 400, 500, 1.1)), replicates=beside).anomalies
    assert abs(found.first_step - 400) <= 5


def test_replicates_that_ended_early_are_left_out_and_told() -> None:
    verdict = judge_job(job(FLAT_S), replicates=[job(FLAT_S[:100])])
    assert verdict.notes[0] == "1 replicates share too few steps: left out"


def test_a_pace_that_comes_again_is_work_where_nothing_is_known() -> None:
    """Two phases of the same height, as a recipe with two kinds of data would have."""
    pace_s = slowed(slowed(FLAT_S, 200, 350, 1.3), 600, 750, 1.3)
    verdict = judge_job(job(pace_s))
    assert verdict.anomalies == ()
    assert any("workload unknown" in note for note in verdict.notes)


def test_steps_in_any_order_or_told_twice_say_the_same() -> None:
    trace = job(slowed(FLAT_S, 400, 500, 1.1))
    (told,) = judge_job(trace, replicates=replicates()).anomalies
    steps = trace.steps
    assert steps is not None
    mixed = np.concatenate([np.random.default_rng(0).permutation(steps.step.size), [3, 4]])
    for column in ("step", "duration_s", "tokens", "sum_len_squared"):
        object.__setattr__(steps, column, getattr(steps, column)[mixed])
    (same,) = judge_job(trace, replicates=replicates()).anomalies
    assert same == told


def test_a_job_that_settles_is_told_and_not_accused() -> None:
    trace = job(slowed(FLAT_S, 0, 60, 1.5))
    verdict = judge_job(trace, schedule=np.zeros(1000, dtype=np.intp))
    assert verdict.anomalies == ()
    assert "slower from the start to step" in verdict.notes[0]
    (found,) = judge_job(trace, replicates=replicates()).anomalies  # others did not have to settle
    assert found.first_step == 0


def test_a_pace_that_only_a_block_across_a_jump_has_excuses_nobody() -> None:
    """From 35 to 60 ms in the middle of a block, which as a whole has 47 ms."""
    pace_s = np.repeat([0.035, 0.060], (505, 495))
    beside = [job(pace_s, seed=1 + i) for i in range(3)]
    (found,) = judge_job(job(slowed(pace_s, 380, 480, 1.357)), replicates=beside).anomalies
    assert abs(found.first_step - 380) <= 5


def test_what_noise_could_have_done_accuses_nobody() -> None:
    """Blocks with a sigma of 0.03, as much as the least slowdown worth a finding."""
    found = [
        judge_job(
            job(FLAT_S, seed=seed, noise=0.1), schedule=np.zeros(1000, dtype=np.intp)
        ).anomalies
        for seed in range(60)
    ]
    assert sum(map(bool, found)) <= 1


def test_a_run_slow_for_most_of_its_steps_keeps_its_replicates() -> None:
    """By the middle of its steps it would be of another pace, as with other devices."""
    pace_s = slowed(FLAT_S, 300, 1000, 1.4)
    verdict = judge_job(job(pace_s), replicates=replicates())
    (found,) = verdict.anomalies
    assert (found.last_step, verdict.notes) == (None, ())
    assert found.slowdown == pytest.approx(1.4, rel=0.02)


def test_replicates_that_share_no_step_with_each_other_are_compared_with_the_run() -> None:
    beside = [job(FLAT_S[:510], seed=1), later(job(FLAT_S[:500], seed=2), 500)]
    (found,) = judge_job(job(slowed(FLAT_S, 400, 480, 1.1)), replicates=beside).anomalies
    assert abs(found.first_step - 400) <= 5


def later(trace: Trace, by: int) -> Trace:
    assert trace.steps is not None
    return replace(trace, steps=replace(trace.steps, step=trace.steps.step + by))


@pytest.mark.parametrize("num", [1, 2])
def test_few_replicates_tell_what_the_run_does_again_and_again(num: int) -> None:
    is_slow = (np.arange(1000) > 200) & (np.arange(1000) // 35 % 2 == 1)
    (found,) = judge_job(
        job(FLAT_S * np.where(is_slow, 1.2, 1.0)), replicates=replicates(num)
    ).anomalies
    assert found.slowdown == pytest.approx(1.2, rel=0.03)


def test_the_size_of_a_slowdown_is_right_in_noise() -> None:
    """Health is told by the fastest fifth, which noise alone makes look faster than health."""
    sizes = []
    for seed in range(5):
        trace = job(slowed(FLAT_S, 400, 700, 1.3), seed=seed, noise=0.08)
        (found,) = judge_job(trace, schedule=np.zeros(1000, dtype=np.intp)).anomalies
        sizes.append(found.slowdown)
    assert float(np.mean(sizes)) == pytest.approx(1.3, rel=0.012)


def test_a_coarse_clock_gets_larger_blocks_and_no_more_trust_than_it_has() -> None:
    trace = job(np.full(2000, 1.34), noise=0.0, resolution_s=1.0)
    run = usable_steps(trace)
    assert run is not None
    assert block_size(run, 1e-3) == 10
    assert block_size(run, 1.0) == 100  # of the median, one second
    blocks = blocks_of(unknown(run, 1.0), 20, Knowledge.NOTHING)
    assert blocks.sigma >= 1.0 / 20 / float(np.median(run.duration_s))
    assert judge_job(trace).anomalies == ()


def test_a_work_class_of_few_steps_has_no_level_to_be_judged_by() -> None:
    schedule = np.repeat([0, 1, 2], (500, 60, 440))
    pace_s = slowed(FLAT_S, 520, 560, 1.2)
    assert judge_job(job(pace_s), schedule=schedule).anomalies == ()
    assert judge_job(job(pace_s), schedule=np.zeros(1000, dtype=np.intp)).anomalies != ()


def test_work_classes_may_alternate_from_step_to_step() -> None:
    random = np.random.default_rng(0)
    schedule = random.permuted(np.repeat([0, 1], (600, 400)))
    pace_s = np.array([0.03, 0.09])[schedule]
    assert judge_job(job(pace_s), schedule=schedule).anomalies == ()
    (found,) = judge_job(job(slowed(pace_s, 400, 500, 1.1)), schedule=schedule).anomalies
    assert abs(found.first_step - 400) <= 5


def test_replicates_of_unlike_pace_and_length_make_no_edge_where_one_ends() -> None:
    beside = [job(FLAT_S[:700], seed=1), job(FLAT_S * 1.2, seed=2)]
    assert judge_job(job(FLAT_S), replicates=beside).notes == ()
    assert judge_job(job(FLAT_S), replicates=beside).anomalies == ()


def test_steps_after_the_end_of_all_replicates_are_not_judged() -> None:
    pace_s = slowed(np.full(2000, 10.0), 1910, 2000, 1.5)
    beside = [job(np.full(1910, 10.0), seed=1 + i, resolution_s=10.0) for i in range(3)]
    assert judge_job(job(pace_s, resolution_s=10.0), replicates=beside).anomalies == ()


def test_a_clock_as_coarse_as_a_fifth_of_a_step_shifts_no_level() -> None:
    """Steps of 5.3 ms are told as 5 most of the time: the median of the replicates is 5."""
    pace_s = np.repeat([0.0053, 0.0200], 500)
    beside = [job(pace_s, seed=1 + i, noise=0.002, resolution_s=1e-3) for i in range(19)]
    verdict = judge_job(job(pace_s, noise=0.002, resolution_s=1e-3), replicates=beside)
    assert (verdict.anomalies, verdict.notes) == ((), ())


def test_a_fault_while_there_is_much_work_is_not_learnt_as_its_price() -> None:
    random = np.random.default_rng(0)
    tokens = random.uniform(1000, 3000, 1000)
    tokens[600:] += 500
    pace_s = slowed(0.02 + 1e-5 * tokens, 600, 1000, 1.3)
    trace = with_work(job(pace_s), tokens, np.full(1000, np.nan))
    (found,) = judge_job(trace).anomalies
    assert found.slowdown == pytest.approx(1.3, rel=0.03)


def test_steps_that_tell_no_tokens_are_left_out_and_said() -> None:
    random = np.random.default_rng(0)
    tokens = random.uniform(1000, 3000, 1000)
    trace = job(slowed(0.02 + 1e-5 * tokens, 600, 1000, 1.3))
    untold = random.random(1000) < 0.2
    squares = np.where(random.random(1000) < 0.5, 1e9, np.nan)  # half of them: not counted
    verdict = judge_job(with_work(trace, np.where(untold, np.nan, tokens), squares))
    assert verdict.notes[0] == f"{untold.sum()} steps tell no tokens: left out"
    (found,) = verdict.anomalies
    assert abs(found.first_step - 600) <= 10
    assert found.slowdown == pytest.approx(1.3, rel=0.02)


def test_lengths_that_only_the_slow_steps_tell_do_not_explain_them() -> None:
    tokens = np.random.default_rng(0).uniform(1000, 3000, 1000)
    pace_s = slowed(0.02 + 1e-5 * tokens, 600, 1000, 1.3)
    squares = np.where(np.arange(1000) >= 600, 1e9, np.nan)
    (found,) = judge_job(with_work(job(pace_s), tokens, squares)).anomalies
    assert found.slowdown == pytest.approx(1.3, rel=0.02)


def test_the_few_steps_that_tell_their_tokens_do_not_stand_for_the_run() -> None:
    tokens = np.where(np.arange(1000) < 400, 1000.0, np.nan)
    basis = measured(with_work(job(FLAT_S), tokens, np.full(1000, np.nan)))
    assert basis is not None and basis.known_by is Knowledge.NOTHING


@pytest.mark.parametrize(("num_blocks", "chance", "sigmas"), [(2, 0.5, 0.0), (50, 1 / 300, 4.545)])
def test_a_level_must_be_rarer_than_the_best_of_all_intervals(
    num_blocks: int, chance: float, sigmas: float
) -> None:
    assert min_sigmas(num_blocks, chance) == pytest.approx(sigmas, abs=0.005)
    assert min_sigmas(num_blocks + 1, chance) > min_sigmas(num_blocks, chance)
    assert min_sigmas(num_blocks, chance / 10.0) > min_sigmas(num_blocks, chance)


def test_a_fault_in_a_short_run_whose_work_is_told_is_no_noise() -> None:
    trace = job(slowed(np.full(190, 0.06), 60, 100, 1.05), noise=0.02)
    sigmas = []
    for one in (trace, with_work(trace, np.full(190, 512.0), np.full(190, 9e4))):
        basis = measured(one)
        assert basis is not None
        sigmas.append(basis.blocks.sigma)
    unknown_work, told_work = sigmas
    assert told_work < 2.0 * 0.02 / np.sqrt(10.0) and unknown_work > 1.5 * told_work
