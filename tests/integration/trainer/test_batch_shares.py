"""Batch shares under DDP and FSDP2: gradients of the whole batch, each row once, nobody hangs."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.telemetry.records import MicroBatchRecord, PlanAppliedRecord, PlanRefusedRecord
from support.foreign_fleet import run_script
from support.rings import records_in
from support.share_runs import (
    LOST_RANK,
    PER_STEP,
    RANKS,
    REFUSED_STEP,
    STEPS,
    rows_of_step,
)
from support.tree import ROOT

EVEN = [PER_STEP // RANKS] * RANKS
WHOLE = ("ddp", "fsdp2", "ahead")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares")
    assert run_script("share_runs", path, path / "rings") == 0
    return path


def told(folder: Path, job: str) -> list[Any]:
    paths = [folder / f"{job}-{rank}.json" for rank in range(RANKS)]
    logs = "".join(path.read_text()[-2000:] for path in folder.glob(f"{job}*.log"))
    assert all(path.exists() for path in paths if path.stem != f"{job}-{LOST_RANK}"), logs
    return [json.loads(path.read_text()) for path in paths if path.exists()]


@pytest.mark.parametrize("job", WHOLE)
def test_gradients_are_those_of_the_whole_batch_whatever_the_shares(
    folder: Path, job: str, record_property: Any
) -> None:
    ranks = told(folder, job)
    counts = [step["counts"] for step in ranks[0]["steps"]]
    how_often = {
        "uneven": sum(len(set(of_step)) > 1 for of_step in counts),
        "with none": sum(0 in of_step for of_step in counts),
        "with one": sum(1 in of_step for of_step in counts),
    }
    record_property("steps", how_often)
    print(f"{job}: of {STEPS} steps {how_often}")
    least = 3 if job == "ahead" else 10
    assert how_often["uneven"] >= 2 * least and how_often["with none"] >= least
    assert max(step["error"] for rank in ranks for step in rank["steps"]) < 1e-9
    for rank in ranks:
        assert [step["counts"] for step in rank["steps"]] == counts


@pytest.mark.parametrize("job", WHOLE)
def test_each_row_of_a_step_is_read_by_one_rank(folder: Path, job: str) -> None:
    ranks = told(folder, job)
    for step in range(STEPS):
        read = Counter(n for rank in ranks for n in rank["steps"][step]["rows"])
        assert read == Counter(rows_of_step(step)), step


@pytest.mark.parametrize("job", ["ddp", "fsdp2"])
def test_a_plan_that_one_rank_refuses_changes_nothing_anywhere(folder: Path, job: str) -> None:
    ranks = told(folder, job)
    for rank in ranks:
        steps = rank["steps"]
        assert steps[REFUSED_STEP + 1]["counts"] == steps[REFUSED_STEP]["counts"]
    for rank in range(RANKS):
        records = records_in(folder / "rings" / f"{rank}" / job / f"rank-{rank:05d}.ring")
        reasons = [r.reason for r in records if isinstance(r, PlanRefusedRecord)]
        assert reasons == (["no room for all micro-batches"] if rank == LOST_RANK else [])


@pytest.mark.parametrize("job", ["ddp", "fsdp2"])
def test_plans_are_reported_and_undone(folder: Path, job: str) -> None:
    for rank, of_rank in enumerate(told(folder, job)):
        steps = of_rank["steps"]
        assert [steps[0]["counts"], steps[-1]["counts"]] == [EVEN, EVEN]
        records = records_in(folder / "rings" / f"{rank}" / job / f"rank-{rank:05d}.ring")
        in_force = {r.step: r.generation for r in records if isinstance(r, PlanAppliedRecord)}
        assert len(in_force) > STEPS // 3
        for step in range(STEPS):
            newest = max(first for first in in_force if first <= step)
            assert steps[step]["generation"] == in_force[newest]
        work = [r for r in records if isinstance(r, MicroBatchRecord)]
        for step in range(STEPS):
            own = [r for r in work if r.step == step]
            assert len(own) == max(1, steps[step]["counts"][rank])
            assert {r.generation for r in own} == {steps[step]["generation"]}


@pytest.mark.parametrize("job", ["dead", "frozen"])
def test_the_others_end_with_an_error_where_a_rank_does_not_vote(folder: Path, job: str) -> None:
    ranks = told(folder, job)
    assert [rank["error"] for rank in ranks] == ["UnreachableError"] * (RANKS - 1)


def test_other_threads_run_while_a_functional_collective_is_waited_for(folder: Path) -> None:
    """A thread of gloo may want the interpreter's lock to end it."""
    assert [rank["could_run"] for rank in told(folder, "waits")[1:]] == [True] * (RANKS - 1)


def test_the_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "batch_shares.py")]
    command[3:3] = ["--log-dir", str(tmp_path / "logs")]
    command += ["--ring-dir", str(tmp_path / "rings")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100.0)
    assert done.returncode == 0, done.stderr
    expected = [f"rank {rank}: 20 steps, (8, 8) micro-batches" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == expected
    for rank in (0, 1):
        records = records_in(tmp_path / "rings" / "example" / f"rank-{rank:05d}.ring")
        work = [record for record in records if isinstance(record, MicroBatchRecord)]
        assert sorted((r.step, r.micro_batch) for r in work) == [
            (step, number) for step in range(20) for number in range(8)
        ]
        assert {record.generation for record in work} == {1}
