"""Ranks join while the others train: the same steps, the same losses, whoever dies on the way."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.codec import decode_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.shm_ring import parse_layout_file_name
from pacekeeper.trainer.elastic.loop import rank_main
from support.exact_jobs import assert_losses, exact_job, saved, saving, undisturbed
from support.examples import stress
from support.fleet import Fleet
from support.layouts import on_nodes
from support.sabotage import Moment, OtherNode, Sabotage

pytest.importorskip("transformers")
MORE_STEPS = 4


def endless(folder: Path, **own: Any) -> EngineConfig:
    """A job that ends by request; few steps pass while a launcher starts."""
    slow = {"emulate": True, "emulated_step_s": 0.1, "emulated_noise": False}
    return exact_job(folder, **{"steps": 100_000} | slow | own)


def await_newcomers(fleet: Fleet, *ranks: int) -> None:
    """Until these have trained for some steps."""
    for rank in ranks:
        fleet.await_(lambda rank=rank: len(fleet.steps(rank)) >= MORE_STEPS)  # type: ignore[misc]


def end(fleet: Fleet, launcher: int) -> None:
    """By request to one of the launchers; those that were not killed end well."""
    fleet.launchers[launcher].terminate()
    living = [one for one in fleet.launchers if one.code() is None or one.code() == 0]
    fleet.await_(lambda: all(one.code() is not None for one in living))
    assert [one.code() for one in living] == [0] * len(living), fleet.launchers[launcher].output()


def assert_exact(fleet: Fleet, ranks: tuple[int, ...], newcomers: tuple[int, ...]) -> None:
    """All committed each step once since they were there, with the undisturbed run's losses."""
    last = fleet.steps(ranks[0])[-1]["step"]
    for rank in (*ranks, *newcomers):
        first = fleet.steps(rank)[0]["step"]
        assert (first > 0) == (rank in newcomers)
        assert_losses(fleet.steps(rank), fleet.config, first, last + 1)


def newest_layout(fleet: Fleet, node: int) -> Layout:
    """What the trainer wrote down last for the agent of this node."""
    directory = fleet.ring_dir(node) / fleet.config.job
    found = [p for p in directory.iterdir() if parse_layout_file_name(p.name) is not None]
    newest = max(found, key=lambda p: parse_layout_file_name(p.name) or (0, 0))
    return decode_layout(newest.read_bytes())


def test_the_first_node_dies_and_comes_back_by_way_of_another(tmp_path: Path) -> None:
    """With the leader, and with the store they met at; the launcher is the real command.

    So all compute in float32.
    """
    config = endless(tmp_path)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=3, ranks_per_node=1, body=rank_main
    ) as fleet:
        fleet.await_step(3, 1)
        fleet.launchers[0].kill()
        fleet.await_(lambda: bool(fleet.events(1, "regroup")))
        fleet.join(ranks_per_node=2, at=(0, 1), body=None, node=0)
        await_newcomers(fleet, 3, 4)
        layout = newest_layout(fleet, node=0)
        assert layout == newest_layout(fleet, node=2)
        assert layout.ranks == (1, 2, 3, 4)
        assert dict(layout.batch_shares) == pytest.approx(dict.fromkeys((1, 2, 3, 4), 0.25))
        node_of = {1: 1, 2: 2, 3: 3, 4: 3}
        assert all(count == 2 for layer in on_nodes(layout, node_of) for count in layer)
        assert [len(fleet.events(rank, "regroup")) for rank in (1, 2, 3, 4)] == [2, 2, 1, 1]
        end(fleet, 1)
        last = fleet.steps(1)[-1]["step"]
        wanted = undisturbed(config, last + 1, dtype=torch.float32)
        for rank in (1, 2, 3, 4):
            steps = fleet.steps(rank)
            first = steps[0]["step"]
            assert (first > 0) == (rank in (3, 4))
            assert [line["step"] for line in steps] == list(range(first, last + 1))
            assert [line["loss"] for line in steps] == pytest.approx(wanted[first:], rel=1e-3)


@pytest.mark.parametrize(
    ("moment", "num_regroups"),
    [
        stress(Moment.IN_FORMING, 1),
        stress(Moment.IN_REGROUP_MOVE, 1),
        (Moment.IN_MOVE_AFTER_VOTE, 2),
    ],
)
def test_a_newcomer_that_is_killed_on_its_way_in_costs_one_regroup(
    tmp_path: Path, moment: Moment, num_regroups: int
) -> None:
    """Where it had come in for all others, that regroup is one of its own."""
    with Fleet(
        directory=tmp_path, config=endless(tmp_path), num_nodes=2, ranks_per_node=1
    ) as fleet:
        fleet.await_step(3, 1)
        launcher = fleet.join(body=Sabotage(moment=moment, victims=(2,)))
        fleet.await_(lambda: launcher.code() is not None)
        fleet.await_(lambda: len(fleet.events(0, "regroup")) >= num_regroups)
        fleet.await_step(fleet.steps(0)[-1]["step"] + MORE_STEPS, 1)
        assert newest_layout(fleet, node=0).ranks == (0, 1)
        assert [len(fleet.events(rank, "regroup")) for rank in (0, 1)] == [num_regroups] * 2
        end(fleet, 0)
        assert_exact(fleet, (0, 1), ())


