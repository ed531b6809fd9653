"""The demo's run directory: what no demo made stays, and two demos never share one."""

import os
from pathlib import Path

import pytest

from pacekeeper.cli.demo.run_dir import FOLDERS, MARKER, claim_run_dir
from pacekeeper.core.errors import ConfigError, HostError


@pytest.mark.parametrize(
    "mine",
    ["train/model.py", "logs/yesterday.log", "controller.sqlite", "notes.txt", "report.html"],
)
def test_what_no_demo_made_is_left_alone(mine: str, tmp_path: Path) -> None:
    path = tmp_path / mine
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--run-dir"), claim_run_dir(tmp_path):
        pass
    assert path.read_text() == "mine"
    assert not (tmp_path / MARKER).exists(), "the next attempt would take it for a demo's"


@pytest.mark.parametrize("directory", ["missing", "deeply/missing", "empty"])
def test_a_missing_or_an_empty_directory_is_taken(directory: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with claim_run_dir(tmp_path / directory) as folder:
        assert {path.name for path in folder.iterdir()} == {*FOLDERS, MARKER}


def test_what_an_earlier_demo_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    with claim_run_dir(tmp_path):
        (tmp_path / "train" / "steps-0.jsonl").write_text("old")
        for name in ("controller.sqlite-wal", "report.html", "demo.png", "notes.txt"):
            (tmp_path / name).write_text("old")
    with claim_run_dir(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*FOLDERS, MARKER, "notes.txt"}
        assert list((tmp_path / "train").iterdir()) == []


def test_a_second_demo_in_the_same_directory_is_refused_while_the_first_runs(
    tmp_path: Path,
) -> None:
    with claim_run_dir(tmp_path):
        (tmp_path / "train" / "steps-0.jsonl").write_text("running")
        with pytest.raises(HostError, match="--run-dir"), claim_run_dir(tmp_path):
            pass
        assert (tmp_path / "train" / "steps-0.jsonl").exists()
    with claim_run_dir(tmp_path):
        pass


def test_a_directory_that_can_not_be_made_is_a_host_s_error_and_nothing_stays_open(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MARKER).mkdir()
    before = os.listdir("/proc/self/fd")
    for refused in ("file", "run"):
        with (
            pytest.raises(HostError, match="--run-dir"),
            claim_run_dir(tmp_path / refused),
        ):
            pass
    assert os.listdir("/proc/self/fd") == before
