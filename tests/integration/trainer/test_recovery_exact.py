"""Several faults on one job of real processes: it goes on exactly, in time, or says why it can not.

What takes minutes is in `stress/fault_schedules` and `benchmarks/recovery_equality`; here are short
runs of the same code.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.config.engine import EngineConfig
from support.engine_jobs import small_job
from support.examples import stress
from support.fault_runs import run, undisturbed
from support.fault_schedules import Act, disturbed_run, drawn
from support.fleet import Fleet
from support.sabotage import LateStart, Moment, Sabotage

pytest.importorskip("transformers")


def job(folder: Path, **own: Any) -> EngineConfig:
    settings = {"steps": 20, "replicas": 2, "slots_per_rank": 4, "tick_s": 0.05}
    return small_job(folder, **settings | own)


def test_moves_deaths_and_joins_change_no_loss(tmp_path: Path) -> None:
    schedule = disturbed_run(steps=60, dtype="float64")
    reference = undisturbed(schedule, tmp_path / "reference", num_ranks=6)
    outcome = run(schedule, tmp_path / "run", reference)
    assert outcome.complaints == ()
    assert outcome.ending == "done"
    assert outcome.deviation <= 1e-9
    # Two die at once, newcomers may come late, and a plan too late for its base.
    assert outcome.num_moves >= 2 and outcome.num_regroups >= 3
    assert outcome.num_joined >= 1 and outcome.has_lost_store


def test_schedules_draw_all_kinds_of_faults_and_are_the_same_for_a_seed() -> None:
    schedules = [drawn(0, number) for number in range(50)]
    acts = {fault.act for s in schedules for burst in s.bursts for fault in burst.faults}
    assert acts == set(Act)
    assert {s.sabotage.moment for s in schedules if s.sabotage} > {Moment.IN_REGROUP_MOVE}
    assert schedules == [drawn(0, number) for number in range(50)]
    assert all(s.watcher not in b.victims | s.struck for s in schedules for b in s.bursts)


@pytest.mark.parametrize(
    "moment", [Moment.IN_FORMING, stress(Moment.IN_CONNECTING), stress(Moment.IN_MOVE_BEFORE_VOTE)]
)
def test_who_freezes_inside_a_recovery_is_fenced_and_left(tmp_path: Path, moment: Moment) -> None:
    config = job(tmp_path, replicas=3, peer_timeout_s=8.0)
    body = Sabotage(moment=moment, frozen=(1,))
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        fleet.await_step(5, 3)
        fleet.signal(0, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert "rank=1 is fenced" in fleet.launchers[0].output()
        for rank in (2, 3):
            assert [line["step"] for line in fleet.steps(rank)] == list(range(config.steps))


@pytest.mark.parametrize("victim", [stress(None), 0])
def test_who_comes_late_is_not_taken_for_frozen(tmp_path: Path, victim: int | None) -> None:
    """A node may load for longer than a rank may be silent later on."""
    config = job(tmp_path, steps=10, peer_timeout_s=6.0)
    body = LateStart(late=2, start_s=7.0, victim=victim)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0]
        for rank in (1, 2, 3):
            assert len(fleet.steps(rank)) == config.steps


def test_who_freezes_when_all_steps_are_done_does_not_keep_its_launcher(tmp_path: Path) -> None:
    """The others have ended: nobody is left that would miss it."""
    config = job(tmp_path, steps=10, peer_timeout_s=6.0)
    body = Sabotage(moment=Moment.AT_END, frozen=(1,))
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0]
        assert "rank=1 is fenced (killed): the job is over" in fleet.launchers[0].output()


def test_replicas_are_compared_every_so_many_steps_and_are_equal(tmp_path: Path) -> None:
    config = job(tmp_path, steps=12, replica_check_period_steps=4)
    with Fleet(directory=tmp_path, config=config) as fleet:
        assert fleet.codes() == [0]
        for rank in fleet.ranks:
            assert [event["step"] for event in fleet.events(rank, "checked")] == [3, 7, 11]
