"""`pacekeeper replay` as people and programs call it, on files made here."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.core.telemetry.trace_jsonl import TraceHeader, header_line, record_line
from pacekeeper.simulator.readers.formats import Format
from support.commands import pacekeeper
from support.tree import ROOT

NUM_RANKS, NUM_STEPS = 8, 40


def recorded(path: Path, *, late: int | None = None, bad: int = 0, dead: int | None = None) -> Path:
    """A run of eight ranks; `late` is ready 30 % of a step after all others, `dead` ends early."""
    random = np.random.default_rng(1)
    lines = [header_line(TraceHeader(job="moe", node="n"))]
    for step in range(NUM_STEPS):
        compute_s = 0.1 * random.lognormal(0.0, 0.01, NUM_RANKS)
        tokens = [1000] * NUM_RANKS
        if dead is not None:  # with uneven work, so that its part in the times is looked for
            tokens = random.integers(800, 1200, NUM_RANKS).tolist()
            compute_s *= np.array(tokens) / 1000.0
        if late is not None:
            compute_s[late] *= 1.3
        for rank in range(NUM_RANKS):
            if rank == dead and step >= NUM_STEPS // 2:
                continue
            lines.append(
                record_line(
                    MicroBatchRecord(
                        rank=rank, step=step, micro_batch=0, generation=1,
                        compute_s=float(compute_s[rank]), tokens=tokens[rank],
                        sum_len_squared=40_000, expert_rows=2000,
                        wait_s=float(compute_s.max() - compute_s[rank] + 0.005),
                    )
                )
            )  # fmt: skip
            step_s = float(compute_s.max()) + 0.01
            lines.append(
                record_line(
                    StepRecord(rank=rank, step=step, generation=1, duration_s=step_s, tokens=8000)
                )
            )
    path.write_text("\n".join([*lines, *["{torn"] * bad]) + "\n")
    return path


def test_a_program_gets_one_object_with_the_slow_rank(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(recorded(tmp_path / "t", late=5)), "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    answer = json.loads(done.stdout)
    assert set(answer) == {"S", "findings", "what_if", "notes"}
    compute = [f for f in answer["findings"] if f["kind"] == "compute"]
    assert {f["rank"] for f in compute} == {5}
    assert all(f["slowdown_low"] <= f["slowdown"] <= f["slowdown_high"] for f in compute)
    assert {"first_step", "last_step", "tier", "reason", "stage"} <= set(compute[0])


def test_a_healthy_run_accuses_nobody(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(recorded(tmp_path / "t")))
    assert done.returncode == ExitCode.OK, done.stderr
    assert "8 ranks, 40 steps" in done.stdout
    assert "nothing was found" in done.stdout


def test_a_rank_that_dies_half_way_is_nothing_to_warn_of(tmp_path: Path) -> None:
    done = pacekeeper("replay", str(recorded(tmp_path / "t", dead=3)))
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")


@pytest.mark.parametrize("form", Format)
def test_every_format_is_described(form: Format) -> None:
    assert f"| `{form}` |" in (ROOT / "docs" / "traces.md").read_text()


def test_damaged_lines_are_told_to_people_and_programs(tmp_path: Path) -> None:
    path = recorded(tmp_path / "t", bad=3)
    assert "3 damaged lines left out" in pacekeeper("replay", str(path)).stdout
    (note, *_) = json.loads(pacekeeper("replay", str(path), "--json").stdout)["notes"]
    assert "3 damaged lines left out" in note


def test_of_several_runs_each_is_judged(tmp_path: Path) -> None:
    rows = [f"{run},{step},0.5" for run in "ab" for step in range(80)]
    path = tmp_path / "s.csv"
    path.write_text("\n".join(["run,step,duration_s", *rows]))
    answer = json.loads(pacekeeper("replay", str(path), "--json").stdout)
    assert (answer["S"], answer["findings"], answer["what_if"]) == (None, [], None)
    assert [run["run"] for run in answer["runs"]] == ["s:a", "s:b"]
    one = json.loads(pacekeeper("replay", str(path), "--run", "1", "--json").stdout)
    assert set(one) == {"S", "findings", "what_if", "notes"}
    assert "2 runs" in pacekeeper("replay", str(path)).stdout
    beyond = pacekeeper("replay", str(path), "--run", "2")
    assert beyond.returncode == ExitCode.DATA and "0 to 1" in beyond.stderr


def test_a_directory_may_hold_other_files_too(tmp_path: Path) -> None:
    recorded(tmp_path / "moe.trace.jsonl", late=5)
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "s.csv").write_text("step,duration_s\n1,0.5\n")
    several = pacekeeper("replay", str(tmp_path))
    assert several.returncode == ExitCode.DATA
    assert "native (1), steps (1); name a file, or use --format" in several.stderr
    answer = json.loads(pacekeeper("replay", str(tmp_path), "--format", "native", "--json").stdout)
    assert answer["findings"][0]["rank"] == 5
    assert answer["notes"][0] == "2 files left out, no trace of this kind: README.md, s.csv"


def test_the_report_is_one_page_with_its_picture(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    done = pacekeeper("replay", str(recorded(tmp_path / "t", late=2)), "--report", str(page))
    assert done.returncode == ExitCode.OK, done.stderr
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert "compute" in text and "http" not in text.split("</head>")[1]


def test_a_pipe_is_no_file_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = pacekeeper("replay", str(tmp_path / "pipe"))
    assert done.returncode == ExitCode.DATA
    assert "neither a file nor a directory; write it to a file first" in done.stderr


@pytest.mark.parametrize(
    ("content", "arguments", "code", "words"),
    [
        pytest.param(None, (), ExitCode.DATA, "no such file", id="nothing there"),
        pytest.param(b"hello", (), ExitCode.DATA, "no format that can be read", id="no format"),
        pytest.param(b"", (), ExitCode.DATA, "no format that can be read", id="empty"),
        pytest.param(
            b"\x1f\x8bgarbage", (), ExitCode.DATA, "pacekeeper: ", id="not really gzipped"
        ),
        pytest.param(
            b"hello", ("--format", "native"), ExitCode.DATA, "no JSON", id="not the format named"
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
    done = pacekeeper("replay", str(recorded(tmp_path / "t")), "--report", str(where))
    assert done.returncode == ExitCode.HOST
    assert "report" in done.stderr and "Traceback" not in done.stderr
