"""Checkpoints of whole jobs: started again by hand or by their launchers, or short of an expert."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.exact_jobs import exact_job, saved, saving, undisturbed
from support.fleet import Fleet
from support.sabotage import Moment, Sabotage

pytest.importorskip("transformers")


def job(folder: Path, **own: Any) -> EngineConfig:
    return saving(exact_job(folder, **{"steps": 40} | own))


def kill_all(fleet: Fleet) -> None:
    """Every process of the job, launchers first."""
    pids = [fleet.pid(rank) for rank in fleet.ranks]
    for launcher in fleet.launchers:
        launcher.kill()
    fleet.await_(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def assert_at_last(fleet: Fleet, ranks: tuple[int, ...], first: int = 0) -> None:
    """Steps from `first` on; of those that were done twice, the later time counts."""
    wanted = undisturbed(fleet.config, fleet.config.steps)
    for rank in ranks:
        found = {line["step"]: line["loss"] for line in fleet.steps(rank)}
        assert list(found) == sorted(found) == list(range(first, fleet.config.steps)), rank
        assert list(found.values()) == pytest.approx(wanted[first:], rel=1e-9), rank


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of two ranks that was killed with all its processes after 9 steps."""
    folder = tmp_path_factory.mktemp("begun")
    config = job(folder, replicas=1, steps=1000)
    with Fleet(directory=folder, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(9, 0)
        fleet.await_(lambda: any(one.step >= 8 for one in saved(config)))
        kill_all(fleet)
    return folder


def resumed(folder: Path, begun: Path, config: EngineConfig) -> int:
    """Let a job begin with what the other one saved; its steps."""
    shutil.copytree(begun / "kept", folder / "kept")
    return saved(config)[0].step


def test_a_job_that_was_killed_entirely_goes_on_in_any_size_to_its_end(
    tmp_path: Path, begun: Path
) -> None:
    """Launched again after that it has nothing to do."""
    config = job(tmp_path)
    first = resumed(tmp_path, begun, config)
    newest = saved(config)[0]
    storage = open_storage(f"{config.checkpoint_dir}/{config.job}")
    assert list(damages(storage, read_manifest(storage, newest))) == []
    with Fleet(directory=tmp_path, config=config, ranks_per_node=3) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((0, 1, 2), first)
    last = saved(config)
    assert last[0].step == config.steps and last[0].run_id > newest.run_id
    assert len(last) == config.checkpoints_kept
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0]
        assert [fleet.steps(rank) for rank in (0, 1)] == [[], []]


def test_a_death_while_a_job_resumes(tmp_path: Path, begun: Path) -> None:
    """Nobody has any state yet: what the dead would have held is in the checkpoint, too."""
    config = job(tmp_path, replicas=1)
    first = resumed(tmp_path, begun, config)
    body = Sabotage(moment=Moment.IN_RESTORE, victims=(0,))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=3, body=body) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((1, 2), first)


def test_an_expert_without_living_replica_takes_all_back_to_the_newest_checkpoint(
    tmp_path: Path,
) -> None:
    """In the same processes; nothing is stale."""
    config = job(tmp_path, replicas=1)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        pids = [fleet.pid(rank) for rank in (0, 2, 3)]
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert [fleet.pid(rank) for rank in (0, 2, 3)] == pids
        assert_at_last(fleet, (0, 2, 3))
        for rank in (0, 2, 3):
            (event,) = fleet.events(rank, "regroup")
            assert event["step"] % 4 == 0 and event["step"] > 0


def test_of_partial_checkpoints_the_lost_expert_alone_comes_back(tmp_path: Path) -> None:
    """The others go on at the step they stand at; the tokens that are lost are said."""
    config = job(tmp_path, replicas=1, experts_per_checkpoint=1)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        (event,) = fleet.events(0, "lossy")
        assert event["older_experts"] == 2 and event["oldest_step"] <= event["step"]
        wanted = undisturbed(config, config.steps)
        for rank in (0, 2, 3):
            steps = fleet.steps(rank)
            assert [line["step"] for line in steps] == list(range(config.steps)), "none again"
            before = [line["loss"] for line in steps if line["step"] < event["step"]]
            assert before == pytest.approx(wanted[: len(before)], rel=1e-9)


def test_without_storage_lost_state_comes_from_what_others_keep_in_memory(tmp_path: Path) -> None:
    """Two nodes of two ranks: what the dead rank had copied lies on the other node."""
    config = exact_job(tmp_path, steps=40, replicas=1, snapshot_period_steps=4)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_(lambda: any(e["outcome"] == "complete" for e in fleet.events(0, "snapshot")))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0, 0]
        assert_at_last(fleet, (0, 2, 3))
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
    config = job(tmp_path, replicas=1)
    body = Sabotage(moment=moment, victims=(2,), doubters=doubters)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_at_last(fleet, (0, 3))
        assert fleet.events(0, "regroup")[-1]["generation"] == 3


def test_a_disk_that_refuses_does_not_stop_training(tmp_path: Path) -> None:
    config = job(tmp_path)
    Path(config.checkpoint_dir).write_text("a file where a directory should be")
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0]
        fleet.assert_exact((0, 1))
        assert {event["outcome"] for event in fleet.events(0, "checkpoint")} == {"failed"}


def test_a_job_whose_ranks_all_died_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    config = job(tmp_path, max_restarts=2)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2, has_own_server=True
    ) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        first = saved(config)[0]
        for rank in fleet.ranks:
            fleet.signal(rank, signal.SIGKILL)
        assert fleet.codes() == [0, 0]
        assert_at_last(fleet, (0, 1, 2, 3))
        for launcher in fleet.launchers:
            assert launcher.output().count("restart 1 of 2 in 1 s") == 1
        assert saved(config)[0].run_id > first.run_id
        assert "restored from" in fleet.launchers[0].output()


def test_restarts_are_counted_and_come_to_an_end(tmp_path: Path) -> None:
    config = exact_job(tmp_path, max_restarts=1)
    body = Sabotage(moment=Moment.IN_STEP_BEFORE_VOTE, victims=(0, 1), step=2)
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2, body=body) as fleet:
        assert fleet.codes() == [ExitCode.INTERNAL]
        assert "all 1 restarts are used up" in fleet.launchers[0].output()
        assert [line["step"] for line in fleet.steps(0)] == [0, 1, 0, 1]


def test_a_node_without_ranks_waits_for_the_others_and_ends_with_them(tmp_path: Path) -> None:
    config = exact_job(tmp_path, max_restarts=1)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(2, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0, ExitCode.INTERNAL]
        fleet.assert_exact((0,))
        assert "this node's ranks have ended; nodes [0] train on" in fleet.launchers[1].output()
