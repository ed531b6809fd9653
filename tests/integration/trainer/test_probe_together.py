"""The fixed probe between real processes: once for each question, by all, whoever dies in it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import ProbeRecord
from support.fleet import SMALL, Fleet
from support.rings import records_in
from support.sabotage import Faulty, Moment, Sabotage

LONGER = replace(SMALL, steps=30)


def ask(fleet: Fleet, number: int, ranks: range | tuple[int, ...] = range(4)) -> None:
    for rank in ranks:
        fleet.command(rank, shm_ring.CommandSlot(probe=number))


def probes(fleet: Fleet, rank: int) -> list[ProbeRecord]:
    """What a rank's ring says of probes, oldest first."""
    return [r for r in records_in(fleet.ring_path(rank)) if isinstance(r, ProbeRecord)]


def test_all_run_it_once_at_one_step_and_a_slow_device_reads_slow(tmp_path: Path) -> None:
    config = replace(LONGER, clock="emulated", emulated_step_s=0.05, emulated_jitter=0.0)
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "rank-2.json").write_text(json.dumps({"slowdown": 2.0}))
    with Fleet(directory=tmp_path, config=config, body=Faulty(faults_dir=str(faults))) as fleet:
        fleet.await_step(4, 0)
        ask(fleet, 7)
        fleet.await_(lambda: all(probes(fleet, rank) for rank in range(4)))
        ask(fleet, 7)  # said again, and an older one: nothing to do
        ask(fleet, 6)
        fleet.await_step(fleet.steps(0)[-1]["step"] + 5, 0)
        assert fleet.codes() == [0]
        told = [probes(fleet, rank) for rank in range(4)]
    assert [[record.number for record in own] for own in told] == [[7]] * 4
    assert len({own[0].step for own in told}) == 1
    for kind in ("gemm_s", "copy_s"):
        healthy = getattr(told[0][0], kind)
        assert [getattr(own[0], kind) / healthy for own in told] == pytest.approx([1, 1, 2, 1])


def test_a_probe_that_one_rank_does_not_know_of_is_not_run_and_stops_nobody(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, config=LONGER) as fleet:
        fleet.await_step(4, 0)
        ask(fleet, 7, ranks=(0, 1, 3))
        assert fleet.codes() == [0]
        assert [probes(fleet, rank) for rank in range(4)] == [[]] * 4
        assert len(fleet.steps(0)) == LONGER.steps


def test_who_dies_in_a_probe_is_left_and_the_others_lose_no_step(tmp_path: Path) -> None:
    body = Sabotage(moment=Moment.IN_PROBE, victims=(2,))
    with Fleet(directory=tmp_path, config=LONGER, body=body) as fleet:
        fleet.await_step(4, 0)
        ask(fleet, 7)
        assert fleet.codes() == [0]
        for rank in (0, 1, 3):
            assert [line["step"] for line in fleet.steps(rank)] == list(range(LONGER.steps))
            assert fleet.events(rank, "regroup")
            assert len(probes(fleet, rank)) <= 1  # the question is not put again by itself
