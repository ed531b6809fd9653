"""Whatever happened to a recorded file: a verdict that says what was left out, or one line."""

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pacekeeper.cli.analysis.replay import verdicts_document
from pacekeeper.core.errors import DataError
from pacekeeper.predictor.recorded.analyze import analyze
from pacekeeper.simulator.readers.registry import open_runs
from support.examples import examples
from support.foreign_traces import FILES, TABLES, Row, csv_text

relaxed = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
odd = st.sampled_from(
    [None, "", "nan", "inf", "-inf", -1, 0, 1, 2**31, 2**63, 10**400, 1e-300, 1e300, "x", "0x1",
     "forward-compute", "[1]", 3.5, True]
)  # fmt: skip


def replayed(path: Path) -> dict[str, Any] | None:
    """The answer to programs; None where the file was refused, and then by its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing may be said beside the answer
            verdicts = [(trace, analyze(trace)) for trace in open_runs(path)]
    except DataError as error:
        assert path.name in str(error) and "\n" not in str(error), error
        return None
    answer = verdicts_document(verdicts)
    json.dumps(answer, allow_nan=False)
    for finding in answer["findings"]:
        assert finding["slowdown_low"] <= finding["slowdown"] <= finding["slowdown_high"], finding
        assert finding["reason"]
    return answer


def test_what_is_not_damaged_is_read(tmp_path: Path) -> None:
    for name, make in FILES.items():
        (tmp_path / name).write_bytes(make())
        assert replayed(tmp_path / name) is not None, name
    for name, rows in TABLES.items():
        (tmp_path / name).write_text(csv_text(rows()))
        assert replayed(tmp_path / name) is not None, name


def test_a_single_operation_and_a_job_without_a_whole_step(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text(csv_text(TABLES["bytedance"]()[:1]))
    assert replayed(tmp_path / "one.csv") is not None
    lines = FILES["native"]().decode().splitlines()
    of_work = [line for line in lines if '"micro_batch"' in line]
    apart = [lines[0], of_work[0], of_work[5], of_work[10]]  # each rank tells another step
    (tmp_path / "apart").write_text("\n".join(apart))
    assert replayed(tmp_path / "apart") is not None


def test_times_of_which_none_can_be_used_are_said(tmp_path: Path) -> None:
    timers = dict.fromkeys(("fwd-encoder|total", "backward-compute|total"))
    untimed = [row | timers for row in TABLES["smartmoe"]()]
    idle = [row for row in TABLES["bytedance"]() if row["optype"] == "optimizer"]
    for rows in (untimed, idle):
        (tmp_path / "none.csv").write_text(csv_text(rows))
        answer = replayed(tmp_path / "none.csv")
        assert answer is not None
        assert any("no compute time" in note for note in answer["notes"])


@pytest.mark.parametrize("name", FILES)
@relaxed
@given(data=st.data())
def test_damaged_bytes(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(FILES[name]())
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    damaged = bytes(content[:cut])
    if data.draw(st.booleans()):
        packed = gzip.compress(damaged)
        damaged = packed[: data.draw(st.integers(0, len(packed)) | st.just(len(packed)))]
    path = tmp_path / "damaged.file"
    path.write_bytes(damaged)
    replayed(path)


@pytest.mark.parametrize("name", [name for name in FILES if name != "archive"])
@relaxed
@given(data=st.data())
def test_lines_lost_doubled_and_moved(tmp_path: Path, name: str, data: st.DataObject) -> None:
    first, *lines = FILES[name]().decode().splitlines()
    if lines:
        picked = data.draw(st.lists(st.sampled_from(range(len(lines))), max_size=2 * len(lines)))
        lines = [lines[at] for at in picked]
    path = tmp_path / "damaged.file"
    path.write_text("\n".join([first, *lines]))
    replayed(path)


@pytest.mark.parametrize("name", ["native", "nccl-inspector", "kineto", "megatron-routing"])
@relaxed
@given(data=st.data())
def test_values_that_can_not_be(tmp_path: Path, name: str, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in FILES[name]().decode().splitlines()]
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.sampled_from(lines))
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and data.draw(st.integers(0, 3)):
                place = place[key]
                continue
            place[key] = data.draw(odd)
            break
    path = tmp_path / "damaged.file"
    path.write_text("\n".join(map(json.dumps, lines)))
    replayed(path)


@pytest.mark.parametrize("name", TABLES)
@relaxed
@given(data=st.data())
def test_tables_of_other_shapes(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """Columns lost and in another order, cells of other types, rows lost, doubled and moved."""
    rows: list[Row] = TABLES[name]()
    columns = data.draw(st.permutations(list(rows[0])))
    columns = columns[: data.draw(st.integers(0, len(columns)) | st.just(len(columns)))] or ["x"]
    mode = data.draw(st.sampled_from(["all", "few", "one", "none", "shuffled"]))
    if mode == "few":
        rows = [rows[at] for at in data.draw(st.lists(st.sampled_from(range(len(rows)))))]
    elif mode == "one":
        key = data.draw(
            st.sampled_from(["rank", "step", "iteration", "stage", "pp_rank", "setting"])
        )
        rows = [row for row in rows if row.get(key, 0) == rows[0].get(key, 0)]
    elif mode == "shuffled":
        rows = data.draw(st.permutations(rows)) if len(rows) < 60 else rows[::-1]
    table = [{column: row.get(column) for column in columns} for row in rows if mode != "none"]
    for _ in range(data.draw(st.integers(0, 6)) if table else 0):
        row = data.draw(st.sampled_from(table))
        row[data.draw(st.sampled_from(columns))] = data.draw(odd)
    form = data.draw(st.sampled_from(["csv", "csv.gz", "jsonl", "parquet"]))
    path = tmp_path / f"damaged.{form}"
    text = csv_text(table) if table else ",".join(columns)
    if form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        cells = {
            column: [_alike(row[column], [r[column] for r in table]) for row in table]
            for column in columns
        }
        parquet.write_table(arrow.table(cells), path)
    elif form == "jsonl":
        path.write_text("\n".join(map(json.dumps, table)))
    elif form == "csv.gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    replayed(path)


def _alike(value: Any, column: list[Any]) -> Any:
    """Parquet columns have one type: text, if not all are small numbers."""
    small = all(
        cell is None or (isinstance(cell, int | float) and abs(cell) < 2**60) for cell in column
    )
    if value is None or small:
        return None if value is None else float(value)
    return str(value)
