"""SIGKILL of one node's launcher: its agent tells the ends of its ranks, other nodes one line."""

import signal
import time
from pathlib import Path

import pytest

from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN, RankExitRecord
from support.exact_jobs import exact_job
from support.fleet import Fleet

pytest.importorskip("transformers")


def test_its_ranks_are_reported_dead_and_the_others_are_told_in_one_line(tmp_path: Path) -> None:
    config = exact_job(tmp_path, steps=10_000)
    with Fleet(
        directory=tmp_path, config=config, num_nodes=2, ranks_per_node=2, body=None
    ) as fleet:
        agents = [RingCollector(directory=fleet.ring_dir(node)) for node in range(2)]
        fleet.await_step(2, 0)
        for agent in agents:
            agent.poll(time.monotonic())
        pids = [fleet.pid(rank) for rank in (0, 1)]
        fleet.launchers[0].kill()
        told: list[tuple[int, int, int]] = []

        def hear() -> bool:
            for reading in agents[0].poll(time.monotonic()):
                exits = [r for r in reading.records if isinstance(r, RankExitRecord)]
                told.extend((r.rank, r.pid, r.exit_code) for r in exits)
            return len(told) >= 2

        fleet.await_(hear)
        assert sorted(told) == [(0, pids[0], EXIT_UNKNOWN), (1, pids[1], EXIT_UNKNOWN)]
        other = fleet.launchers[1]
        fleet.await_(lambda: other.output().count("node 0 is gone: its store at") == 2)
        # By a broken collective or by the store's end, whichever is seen first.
        fleet.await_(lambda: other.output().count(" left generation 1: ") == 2)
        assert not [long for long in ("frame #", "TCPStore", "pair.cc") if long in other.output()]
        assert not [
            record
            for reading in agents[1].poll(time.monotonic())
            for record in reading.records
            if isinstance(record, RankExitRecord)
        ], "the ranks of the other node wait, and live"
        for rank in (2, 3):
            fleet.signal(rank, signal.SIGKILL)
