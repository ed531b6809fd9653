"""Restarts of a whole job: all ranks die while their launchers live, and all starts again."""

import signal
from dataclasses import replace
from pathlib import Path

from pacekeeper.core.errors import ExitCode
from support.fleet import SMALL, Fleet
from support.resumes import assert_losses, saved, saving
from support.sabotage import Moment, Sabotage


def test_a_job_whose_ranks_all_died_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    config = saving(tmp_path, max_restarts=2)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2, has_own_server=True
    ) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        first = saved(config)[0]
        for rank in fleet.ranks:
            fleet.signal(rank, signal.SIGKILL)
        assert fleet.codes() == [0, 0]
        assert_losses(fleet, (0, 1, 2, 3), 0)
        for launcher in fleet.launchers:
            assert launcher.output().count("restart 1 of 2 in 1 s") == 1
        assert saved(config)[0].run_id > first.run_id
        assert "restored from" in fleet.launchers[0].output()


def test_restarts_are_counted_and_come_to_an_end(tmp_path: Path) -> None:
    config = replace(SMALL, max_restarts=1)
    body = Sabotage(moment=Moment.IN_STEP_BEFORE_VOTE, victims=(0, 1), step=2)
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2, body=body) as fleet:
        assert fleet.codes() == [ExitCode.INTERNAL]
        assert "all 1 restarts are used up" in fleet.launchers[0].output()
        assert [line["step"] for line in fleet.steps(0)] == [0, 1, 0, 1]


def test_a_node_without_ranks_waits_for_the_others_and_ends_with_them(tmp_path: Path) -> None:
    config = replace(SMALL, max_restarts=1)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(2, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0, ExitCode.INTERNAL]
        assert_losses(fleet, (0,), 0)
        assert "this node's ranks have ended; nodes [0] train on" in fleet.launchers[1].output()
