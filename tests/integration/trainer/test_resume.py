"""Checkpoints of whole jobs: killed to the last process and launched again, or short of an expert.

The undisturbed run is one process that holds everything; float64, so that 1e-9 can be asked for.
"""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.fleet import SMALL, Fleet
from support.resumes import assert_losses, saved, saving
from support.sabotage import Moment, Sabotage


def kill_all(fleet: Fleet) -> None:
    """Every process of the job, launchers first."""
    pids = [fleet.pid(rank) for rank in fleet.ranks]
    for launcher in fleet.launchers:
        launcher.kill()
    fleet.await_(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_a_job_that_was_killed_entirely_goes_on_in_any_size(tmp_path: Path) -> None:
    """Four ranks on two nodes; then three on one: another layout, the same losses."""
    config = saving(tmp_path)
    (tmp_path / "a").mkdir()
    with Fleet(directory=tmp_path / "a", config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.await_step(9, 0)
        kill_all(fleet)
    newest = saved(config)[0]
    storage = open_storage(f"{config.checkpoint_dir}/{config.job}")
    assert list(damages(storage, read_manifest(storage, newest))) == []
    (tmp_path / "b").mkdir()
    with Fleet(directory=tmp_path / "b", config=config, ranks_per_node=3) as fleet:
        assert fleet.codes() == [0]
        assert_losses(fleet, (0, 1, 2), newest.step)
        assert f"step={newest.step} restored from" in fleet.launchers[0].output()
    last = saved(config)
    assert last[0].step == SMALL.steps and last[0].run_id > newest.run_id
    assert len(last) == config.checkpoints_kept


def test_a_finished_job_that_is_launched_again_has_nothing_to_do(tmp_path: Path) -> None:
    config = saving(tmp_path, steps=4)
    for _ in range(2):
        with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
            assert fleet.codes() == [0]
            num_steps = len(fleet.steps(0))
    assert num_steps == 0


def test_an_expert_without_living_host_comes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    """All go back to its step, in the same processes; nothing is stale."""
    config = saving(tmp_path, replicas=1)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        pids = [fleet.pid(rank) for rank in (0, 2, 3)]
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert [fleet.pid(rank) for rank in (0, 2, 3)] == pids
        assert_losses(fleet, (0, 2, 3), 0)
        (event,) = fleet.events(0, "regroup")
        assert event["step"] % 4 == 0 and event["step"] > 0
        assert "all go back to the newest checkpoint" in fleet.launchers[0].output()


def test_of_partial_checkpoints_the_lost_expert_alone_comes_back(tmp_path: Path) -> None:
    """The others go on at the step they stand at; the tokens that are lost are said."""
    config = saving(tmp_path, replicas=1, experts_per_checkpoint=1, steps=20)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        for rank in (0, 2, 3):
            assert [line["step"] for line in fleet.steps(rank)] == list(range(20)), "none again"
        (event,) = fleet.events(0, "lossy")
        assert event["older_experts"] == 2 and event["oldest_step"] <= event["step"]
        assert "lost experts come from a checkpoint" in fleet.launchers[0].output()


def test_without_storage_lost_state_comes_from_what_others_keep_in_memory(tmp_path: Path) -> None:
    """Two nodes of two ranks: what the dead rank had copied lies on the other node."""
    config = replace(saving(tmp_path, replicas=1), checkpoint_dir="", snapshot_period_steps=4)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_(lambda: any(e["outcome"] == "complete" for e in fleet.events(0, "snapshot")))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0, 0]
        assert_losses(fleet, (0, 2, 3), 0)
        (event,) = fleet.events(0, "regroup")
        assert event["step"] % 4 == 0 and event["step"] > 0
        assert "restored from memory" in fleet.launchers[0].output()


@pytest.mark.parametrize(
    ("moment", "doubters"),
    [
        (Moment.IN_RESTORE, ()),
        (Moment.IN_MOVE_AFTER_VOTE, (0,)),  # the leader missed that the others went back
    ],
)
def test_a_death_while_all_go_back(
    tmp_path: Path, moment: Moment, doubters: tuple[int, ...]
) -> None:
    config = saving(tmp_path, replicas=1)
    body = Sabotage(moment=moment, victims=(2,), doubters=doubters)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_losses(fleet, (0, 3), 0)
        assert fleet.events(0, "regroup")[-1]["generation"] == 3


def test_a_death_while_a_job_resumes(tmp_path: Path) -> None:
    """Nobody has any state yet: what the dead would have held is in the checkpoint, too."""
    config = saving(tmp_path, replicas=1, steps=8)
    (tmp_path / "a").mkdir()
    with Fleet(directory=tmp_path / "a", config=config, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0]
    (tmp_path / "b").mkdir()
    config = replace(config, steps=SMALL.steps)
    body = Sabotage(moment=Moment.IN_RESTORE, victims=(0,))
    with Fleet(directory=tmp_path / "b", config=config, ranks_per_node=3, body=body) as fleet:
        assert fleet.codes() == [0]
        assert_losses(fleet, (1, 2), 8)


def test_without_a_checkpoint_lost_state_ends_the_job_as_before(tmp_path: Path) -> None:
    config = saving(tmp_path, replicas=1)
    config = replace(config, checkpoint_period_steps=1000)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(4, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [ExitCode.LOST_STATE]


def test_a_disk_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    config = saving(tmp_path)
    Path(config.checkpoint_dir).write_text("a file where a directory should be")
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0]
        assert_losses(fleet, (0, 1), 0)
        outcomes = {event["outcome"] for event in fleet.events(0, "checkpoint")}
        assert outcomes == {"failed"}
        assert "is not written, training goes on" in fleet.launchers[0].output()
