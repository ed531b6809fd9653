"""Step times of others: read from CSV, JSON lines and archives, or refused with a reason."""

from pathlib import Path

import numpy as np
import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.readers.step_times import read_archive, read_runs


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def archive(path: Path, **columns: list[int]) -> Path:
    np.savez(path, **{name: np.array(values) for name, values in columns.items()})  # type: ignore[arg-type]
    return path


def test_a_csv_file_tells_steps_times_and_tokens(tmp_path: Path) -> None:
    text = "step,seconds,tokens\n5,0.2501,100\n6,0.3,\n"
    (trace,) = read_runs(written(tmp_path / "run.csv", text))
    assert trace.name == "run" and trace.steps is not None
    assert trace.steps.step.tolist() == [5, 6]
    assert trace.steps.duration_s.tolist() == [0.2501, 0.3]
    assert trace.steps.tokens[0] == 100 and np.isnan(trace.steps.tokens[1])
    assert np.isnan(trace.steps.sum_len_squared).all()
    assert trace.resolution_s == 0.0 and trace.notes == ()


@pytest.mark.parametrize(
    ("text", "num_left_out"),
    [
        ('{"step": 1, "duration_s": 0.5}\n\n{"step": 9, "duration_s": 0.75}\nnot json\n', 1),
        ("step,duration_s\n1,0.5\n2,-1\n3,nan\n4,inf\nx,1\n1.5,1\ninf,1\n8,0\n9,0.75\n", 7),
    ],
)
def test_rows_without_a_possible_step_and_time_are_left_out_and_counted(
    tmp_path: Path, text: str, num_left_out: int
) -> None:
    (trace,) = read_runs(written(tmp_path / "run.csv", text))
    assert trace.steps is not None
    assert trace.steps.step.tolist() == [1, 9]
    assert trace.steps.duration_s.tolist() == [0.5, 0.75]
    (note,) = trace.notes
    assert note.startswith(f"{num_left_out} ")


@pytest.mark.parametrize(
    ("times", "resolution_s"),
    [("0.035 0.036", 1e-3), ("3 4", 1.0), ("0.0351 0.0362", 0.0), ("2 2", 0.0)],
)
def test_a_coarse_clock_is_seen_in_its_times(
    tmp_path: Path, times: str, resolution_s: float
) -> None:
    rows = "".join(f"{i},{time}\n" for i, time in enumerate(times.split()))
    (trace,) = read_runs(written(tmp_path / "run.csv", "step,duration_s\n" + rows))
    assert trace.resolution_s == resolution_s


@pytest.mark.parametrize("text", ["", "step,loss\n1,2\n", "step,duration_s\n1,0\n", "{}\n"])
def test_a_file_without_step_times_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"run\.csv"):
        read_runs(written(tmp_path / "run.csv", text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_runs(tmp_path / "nothing.csv")
    with pytest.raises(DataError):
        read_archive(tmp_path / "nothing.npz")


def test_each_run_of_an_archive_is_a_trace_of_its_own(tmp_path: Path) -> None:
    first, second = read_archive(
        archive(
            tmp_path / "steps.npz",
            offset=[0, 3, 6],
            step_delta=[1, 1, 2, 10, 1, 1],
            ms_delta=[500, 35, 72, 9, 40, 41],
        )
    )
    assert first.steps is not None and second.steps is not None
    assert first.steps.step.tolist() == [2, 4]
    assert first.steps.duration_s.tolist() == pytest.approx([0.035, 0.036])
    assert second.steps.step.tolist() == [11, 12]
    assert first.resolution_s == 1e-3 and (first.name, second.name) == ("steps:0", "steps:1")


def test_steps_across_a_clock_that_was_set_back_have_no_time(tmp_path: Path) -> None:
    (trace,) = read_archive(
        archive(
            tmp_path / "steps.npz",
            offset=[0, 5],
            step_delta=[1, 1, 1, 0, 1],
            ms_delta=[9, 35, -900, 35, 36],
        )
    )
    assert trace.steps is not None
    assert trace.steps.step.tolist() == [2, 4]
    assert trace.notes == ("2 steps without a time left out",)


def test_what_is_no_archive_of_step_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="ms_delta"):
        read_archive(archive(tmp_path / "a.npz", offset=[0, 1], step_delta=[1]))
    with pytest.raises(DataError, match="do not fit"):
        read_archive(archive(tmp_path / "b.npz", offset=[0, 9], step_delta=[1], ms_delta=[1]))
    with pytest.raises(DataError):
        read_archive(written(tmp_path / "c.npz", "step,duration_s"))
