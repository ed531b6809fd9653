"""The fixed probe between real processes: once for each question, by all, whoever dies in it."""

import json
from pathlib import Path

import pytest

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import ProbeRecord
from support.exact_jobs import exact_job
from support.fleet import Fleet
from support.rings import records_in
from support.sabotage import Faulty, Moment, Sabotage

pytest.importorskip("transformers")


def ask(fleet: Fleet, number: int, *ranks: int) -> None:
    for rank in ranks:
        fleet.command(rank, shm_ring.CommandSlot(probe=number))


def probes(fleet: Fleet, rank: int) -> list[ProbeRecord]:
    """What a rank's ring says of probes, oldest first."""
    return [r for r in records_in(fleet.ring_path(rank)) if isinstance(r, ProbeRecord)]


def test_all_run_it_once_at_one_step_when_all_know_and_a_slow_device_reads_slow(
    tmp_path: Path,
) -> None:
    config = exact_job(
        tmp_path, steps=100_000, emulate=True, emulated_step_s=0.05, emulated_noise=False
    )
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "rank-2.json").write_text(json.dumps({"slowdown": 2.0}))
    with Fleet(directory=tmp_path, config=config, body=Faulty(faults_dir=str(faults))) as fleet:
        fleet.await_step(1, 0)
        ask(fleet, 7, 0, 1, 3)
        fleet.await_step(fleet.steps(0)[-1]["step"] + 3, 0)
        assert [probes(fleet, rank) for rank in range(4)] == [[]] * 4
        ask(fleet, 7, 2)
        fleet.await_(lambda: all(probes(fleet, rank) for rank in range(4)))
        ask(fleet, 7, 0, 1, 2, 3)  # again, and an older one: nothing to do
        ask(fleet, 6, 0, 1, 2, 3)
        fleet.await_step(fleet.steps(0)[-1]["step"] + 4, 0)
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0]
        read = [probes(fleet, rank) for rank in range(4)]
    assert [[record.number for record in own] for own in read] == [[7]] * 4
    assert len({own[0].step for own in read}) == 1
    for kind in ("gemm_s", "copy_s"):
        healthy = getattr(read[0][0], kind)
        assert [getattr(own[0], kind) / healthy for own in read] == pytest.approx([1, 1, 2, 1])


def test_who_dies_in_a_probe_is_left_and_the_others_lose_no_step(tmp_path: Path) -> None:
    config = exact_job(tmp_path, steps=100_000)
    body = Sabotage(moment=Moment.IN_PROBE, victims=(2,))
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_step(2, 0)
        ask(fleet, 7, 0, 1, 2, 3)
        fleet.await_(lambda: bool(fleet.events(0, "regroup")))
        fleet.await_step(fleet.steps(0)[-1]["step"] + 4, 0)
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0]
        end = len(fleet.steps(0))
        fleet.assert_exact((0, 1, 3), end=end)
        assert [fleet.redone(rank) for rank in (0, 1, 3)] == [[], [], []]
