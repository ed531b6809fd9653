"""A script that attaches itself, or that is not there, run as `pacekeeper run` runs it."""

import logging
import subprocess
import sys
from pathlib import Path
from weakref import WeakSet

import pytest
import torch

from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.run.automatic import AutomaticAttachment
from pacekeeper.trainer.adapters.run.command import RUNNER
from pacekeeper.trainer.hooks import hooks, ring_writer


def stepped(automatic: AutomaticAttachment) -> None:
    model = torch.nn.Linear(2, 2)
    automatic(torch.optim.SGD(model.parameters(), lr=0.1), (), {})


@pytest.fixture
def automatic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AutomaticAttachment:
    monkeypatch.setenv(hooks.RING_DIR_VARIABLE, str(tmp_path / "ours"))
    monkeypatch.setenv("PACEKEEPER_JOB", "theirs")
    monkeypatch.setattr(ring_writer, "rings", WeakSet())  # without those of other tests
    return AutomaticAttachment()


def test_a_script_that_attaches_itself_is_left_alone_and_that_is_logged(
    automatic: AutomaticAttachment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = hooks.attach(job="own", rank=0, world_size=1, ring_dir=str(tmp_path))
    stepped(automatic)
    stepped(automatic)
    own.detach()
    assert automatic.pace is None and not (tmp_path / "ours").exists()
    (logged,) = [record for record in caplog.records if record.name.endswith("automatic")]
    assert logged.levelno == logging.WARNING


def test_a_script_that_does_not_is_attached(automatic: AutomaticAttachment) -> None:
    stepped(automatic)
    assert automatic.pace is not None and "theirs" in pytorch.attached
    automatic.pace.detach()


@pytest.mark.parametrize(
    ("words", "code"),
    [(["none.py"], 2), (["-m", "no_such_module"], 1), (["-m", "pkg.none"], 1)],
)
def test_what_is_not_there_is_said_in_one_line(words: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "pkg.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", RUNNER, *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.count("\n") == 1 and words[-1] in done.stderr
