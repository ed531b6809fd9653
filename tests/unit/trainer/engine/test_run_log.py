"""Steps of a run reach the console, the file and TensorBoard."""

import json
import math
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pacekeeper.core.errors import HostError
from pacekeeper.trainer.engine.run_log import RunLog, StepRecord


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "loss": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 0.01,
        "tokens": 100,
        "seconds": 0.5,
        "generation": 1,
    }
    return StepRecord(**values | changes)


def test_every_step_is_in_the_file_and_some_are_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "steps.jsonl").write_text("of a run before\n")
    with closing(RunLog(tmp_path, log_period_steps=2, num_steps=5, show=shown.append)) as log:
        for step in range(5):
            log.write(record(step, evaluation_loss=1.5 if step == 3 else None))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line.get("evaluation_loss") for line in lines] == [None, None, None, 1.5, None]
    assert [line.split()[1] for line in shown] == ["2", "4", "4", "5"]
    assert "200 tokens/s" in shown[0]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path, show=lambda _: None)) as log:
        log.write(record(0, loss=math.nan, grad_norm=math.inf))

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    (text,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    line = json.loads(text, parse_constant=refuse)
    assert (line["loss"], line["grad_norm"], line["step"]) == (None, None, 0)


def test_a_full_disk_ends_the_file_only(tmp_path: Path) -> None:
    shown: list[str] = []
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    with closing(RunLog(tmp_path, show=shown.append)) as log:
        log.write(record(0))
        log.write(record(1))
    assert len(shown) == 2


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError):
        RunLog(tmp_path / "file")


def test_tensorboard_has_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scalars: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == "events"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

        def close(self) -> None:
            scalars.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with closing(RunLog(tmp_path, tensorboard_dir="events")) as log:
        log.write(record(7, evaluation_loss=1.0))
    assert ("train/loss", 2.0, 7) in scalars and ("train/evaluation_loss", 1.0, 7) in scalars
    assert scalars[-1][0] == "closed"


def test_tensorboard_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(HostError) as caught:
        RunLog(tmp_path, tensorboard_dir="events")
    assert "pip install tensorboard" in caught.value.remedy
    assert not (tmp_path / "steps.jsonl").exists()


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_who_goes_on_keeps_what_was_before_and_no_step_twice(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path)) as log:
        for step in range(6):
            log.write(record(step))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    with closing(RunLog(tmp_path, first_step=7)) as log:
        assert log.last_step == 5
    with closing(RunLog(tmp_path, first_step=4)) as log:
        assert log.last_step == 3
        for step in (4, 5):
            log.write(record(step))
        log.go_back(2)
        assert log.last_step == 1
        log.write(record(2))
    assert steps_of(tmp_path) == [0, 1, 2]
    with closing(RunLog(tmp_path)) as log:
        log.write(record(0))
        log.write(record(1))
        log.go_back(1)
        log.write(record(1))
    assert steps_of(tmp_path) == [0, 1]
