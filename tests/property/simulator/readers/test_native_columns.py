"""Lines of a trace file taken many at once are what they are one by one, whatever is wrong."""

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pacekeeper.core.telemetry.trace_jsonl import TraceHeader, record_line
from pacekeeper.simulator.readers import native_columns
from pacekeeper.simulator.readers.native_columns import Gathered, take_all
from support.records import records

HEADER = TraceHeader(job="moe", run_id=7, node="node-0")
odd: st.SearchStrategy[Any] = st.sampled_from([
    None, "", "x", True, -1, -1.0, 0, 0.5, 7, 1e9, 1e300, 2**53, 2**63, 2**70, 10**400, [], [1],
    [-1], ["a"], [1.5], [0] * 17, {}, float("nan"), float("inf"),
])  # fmt: skip
names = st.sampled_from([
    "kind", "rank", "step", "compute_s", "duration_s", "tokens", "wait_s", "transfer_s", "counts",
    "layer", "first_expert", "is_redone", "loss", "rows_over_16", "colour",
])  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> str:
    """A record's line, often with fields added, changed or left out, seldom no object at all."""
    line = record_line(draw(records))
    if draw(st.booleans()):
        return draw(st.sampled_from([line, line, line, f" {line}\t", line[:-1], f"{line}{line}"]))
    values: dict[str, Any] = json.loads(line)
    for name, value in draw(st.lists(st.tuples(names, odd), max_size=2)):
        values[name] = value
    if draw(st.integers(0, 4)) == 0:
        values.pop(draw(st.sampled_from(sorted(values))))
    return json.dumps(values)


def taken(text: Sequence[str]) -> tuple[Any, ...]:
    """What was gathered; of NaN the bytes, which are equal to themselves."""
    gathered = Gathered(header=HEADER)
    take_all(gathered, Path("file"), HEADER, iter(text))
    columns: list[array[float]] = [*gathered.micro_batches, *gathered.steps, *gathered.loads]
    return [column.tobytes() for column in columns], gathered.node_of, gathered.notes


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(lines(), max_size=12), at_once=st.integers(1, 5))
def test_many_at_once_are_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, text: list[str], at_once: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native_columns, "AT_ONCE", at_once)
        together = taken(text)
        one_by_one = dict.fromkeys(native_columns.MANY, lambda *_: False)
        patch.setattr(native_columns, "MANY", one_by_one)
        assert together == taken(text)
