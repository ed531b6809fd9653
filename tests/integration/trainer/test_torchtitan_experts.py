"""Expert replicas and batch shares in torchtitan: on stubs of the parts that ours touch, and on its
own Trainer where it is installed (docs/trainer-torchtitan.md says how).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacekeeper.core.telemetry.records import PlanRefusedRecord
from support.foreign_ranks import needs
from support.rings import records_in
from support.tree import ROOT

RANKS, STEPS, HALF, TOO_LARGE = 4, 14, 7, 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of both jobs, run at once."""
    path = tmp_path_factory.mktemp("torchtitan")
    command = [sys.executable, "-m", "support.torchtitan_stub_runs", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, timeout=240, check=False)
    logs = "".join(log.read_text() for log in sorted(path.glob("*.log")))
    assert ended.returncode == 0, logs
    return path


def test_ranks_run_unequal_numbers_of_micro_batches_of_the_same_batch(folder: Path) -> None:
    told = [json.loads((folder / f"shares-{rank}.json").read_text()) for rank in range(RANKS)]
    counts = [[one["passes"] for one in rank[:-1]] for rank in told]
    assert [sum(of_step) for of_step in zip(*counts, strict=True)] == [2 * RANKS] * 8
    assert len(set(zip(*counts, strict=True))) >= 4
    for rank, of_rank in enumerate(told):
        assert max(one["error"] for one in of_rank[:-1]) < 1e-12
        assert of_rank[-1] == {"is_over": True, "is_restored": True}
        records = records_in(next(folder.glob(f"{rank}/shares/*.ring")))
        assert len([r for r in records if isinstance(r, PlanRefusedRecord)]) == 1


def test_loss_norm_and_checkpoints_are_those_without_replicas(folder: Path) -> None:
    for rank in range(RANKS):
        told = json.loads((folder / f"told-{rank}.json").read_text())
        assert [(one["job"], one["step"]) for one in told] == [
            *(("first", step) for step in range(STEPS)),
            *(("second", step) for step in range(HALF, STEPS)),
        ]
        assert max(one["loss_error"] for one in told) < 1e-12
        assert max(one["norm_error"] for one in told) < 1e-12
        assert any(one["is_clipped"] for one in told)
        assert [one["step"] for one in told if one["is_new"]] == [
            *(step for step in range(1, STEPS, 2) if step != TOO_LARGE),
            *range(HALF, STEPS, 2),
        ]
        assert max(one["replicas"] for one in told) > 16  # experts of both layers
        assert [one["shapes"] for one in told if "shapes" in one] == [[8]]
        assert [one["free"] for one in told if "free" in one] == [0.0, 0.0]
        records = records_in(next(folder.glob(f"{rank}/first/*.ring")))
        refused = [r for r in records if isinstance(r, PlanRefusedRecord)]
        assert len(refused) == 1


@needs("torchtitan", "docs/trainer-torchtitan.md")
@pytest.mark.timeout(600)
def test_torchtitans_own_trainer() -> None:
    command = [sys.executable, "-m", "benchmarks.torchtitan_experts", "--steps", "20"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    for error in ("max_loss_error", "max_norm_error", "max_gradient_error"):
        assert found[error] < 1e-12
    changes = {name: one["changes"] for name, one in found["runs"].items()}
    assert changes["replicas"] >= 5 and changes["batch-shares"] >= 5
    assert changes["resumed-replicas"] >= 2 and changes["resumed-shares"] >= 2
    assert found["is_met"]
