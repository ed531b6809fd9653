"""What saving costs is measured, told to later lives and to people, and sets the period."""

from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.interval import SaveCosts, combine_costs
from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.trainer.checkpoint.policies.interval import (
    BESIDE_RATIO,
    HELD_RATIO,
    CheckpointCostMeter,
    CheckpointInterval,
    IntervalVote,
)
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.trainees import TINY, Lone

COSTS = SaveCosts(held_s=0.5, step_s=1.0, running_s=200.0, num_restores=2)


def test_pace_is_what_was_measured_and_nothing_before() -> None:
    pace = CheckpointCostMeter(0.0)
    pace.copied(1000, 0.5, is_first=True)
    assert (pace.step_s, pace.budget_bytes, pace.costs(9.0)) == (None, 0.0, None)
    for step, now_s in ((1, 10.0), (2, 12.0), (3, 14.0), (7, 90.0), (8, 92.0)):
        pace.step_is_over(step, now_s)  # between 3 and 7 something else was done
    assert pace.step_s == 2.0
    assert pace.budget_bytes == pytest.approx(HELD_RATIO * 2.0 * 1000 / 0.5)


def test_what_a_device_copies_beside_a_step_may_take_all_of_it_and_holds_what_is_waited() -> None:
    pace = CheckpointCostMeter(0.0)
    for step in (1, 2, 3):
        pace.step_is_over(step, 2.0 * step)
    pace.copied(0, 0.125, is_first=True)
    assert pace.budget_bytes == 0.0, "nobody knows yet how fast it is"
    pace.settled(1000, 0.5, 0.25)
    assert pace.budget_bytes == pytest.approx(BESIDE_RATIO * 2.0 * 1000 / 0.5)
    found = pace.costs(9.0)
    assert found is not None and found.held_s == 0.375


def test_all_steps_of_a_window_hold_training_for_it() -> None:
    pace = CheckpointCostMeter(0.0)
    pace.step_is_over(1, 1.0)
    pace.step_is_over(2, 3.0)
    for is_first, took_s in ((True, 9.0), (True, 0.5), (False, 0.25), (False, 0.25)):
        pace.copied(10, took_s, is_first=is_first)
    assert pace.costs(100.0) == SaveCosts(held_s=1.0, step_s=2.0, running_s=100.0, num_restores=0)


def test_a_later_life_goes_on_counting() -> None:
    pace = CheckpointCostMeter(1000.0)
    pace.went_back(COSTS, 1001.0)
    pace.step_is_over(1, 1010.0)
    pace.step_is_over(2, 1011.0)
    found = pace.costs(1021.0)
    assert found is not None and (found.running_s, found.num_restores) == (220.0, 3)
    pace.went_back(replace(COSTS, num_restores=0, running_s=5.0), 1031.0)
    found = pace.costs(1031.0)
    assert found is not None and (found.running_s, found.num_restores) == (230.0, 4)
    pace.went_back(None, 1041.0)  # of before this was told
    found = pace.costs(1041.0)
    assert found is not None and (found.running_s, found.num_restores) == (240.0, 5)


def test_the_best_period_is_young_and_dalys() -> None:
    """sqrt(2 * 0.5 s * 100 s) = 10 s, of steps of 1 s."""
    assert COSTS.best_period_steps == 10
    assert replace(COSTS, num_restores=0).best_period_steps == 14, "one in 200 s, at the most"
    assert replace(COSTS, held_s=0.0).best_period_steps is None
    assert replace(COSTS, step_s=100.0).best_period_steps == 1
    assert "gone back to 2 times" in COSTS.text()
    assert "500 ms (50.0% of a step)" in COSTS.text()
    assert "one in 10 steps costs least" in COSTS.text()
    assert "one in at least 14 steps" in replace(COSTS, num_restores=0).text()


@pytest.mark.parametrize(
    "wrong", [{"step_s": 0.0}, {"held_s": nan}, {"running_s": inf}, {"num_restores": -1}]
)
def test_what_no_run_can_cost_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="run"):
        replace(COSTS, **wrong)  # type: ignore[arg-type]


def test_of_many_ranks_the_most_counts() -> None:
    other = SaveCosts(held_s=0.25, step_s=4.0, running_s=10.0, num_restores=7)
    assert combine_costs([None, COSTS, other]) == SaveCosts(
        held_s=0.5, step_s=4.0, running_s=200.0, num_restores=7
    )
    assert combine_costs([None]) is None


def test_the_first_ranks_word_says_when() -> None:
    """It may know more than one that came late; all do as it says."""
    periods = [CheckpointInterval(0), CheckpointInterval(0)]
    periods[0].begun(20)
    for step, is_due in ((29, False), (30, True)):
        words = [one.own_vote(COSTS) for one in periods]
        assert words[0] == IntervalVote(last_step=20, period_steps=10)
        for one in periods:
            one.receive_votes(words)
            assert one.is_due(step) == is_due
            assert not one.is_due(step), "a word is of one step"


def test_without_a_period_the_run_chooses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one measures."""
    known: list[SaveCosts | None] = [None]
    monkeypatch.setattr(CheckpointCostMeter, "costs", lambda self, now_s: known[0])
    lone = Lone(tmp_path, replace(TINY, checkpoint_period_steps=0, checkpoints_kept=9))
    for _ in range(23):
        lone.train()
        lone.save()
        known[0] = COSTS
    storage = open_storage(str(lone.root))
    found = complete_ids(storage)
    assert [one.step for one in found] == [21, 11, 1]
    assert read_manifest(storage, found[0]).costs == COSTS


def test_costs_go_from_life_to_life_with_the_manifest(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    for _ in range(3):
        lone.train()
        lone.save()
    storage = open_storage(str(lone.root))
    told = read_manifest(storage, CheckpointId(run_id=1, generation=1, step=3)).costs
    assert told is not None and told.num_restores == 0 and told.held_s > 0.0
    other = Lone(tmp_path, run_id=2)
    other.restore()
    for _ in range(2):
        other.train()
        other.save()
    again = read_manifest(storage, CheckpointId(run_id=2, generation=1, step=5)).costs
    assert again is not None and again.num_restores == 1
    assert again.running_s > told.running_s