def test_two_nodes_join_at_once_while_a_member_dies(tmp_path: Path) -> None:
    """With optimizer state on two ranks each: some get it as owners, or as mirrors."""
    config = endless(tmp_path, replicas=3, shard_optimizer_state=True)
    with Fleet(directory=tmp_path, config=config, ranks_per_node=3) as fleet:
        fleet.await_step(3, 0)
        fleet.join()
        fleet.join()
        fleet.await_(lambda: any("asks at node 0" in one.output() for one in fleet.launchers))
        fleet.signal(1, signal.SIGKILL)
        await_newcomers(fleet, 3, 4)
        assert newest_layout(fleet, node=0).ranks == (0, 2, 3, 4)
        end(fleet, 2)
        assert_exact(fleet, (0, 2), (3, 4))


def test_a_newcomer_that_freezes_on_its_way_in_is_fenced_and_left_behind(tmp_path: Path) -> None:
    config = endless(tmp_path, peer_timeout_s=8.0)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(3, 1)
        launcher = fleet.join(body=Sabotage(moment=Moment.IN_FORMING, frozen=(2,)))
        fleet.await_(lambda: launcher.code() is not None)
        assert "rank=2 is fenced" in launcher.output()
        fleet.await_step(fleet.steps(0)[-1]["step"] + MORE_STEPS, 1)
        assert [len(fleet.events(rank, "regroup")) for rank in (0, 1)] == [1, 1]
        end(fleet, 0)
        assert_exact(fleet, (0, 1), ())


def test_nodes_of_another_installation_or_with_other_files_are_refused_alone(
    tmp_path: Path,
) -> None:
    bodies = (
        OtherNode(transformers="5.0.0"),
        OtherNode(settings={"learning_rate": 0.02}),
        OtherNode(settings={"model": str(tmp_path / "nowhere")}),
    )
    with Fleet(directory=tmp_path, config=endless(tmp_path), ranks_per_node=2) as fleet:
        fleet.await_step(2, 0)
        refused = [fleet.join(body=body) for body in bodies]
        fleet.await_(lambda: all(one.code() is not None for one in refused))
        assert [one.code() for one in refused] == [ExitCode.CONFIG] * len(bodies)
        fleet.await_step(fleet.steps(0)[-1]["step"] + MORE_STEPS, 1)
        assert [fleet.events(rank, "regroup") for rank in (0, 1)] == [[], []]
        end(fleet, 0)
        assert_exact(fleet, (0, 1), ())


def test_all_go_back_to_a_checkpoint_with_who_was_about_to_come_in(tmp_path: Path) -> None:
    """The only replica rank of some experts dies as the group with the newcomer is formed."""
    config = saving(endless(tmp_path, replicas=1))
    body = Sabotage(moment=Moment.IN_FORMING, victims=(1,))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=2, body=body) as fleet:
        fleet.await_(lambda: bool(saved(config)))
        fleet.join()
        await_newcomers(fleet, 2)
        end(fleet, 0)
        assert fleet.launchers[0].output().count("restored from") == 1
        first, last = fleet.steps(2)[0]["step"], fleet.steps(0)[-1]["step"]
        assert first % config.checkpoint_period_steps == 0
        for rank in (0, 2):
            assert_losses(fleet.steps(rank)[first - last - 1 :], config, first, last + 1)


def test_a_job_that_others_joined_starts_again_when_all_its_ranks_have_died(tmp_path: Path) -> None:
    config = saving(endless(tmp_path, replicas=1, max_restarts=1))
    with Fleet(directory=tmp_path, config=config, ranks_per_node=1) as fleet:
        fleet.await_step(3, 0)
        newcomer = fleet.join()
        await_newcomers(fleet, 1)
        fleet.await_(lambda: bool(saved(config)))
        for rank in (1, 0):
            fleet.signal(rank, signal.SIGKILL)
        fleet.await_(lambda: newcomer.code() is not None)
        fleet.await_(lambda: saved(config)[0].run_id > saved(config)[-1].run_id)
        assert newcomer.code() == ExitCode.INTERNAL
        assert "restart 1 of 1 in 1 s" in fleet.launchers[0].output()
        assert "restored from" in fleet.launchers[0].output()
        end(fleet, 0)
