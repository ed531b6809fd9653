"""Ranks of the engine that are killed, freeze, join or move: the same steps, the same losses.

In float32, so losses are compared as far as sums in another order allow; equality in float64 is
tested on ranks that are threads, and by benchmarks.
"""

import signal
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pacekeeper.core.config.engine import EngineConfig
from support.engine_jobs import logged, small_job
from support.engines import random_layout
from support.fleet import Fleet

pytest.importorskip("transformers")

STEPS, TOLERANCE = 30, 1e-3


def job(folder: Path, **own: Any) -> EngineConfig:
    settings = {"replicas": 2, "steps": STEPS, "slots_per_rank": 4, "decay": "constant"}
    return small_job(folder, **settings | {"peer_timeout_s": 4.0, "tick_s": 0.05} | own)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of four ranks that nothing happens to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with Fleet(directory=directory, config=job(directory)) as fleet:
        assert fleet.codes() == [0]
        return [line["loss"] for line in fleet.steps(0)]


def assert_same_losses(lines: list[dict[str, Any]], first: int, losses: list[float]) -> None:
    """Each step once from `first` on, with these losses."""
    assert [line["step"] for line in lines] == list(range(first, first + len(losses)))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 3])
def test_the_others_go_on_in_the_same_step(
    tmp_path: Path, undisturbed: list[float], number: Any, victim: int
) -> None:
    with Fleet(directory=tmp_path, config=job(tmp_path)) as fleet:
        fleet.await_step(8, 1)
        fleet.signal(victim, number)
        assert fleet.codes() == [0]
        for rank in {0, 1, 2, 3} - {victim}:
            assert_same_losses(fleet.steps(rank), 0, undisturbed)
            assert len(fleet.events(rank, "regroup")) == 1
        # The log of the job is whole, whoever writes it.
        assert_same_losses(logged(fleet.run_dir), 0, undisturbed)


def test_deaths_one_after_the_other_and_two_at_once(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    with Fleet(directory=tmp_path, config=job(tmp_path, replicas=3, slots_per_rank=4)) as fleet:
        fleet.await_step(5, 1)
        fleet.signal(2, signal.SIGKILL)
        fleet.await_(lambda: bool(fleet.events(1, "regroup")))
        fleet.await_step(fleet.steps(1)[-1]["step"] + 3, 1)
        fleet.signal(0, signal.SIGKILL)
        fleet.signal(3, signal.SIGKILL)
        assert fleet.codes() == [0]
        assert_same_losses(fleet.steps(1), 0, undisturbed)


def test_plans_are_followed_between_steps(tmp_path: Path, undisturbed: list[float]) -> None:
    chosen = Random(2)
    with Fleet(directory=tmp_path, config=job(tmp_path, steps=60)) as fleet:
        fleet.await_step(2, 0)
        plan = fleet.layout(1)
        for generation in (1, 2, 3):
            fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
            plan = random_layout(plan, chosen)
            fleet.offer(plan, generation)
            fleet.await_(lambda g=generation: len(fleet.events(0, "plan")) == g + 1)  # type: ignore[misc]
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0]
        lines = fleet.steps(2)
        assert {line["generation"] for line in lines} == {1, 2, 3, 4}
        assert_same_losses(lines[:STEPS], 0, undisturbed[: len(lines)])


def test_a_node_joins_while_the_others_train(tmp_path: Path, undisturbed: list[float]) -> None:
    with Fleet(directory=tmp_path, config=job(tmp_path, steps=100_000), ranks_per_node=2) as fleet:
        fleet.await_step(2, 0)
        fleet.join(ranks_per_node=2)
        fleet.await_(lambda: len(fleet.steps(3)) >= 4)
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0, 0]
        first = fleet.steps(2)[0]["step"]
        last = fleet.steps(0)[-1]["step"] + 1
        for rank, begin in ((0, 0), (1, 0), (2, first), (3, first)):
            steps = fleet.steps(rank)
            assert [line["step"] for line in steps] == list(range(begin, last))
            known = [line for line in steps if line["step"] < STEPS]
            assert_same_losses(known, begin, undisturbed[begin:last])
        assert first > 0


def test_a_job_whose_ranks_all_end_resumes_on_fewer_ranks(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    saving = job(tmp_path, checkpoint_dir=str(tmp_path / "saved"), checkpoint_period_steps=4)
    with Fleet(directory=tmp_path, config=replace(saving, steps=9)) as fleet:
        assert fleet.codes() == [0]
        assert_same_losses(fleet.steps(3), 0, undisturbed[:9])
    with Fleet(directory=tmp_path, config=saving, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0]
        assert_same_losses(fleet.steps(1), 9, undisturbed[9:])
