"""Batch shares in Hugging Face's Trainer and Lightning: ranks learn what one process does."""

import json
from pathlib import Path

import pytest

from support.foreign_fleet import run_script

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
STEPS, PER_STEP = 12, 5
# The models of transformers compute norms and the loss in float32 always.
TOLERANCE = {"huggingface": 1e-7, "lightning": 1e-9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shares")
    code = run_script("share_trainer_runs", path, path / "rings")
    assert code == 0, "".join(log.read_text()[-3000:] for log in path.glob("*.log"))
    return path


@pytest.mark.parametrize("job", TOLERANCE)
def test_parameters_are_those_of_one_process_whatever_the_shares(folder: Path, job: str) -> None:
    ranks = [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in (0, 1)]
    counts = ranks[0]["counts"]
    assert counts == ranks[1]["counts"] and len(counts) == STEPS
    assert all(sum(of_step) == PER_STEP for of_step in counts)
    assert len({tuple(of_step) for of_step in counts}) >= 3
    assert max(rank["error"] for rank in ranks) < TOLERANCE[job]
