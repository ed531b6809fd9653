"""Ranks and nodes that freeze, or are declared dead: they are fenced, the others go on exactly."""

import os
import signal
from pathlib import Path

import pytest

from pacekeeper.core.telemetry import shm_ring
from support.exact_jobs import exact_job
from support.fleet import Fleet

pytest.importorskip("transformers")
TIMEOUT_S = 10.0  # a healthy rank on a busy machine is silent for seconds


def test_a_stopped_rank_is_fenced_and_the_others_go_on(tmp_path: Path) -> None:
    config = exact_job(tmp_path, peer_timeout_s=TIMEOUT_S)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(4, 1)
        fleet.signal(1, signal.SIGSTOP)
        assert fleet.codes() == [0, 0]
        fleet.assert_exact((0, 2, 3))
        assert [len(fleet.events(rank, "regroup")) for rank in (0, 2, 3)] == [1, 1, 1]
        assert "rank=1 is fenced" in fleet.launchers[0].output()


def test_a_node_that_freezes_as_a_whole_is_left_behind(tmp_path: Path) -> None:
    """Its kernel still takes connections for its store, to which nobody had one before."""
    config = exact_job(tmp_path, peer_timeout_s=TIMEOUT_S)
    with Fleet(directory=tmp_path, config=config, num_nodes=2, ranks_per_node=1) as fleet:
        fleet.await_step(4, 1)
        os.kill(fleet.launchers[1].pid, signal.SIGSTOP)
        fleet.signal(1, signal.SIGSTOP)
        fleet.await_(lambda: fleet.launchers[0].code() is not None)
        assert fleet.launchers[0].code() == 0
        fleet.assert_exact((0,))
        assert "node 1 is gone" in fleet.launchers[0].output()


def test_a_rank_that_the_controller_declared_dead_is_left_behind(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, config=exact_job(tmp_path, steps=40)) as fleet:
        fleet.await_step(4, 0)
        dead = shm_ring.CommandSlot(dead_ranks=frozenset({1}))
        for rank in (0, 2, 3):
            fleet.command(rank, dead)
        fleet.command_at(fleet.ring_path(0).with_name(shm_ring.SUPERVISOR_RING), dead)
        assert fleet.codes() == [0]
        fleet.assert_exact((0, 2, 3))
        assert len(fleet.steps(1)) < 40
