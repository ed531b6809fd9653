"""Whatever happened to a recorded history: it is read, or refused in one line with its name."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.cluster.fault_log import read_faults
from pacekeeper.simulator.cluster.history import History
from pacekeeper.simulator.cluster.spot_trace import read_spot
from support.examples import examples

EVENTS = "0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n"
COUNTS = "0,2\n10,1\n20,3\n"
DATED = "2021-12-11, 11:00:00, 2\n2021-12-11, 11:01:00, 1\n"
INTERVALS = (
    '[0, "add", {"nodes": ["a"], "duration": 9}]\n[9, "no-op", {"nodes": [], "duration": 9}]\n'
)
FAULTS = json.dumps(
    [
        {"node_id": "x", "event_time": 1.5, "event_type": what, "fault_type": {"Desc": "GPU lost"}}
        for what in ("fault_start", "fault_end")
    ]
)
odd = st.sampled_from(
    ["", "nan", "-1", "1e999", "x", "\x00", ",", "\n", "[", "]", '"', "0", "9" * 30]
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """The text with a part of it replaced, or cut off."""
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 12)))
    return text[:start] + draw(odd) + (text[end:] if draw(st.booleans()) else "")


@settings(max_examples=examples(300), deadline=None)
@given(text=st.sampled_from([EVENTS, COUNTS, DATED, INTERVALS]).flatmap(damaged))
def test_a_damaged_spot_trace(text: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.csv")
        path.write_text(text)
        try:
            assert isinstance(read_spot(path), History)
        except DataError as error:
            assert "trace.csv" in str(error) and "\n" not in str(error), error


@settings(max_examples=examples(300), deadline=None)
@given(text=damaged(FAULTS))
def test_a_damaged_fault_log(text: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "faults.json")
        path.write_text(text)
        try:
            assert isinstance(read_faults(path, num_nodes=3), History)
        except DataError as error:
            assert "faults.json" in str(error) and "\n" not in str(error), error
