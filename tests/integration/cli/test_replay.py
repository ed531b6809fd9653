"""`pacekeeper replay` as people and programs call it, on files made here."""

import json
import os
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.simulator.readers.formats import Format
from support.commands import pacekeeper
from support.trace_files import write_run
from support.tree import ROOT


def test_a_program_gets_one_object_with_the_slow_rank(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(write_run(tmp_path / "t", late=5)), "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"S", "findings", "what_if", "notes"}
    compute = [f for f in answer["findings"] if f["kind"] == "compute"]
    assert {f["rank"] for f in compute} == {5}
    assert all(f["slowdown_low"] <= f["slowdown"] <= f["slowdown_high"] for f in compute)
    assert {"first_step", "last_step", "tier", "reason", "stage"} <= set(compute[0])


def test_a_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(write_run(tmp_path / "t")), "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    assert json.loads(done.stdout)["findings"] == []


def test_a_rank_that_dies_half_way_is_nothing_to_warn_of(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(write_run(tmp_path / "t", dead=3)))
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.parametrize("form", Format)
def test_every_format_is_described(form: Format) -> None:
    assert f"| `{form}` |" in (ROOT / "docs" / "traces.md").read_text()


def test_damaged_lines_are_told_to_people_and_programs(tmp_path: Path) -> None:
    path = write_run(tmp_path / "t", bad=3)
    (note, *_) = json.loads(pacekeeper("replay", str(path), "--json").stdout)["notes"]
    assert "3" in note and note in pacekeeper("replay", str(path)).stdout


def test_of_several_runs_each_is_judged(tmp_path: Path) -> None:
    rows = [f"{run},{step},0.5" for run in "ab" for step in range(80)]
    path = tmp_path / "s.csv"
    path.write_text("\n".join(["run,step,duration_s", *rows]))
    answer = json.loads(pacekeeper("replay", str(path), "--json").stdout)
    assert (answer["S"], answer["findings"], answer["what_if"]) == (None, [], None)
    assert [run["run"] for run in answer["runs"]] == ["s:a", "s:b"]
    one = json.loads(pacekeeper("replay", str(path), "--run", "1", "--json").stdout)
    assert set(one) == {"S", "findings", "what_if", "notes"}
    beyond = pacekeeper("replay", str(path), "--run", "2")
    assert beyond.returncode == ExitCode.DATA and str(path) in beyond.stderr


def test_a_directory_may_hold_other_files_too(tmp_path: Path) -> None:
    write_run(tmp_path / "moe.trace.jsonl", late=5)
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "s.csv").write_text("step,duration_s\n1,0.5\n")
    several = pacekeeper("replay", str(tmp_path))
    assert several.returncode == ExitCode.DATA
    assert all(word in several.stderr for word in ("native", "steps", "--format"))
    answer = json.loads(pacekeeper("replay", str(tmp_path), "--format", "native", "--json").stdout)
    assert answer["findings"][0]["rank"] == 5
    assert "README.md" in answer["notes"][0] and "s.csv" in answer["notes"][0]


def test_the_report_is_one_page_with_its_picture(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = pacekeeper("replay", str(write_run(tmp_path / "t", late=2)), "--report", str(page))
    assert done.returncode == ExitCode.OK, done.stderr
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "compute" in text and "://" not in text


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = pacekeeper("replay", str(tmp_path / "pipe"))
    assert done.returncode == ExitCode.DATA
    assert str(tmp_path / "pipe") in done.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "code", "words"),
    [
        pytest.param(None, (), ExitCode.DATA, "/t", id="nothing there"),
        pytest.param(b"hello", (), ExitCode.DATA, "/t", id="no format"),
        pytest.param(b"", (), ExitCode.DATA, "/t", id="empty"),
        pytest.param(
            b"\x1f\x8bgarbage", (), ExitCode.DATA, "pacekeeper: ", id="not really gzipped"
        ),
        pytest.param(
            b"hello", ("--format", "native"), ExitCode.DATA, "/t", id="not the format named"
        ),
        pytest.param(b"x", ("--format", "dance"), ExitCode.USAGE, "--format", id="unknown format"),
    ],
)
def test_what_is_no_recorded_run_is_refused_in_one_line(
    tmp_path: Path, content: bytes | None, arguments: tuple[str, ...], code: ExitCode, words: str
) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    done = pacekeeper("replay", str(path), *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    where = tmp_path / "no" / "r.html"
    done = pacekeeper("replay", str(write_run(tmp_path / "t")), "--report", str(where))
    assert done.returncode == ExitCode.HOST
    assert str(where) in done.stderr and "Traceback" not in done.stderr
