"""A replica that differs: two others heal it and training goes on; of two none is right."""

from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from support.exact_jobs import exact_job
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
