"""A replica that differs: two others heal it; where none is right, all go back to a checkpoint."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode
from support.exact_jobs import assert_losses, exact_job, saving
from support.fleet import Fleet
from support.sabotage import BadCopy

pytest.importorskip("transformers")
BODY = BadCopy(victim=2, step=5, layer=1)


def test_two_of_three_replicas_heal_the_third_and_training_goes_on(tmp_path: Path) -> None:
    config = exact_job(tmp_path, steps=14, replicas=3, replica_check_period_steps=4)
    with Fleet(directory=tmp_path, config=config, body=BODY) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact(fleet.ranks)
        for rank in fleet.ranks:
            healed = [(event["step"], event["ranks"]) for event in fleet.events(rank, "healed")]
            assert healed == [(7, [2])]
            assert [event["step"] for event in fleet.events(rank, "checked")] == [3, 7, 11]


def test_of_two_replicas_that_differ_none_is_right_and_the_job_ends(tmp_path: Path) -> None:
    config = exact_job(tmp_path, replica_check_period_steps=4)
    with Fleet(directory=tmp_path, config=config, body=BODY) as fleet:
        assert fleet.codes() == [ExitCode.CORRUPT_STATE]
        for rank in fleet.ranks:
            assert [event["step"] for event in fleet.events(rank, "checked")] == [3]
            assert fleet.steps(rank)[-1]["step"] == 7


def checked(folder: Path) -> EngineConfig:
    """A job that saves every 3 steps and compares replicas every 12."""
    config = saving(exact_job(folder, steps=26), checkpoints_kept=30)
    return replace(config, checkpoint_period_steps=3, replica_check_period_steps=12)


def test_where_none_is_right_all_go_back_to_a_checkpoint_from_before(tmp_path: Path) -> None:
    config = checked(tmp_path)  # those of 15 steps and more are of after the last check that passed
    body = BadCopy(victim=2, step=13, layer=1)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0], fleet.launchers[0].output()
        for rank in fleet.ranks:
            assert [event["ranks"] for event in fleet.events(rank, "differed")] == [[2, 3]]
            again = fleet.steps(rank)[24:]
            assert_losses(again, config, again[0]["step"], config.steps)
            assert again[0]["step"] in (3, 6, 9, 12)
            assert {line["generation"] for line in again} == {2}
            assert [event["step"] for event in fleet.events(rank, "checked")][-1] == 23


def test_a_difference_that_comes_again_and_again_ends_the_job(tmp_path: Path) -> None:
    config = checked(tmp_path)
    body = BadCopy(victim=2, step=13, layer=1, is_repeated=True)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [ExitCode.CORRUPT_STATE]
        assert [len(fleet.events(rank, "differed")) for rank in fleet.ranks] == [4] * 4
