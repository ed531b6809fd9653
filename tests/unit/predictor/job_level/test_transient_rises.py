"""With nothing known of the work: what goes away again was a slowdown, whatever a schedule did."""

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.job_level.detect import judge_job
from support.examples import seeds
from support.step_times import job, slowed


def growing(*steps_and_pace: tuple[int, float]) -> Array:
    """A schedule: so many steps at each pace."""
    steps, pace = zip(*steps_and_pace, strict=True)
    return np.repeat(np.array(pace), steps)


@pytest.mark.parametrize("seed", seeds(3))
def test_a_slowdown_across_a_jump_of_the_schedule_is_found_whole(seed: int) -> None:
    pace_s = growing((500, 0.05), (500, 0.08))
    (found,) = judge_job(job(slowed(pace_s, 440, 560, 1.1), seed=seed)).anomalies
    assert abs(found.first_step - 440) <= 5
    assert found.last_step is not None and abs(found.last_step - 559) <= 5
    assert found.slowdown == pytest.approx(1.1, rel=0.02)


def test_one_that_begins_with_a_jump_of_the_schedule_is_what_goes_away_of_it() -> None:
    pace_s = growing((500, 0.05), (500, 0.08))
    (found,) = judge_job(job(slowed(pace_s, 500, 600, 1.1))).anomalies
    assert abs(found.first_step - 500) <= 5
    assert found.slowdown == pytest.approx(1.1, rel=0.02)


def test_one_that_comes_bit_by_bit_and_goes_at_once_is_found_from_its_beginning() -> None:
    pace_s = slowed(slowed(np.full(1000, 0.06), 400, 600, 1.06), 500, 600, 1.06)
    (found,) = judge_job(job(pace_s)).anomalies
    assert abs(found.first_step - 400) <= 5


def test_a_pace_that_the_schedule_reaches_later_in_small_steps_excuses_nobody() -> None:
    pace_s = growing(*((200, 0.05 * 1.02**i) for i in range(8)))
    (found,) = judge_job(job(slowed(pace_s, 450, 550, 1.1))).anomalies
    assert abs(found.first_step - 450) <= 5


def test_a_pace_that_the_job_jumps_to_again_is_work() -> None:
    pace_s = growing((300, 0.05), (150, 0.065), (300, 0.05), (400, 0.065))
    assert judge_job(job(pace_s)).anomalies == ()


def test_a_jump_after_a_first_pace_of_one_block_is_told() -> None:
    pace_s = growing((10, 0.05), (150, 0.065), (300, 0.05), (400, 0.065))
    verdict = judge_job(job(pace_s, noise=0.002))
    assert verdict.anomalies == ()
    assert any("x1.30 near step 10;" in note for note in verdict.notes)


def test_a_schedule_that_only_adds_work_accuses_nobody() -> None:
    verdict = judge_job(job(growing((300, 0.03), (300, 0.04), (300, 0.06), (300, 0.09))))
    assert verdict.anomalies == ()
    assert sum("not judged" in note for note in verdict.notes) == 3


def test_a_drop_that_nothing_rose_before_accuses_nobody() -> None:
    assert judge_job(job(growing((300, 0.08), (700, 0.05)))).anomalies == ()
    # What rose before is by far too little for it.
    assert judge_job(job(growing((300, 0.08), (300, 0.085), (400, 0.05)))).anomalies == ()
