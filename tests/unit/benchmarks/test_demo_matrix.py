"""The demo's matrix: a run without relief never passes, and none is judged by a busy host."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import demo_matrix
from benchmarks.demo_matrix import is_judged, main, misses_of, worst_of

GOOD: dict[str, Any] = {
    "injected_rank": 2, "found_rank": 2, "seed": 0, "found_slowdown": 1.6, "injected_slowdown": 1.6,
    "delay_iterations": 2, "false_findings": 0, "degraded_of_fluid": 0.7,
    "mitigated_of_fluid": 0.97, "host_was_measured": False, "kill_to_next_step_s": 0.4,
    "devices_busy_healthy": 0.9, "devices_busy_mitigated": 0.9, "host_overrun_share": 0.0,
    "steps_lost": 0, "loss_first": 5.0, "loss_last": 4.0,
}  # fmt: skip
NO_RELIEF = GOOD | {"degraded_of_fluid": 0.84, "mitigated_of_fluid": 0.86}
BUSY = GOOD | {"degraded_of_fluid": 1.136, "mitigated_of_fluid": 1.146, "host_was_measured": True}


def test_a_good_run_misses_nothing() -> None:
    assert is_judged(GOOD)
    assert misses_of(GOOD, "compute") == []


def test_a_run_without_relief_fails_however_fast_it_was() -> None:
    assert misses_of(NO_RELIEF, "compute") == ["half of the loss is back"]


def test_a_run_that_was_never_mitigated_fails_both_bars() -> None:
    missed = misses_of(GOOD | {"mitigated_of_fluid": None}, "compute")
    assert missed == ["mitigated >= 0.85 of fluid", "half of the loss is back"]


def test_where_the_host_was_measured_only_the_mitigation_is_not_judged() -> None:
    assert misses_of(BUSY, "compute") == []
    assert misses_of(BUSY | {"mitigated_of_fluid": 0.6}, "compute") == []
    assert misses_of(BUSY | {"steps_lost": 1}, "compute") == ["no step lost"]
    figures = worst_of([GOOD, BUSY], 0)
    assert (figures["runs"], figures["runs_with_mitigation_judged"]) == (2, 1)
    assert figures["mitigated_of_fluid_max"] == 0.97


def test_of_a_stopped_rank_no_slowdown_is_asked() -> None:
    unknown = GOOD | {"found_slowdown": 3.0}
    assert misses_of(unknown, "compute") == ["slowdown within 10 %"]
    assert misses_of(unknown, "stop") == []


def played(monkeypatch: pytest.MonkeyPatch, *outcomes: dict[str, Any] | None) -> None:
    """The demos to come end so, each leaving a log."""
    to_come = list(outcomes)

    def run(*given: Any) -> dict[str, Any] | None:
        given[-1].mkdir(exist_ok=True)
        (given[-1] / "run.log").write_text("log")
        return to_come.pop(0)

    monkeypatch.setattr(demo_matrix, "run_demo", run)


def test_each_row_is_there_before_the_next_run_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def run(*_: Any) -> dict[str, Any]:
        seen.append(len(capsys.readouterr().out.splitlines()))
        return GOOD

    monkeypatch.setattr(demo_matrix, "run_demo", run)
    assert main(["--seeds", "1", "--ranks", "0", "1", "2"]) == 0
    assert seen == [1, 1, 1], "the head, then one row per run"


def test_runs_that_missed_a_bar_are_kept_and_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, GOOD, NO_RELIEF, None)
    code = main(["--seeds", "1", "--ranks", "0", "1", "2", "--keep", str(tmp_path / "kept")])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1 and json.loads(lines[-1])["runs_that_missed_a_bar"] == 2
    assert "half of the loss is back" in lines[2] and "the demo failed" in lines[3]
    kept = sorted(path.relative_to(tmp_path / "kept") for path in tmp_path.rglob("run.log"))
    assert [str(path.parent) for path in kept] == ["rank-1-seed-0", "rank-2-seed-0"]


def test_a_demo_that_failed_before_it_had_a_directory_leaves_nothing_to_keep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, NO_RELIEF)
    played_one = demo_matrix.run_demo
    monkeypatch.setattr(
        demo_matrix, "run_demo", lambda *given: None if given[0] else played_one(*given)
    )
    assert main(["--seeds", "1", "--ranks", "0", "1", "--keep", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-seed-0"]


def test_a_matrix_that_could_judge_no_mitigation_has_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, BUSY)
    assert main(["--seeds", "1", "--ranks", "0"]) == 1
    assert "not judged: the host was measured" in capsys.readouterr().out
