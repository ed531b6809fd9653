"""`pacekeeper train`: one process, no fleet; the same steps as a job of many ranks."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from support.commands import pacekeeper
from support.fleet import SMALL, write_config


def test_it_trains_and_says_so(tmp_path: Path) -> None:
    config = write_config(tmp_path / "job.toml", replace(SMALL, steps=50))
    line = [sys.executable, "-m", "pacekeeper.cli.main", "train", "--config", str(config)]
    done = subprocess.run(
        [*line, "--steps", "30"], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.findall(r"^step (\d+) loss (\d+\.\d+) [\d,]+ tokens/s$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(30))
    losses = [float(loss) for _, loss in found]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("snapshot_period_steps", 5),
        ("max_restarts", 1),
    ],
)
def test_what_one_process_would_have_to_ignore_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "job.toml", replace(SMALL, **{key: value}))  # type: ignore[arg-type]
    done = pacekeeper("train", "--config", str(config), "--steps", "1")
    assert done.returncode == ExitCode.CONFIG, done.stderr
    (line,) = done.stderr.splitlines()
    assert "job.toml" in line and key in line


def test_killed_and_called_again_it_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    config = write_config(tmp_path / "job.toml", SMALL)
    line = ["train", "--config", str(config), "--checkpoint-dir", str(tmp_path / "kept")]
    line += ["--job", "alone", "--checkpoint-every", "2"]
    first = pacekeeper(*line, "--steps", "4")
    assert first.returncode == 0 and first.stdout.split()[1] == "0", first.stderr
    again = pacekeeper(*line, "--steps", "6")
    assert again.returncode == 0 and again.stdout.split()[1] == "4", again.stderr
    refused = pacekeeper(*line, "--resume", str(tmp_path / "kept" / "alone"))
    assert refused.returncode == ExitCode.CONFIG and "alone" in refused.stderr
