"""Histories of nodes: read, drawn, cut and capped."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.cluster.fault_generator import FaultKind, FaultRule, drawn_history
from pacekeeper.simulator.cluster.fault_log import read_faults
from pacekeeper.simulator.cluster.history import History, NodesJoined, NodesLost, SpeedChanged
from pacekeeper.simulator.cluster.membership import capped, first_nodes
from pacekeeper.simulator.cluster.spot_trace import read_spot

EVENTS = "0,add,a\n0,add,b\n60000,remove,a\n120000,add,c\n"
INTERVALS = (
    '[0, "add", {"nodes": ["a", "b"], "duration": 60000}]\n'
    '[60000, "no-op", {"nodes": [], "duration": 60000}]\n'
    '[120000, "remove", {"nodes": ["b"], "duration": 60000}]\n'
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def fault(node: str, days: float, what: str, kind: str = "GPU lost") -> dict[str, Any]:
    return {
        "node_id": node,
        "event_time": days,
        "event_type": what,
        "fault_type": {"Level": "x", "Class": "GPU", "Desc": kind},
    }


def test_events_by_name_become_numbers_in_the_order_of_joining(tmp_path: Path) -> None:
    history = read_spot(written(tmp_path, EVENTS))
    assert history.num_nodes == 3 and history.duration_s == 120.0
    assert history.changes == (
        NodesJoined(at_s=0.0, nodes=(0, 1)),
        NodesLost(at_s=60.0, nodes=(0,)),
        NodesJoined(at_s=120.0, nodes=(2,)),
    )


def test_intervals_last_until_the_end_of_the_last_one(tmp_path: Path) -> None:
    history = read_spot(written(tmp_path, INTERVALS))
    assert history.duration_s == 180.0
    assert history.num_there() == ((0.0, 2), (120.0, 1))


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("0,2\n10,1\n20,3\n", ((0.0, 2), (10.0, 1), (20.0, 3))),
        ("0.0,2\n0.5,1\n", ((0.0, 2), (1800.0, 1))),
        (
            "2021-12-11, 11:00:00, 2\n2021-12-11, 11:01:00, 1\n2021-12-11, 11:02:00, 1\n",
            ((0.0, 2), (60.0, 1)),
        ),
        ("0,1\n0,4\n10,2\n10,4\n", ((0.0, 4),)),
    ],
)
def test_counts_lose_the_newest_node_first(
    tmp_path: Path, text: str, points: tuple[tuple[float, int], ...]
) -> None:
    assert read_spot(written(tmp_path, text)).num_there() == points


def test_the_unit_of_counts_can_be_told(tmp_path: Path) -> None:
    assert read_spot(written(tmp_path, "0,1\n2000,2\n"), unit_s=1e-3).duration_s == 2.0


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [
        ("0,1\n780000,2\n40920000,3\n", 40_920.0),  # Parcae's form: eleven hours, not 473 days
        ("0,1\n780000,2\n40920001,3\n", 40_920_001.0),
        ("0,1\n780000,2\n", 780_000.0),
    ],
)
def test_counts_at_whole_thousands_up_to_a_million_and_more_are_in_milliseconds(
    tmp_path: Path, text: str, duration_s: float
) -> None:
    assert read_spot(written(tmp_path, text)).duration_s == duration_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("0,add,a\n1,move,a\n", "line 2: expected ms,add|remove,name"),
        ("0,add,a\nx,remove,a\n", "line 2: expected a time"),
        ("0,add,a\n9,remove,b\n", "are away"),
        ("0,add,a\n9,add,a\n", "are there"),
        ("9,add,a\n0,add,b\n", "times run backwards"),
        ("0,2\n5,-1\n", "line 2: expected a number of nodes"),
        ('[0, "add", {"nodes": "a"}]\n', "line 1"),
        ('[0, "add", {"nodes": ["a"], "duration": 1}\n', "line 1"),
        ("a,b,c,d\n", "line 1: expected ms,add|remove,name"),
        ("2021-12-11, 11:00:00, 2\n2021-13-11, 11:01:00, 1\n", "line 2: expected date"),
    ],
)
def test_what_is_no_history_is_refused_by_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError) as refused:
        read_spot(path)
    assert str(path) in str(refused.value) and said in str(refused.value)


def test_a_node_is_away_while_any_of_its_faults_is_open(tmp_path: Path) -> None:
    entries = [
        fault("x", 1.0, "fault_start", "A"),
        fault("x", 2.0, "fault_start", "B"),
        fault("x", 3.0, "fault_end", "A"),
        fault("x", 4.0, "fault_end", "B"),
        fault("y", 5.0, "fault_end", "A"),
        fault("y", 6.0, "fault_start", "A"),
        fault("y", 7.0, "fault_start", "A"),
    ]
    path = tmp_path / "faults.json.gz"
    path.write_bytes(gzip.compress(json.dumps(entries).encode()))
    history = read_faults(path, num_nodes=5)
    day = 86400.0
    assert history.num_there() == ((0.0, 5), (day, 4), (4 * day, 5), (6 * day, 4))
    assert history.notes == (
        "1 faults that end without a beginning left out",
        "1 faults that begin twice left out",
    )
    with pytest.raises(DataError, match="names 2 nodes, expected at most 1"):
        read_faults(path, num_nodes=1)


def test_fail_slow_kinds_slow_a_node_where_a_speed_is_given(tmp_path: Path) -> None:
    entries = [
        fault("x", 1.0, "fault_start", "NIC Link Speed low"),
        fault("x", 2.0, "fault_start", "GPU lost"),
        fault("x", 3.0, "fault_end", "GPU lost"),
        fault("x", 4.0, "fault_end", "NIC Link Speed low"),
    ]
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(entries))
    changes = read_faults(path, num_nodes=2, slow_speed=0.5).changes[1:]
    assert [type(change) for change in changes] == [
        SpeedChanged, NodesLost, NodesJoined, SpeedChanged, SpeedChanged,
    ]  # fmt: skip
    assert [c.speed for c in changes if isinstance(c, SpeedChanged)] == [0.5, 0.5, 1.0]
    assert not any(isinstance(c, SpeedChanged) for c in read_faults(path, num_nodes=2).changes)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", "[1]", '[{"node_id": "x", "event_time": -1}]', "[" * 9999]
)
def test_what_is_no_fault_log_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"faults\.json"):
        read_faults(path, num_nodes=9)


def test_a_part_of_a_history_begins_with_who_is_there(tmp_path: Path) -> None:
    history = History(
        name="x",
        num_nodes=2,
        duration_s=10.0,
        changes=(
            NodesJoined(at_s=0.0, nodes=(0, 1)),
            SpeedChanged(at_s=1.0, node=1, speed=0.5),
            NodesLost(at_s=2.0, nodes=(0,)),
            NodesJoined(at_s=6.0, nodes=(0,)),
        ),
    )
    part = history.cut(start_s=3.0, duration_s=5.0)
    assert part.changes == (
        NodesJoined(at_s=0.0, nodes=(1,)),
        SpeedChanged(at_s=0.0, node=1, speed=0.5),
        NodesJoined(at_s=3.0, nodes=(0,)),
    )
    with pytest.raises(ValueError, match="no part"):
        history.cut(start_s=8.0, duration_s=5.0)


def test_a_job_keeps_its_nodes_and_gets_only_those_that_join_later() -> None:
    history = History(
        name="x",
        num_nodes=6,
        duration_s=10.0,
        changes=(
            NodesJoined(at_s=0.0, nodes=(0, 1, 2, 3)),
            NodesLost(at_s=2.0, nodes=(1, 3)),
            NodesJoined(at_s=4.0, nodes=(4, 5)),
        ),
    )
    assert first_nodes(history) == (0, 1, 2, 3)
    mine = capped(history, max_nodes=2, seed=0, always=(1,))
    (other,) = set(mine.changes[0].nodes) - {1}  # type: ignore[union-attr]
    lost = (1, 3) if other == 3 else (1,)
    assert mine.changes[1] == NodesLost(at_s=2.0, nodes=lost)
    assert mine.changes[2] == NodesJoined(at_s=4.0, nodes=(4, 5)[: len(lost)])
    assert mine == capped(history, max_nodes=2, seed=0, always=(1,))
    assert len({capped(history, max_nodes=2, seed=s).changes[0] for s in range(20)}) > 3
    with pytest.raises(ValueError, match="always"):
        capped(history, max_nodes=1, seed=0, always=(0, 1))


def test_drawn_faults_come_in_turn_and_are_mended() -> None:
    rule = FaultRule(
        kinds=(FaultKind.STOP, FaultKind.SLOW), every_s=10.0, slow_speed=0.5, mended_after_s=15.0
    )
    history = drawn_history(rule, num_nodes=8, duration_s=30.0, seed=3)
    kinds = [(c.at_s, type(c)) for c in history.changes]
    assert kinds == [
        (0.0, NodesJoined), (10.0, NodesLost), (20.0, SpeedChanged), (25.0, NodesJoined),
    ]  # fmt: skip
    assert history == drawn_history(rule, num_nodes=8, duration_s=30.0, seed=3)
    drawn = {drawn_history(rule, num_nodes=8, duration_s=30.0, seed=s).changes for s in range(9)}
    assert len(drawn) > 3


def test_a_rack_stops_with_all_its_nodes_and_they_come_back_together() -> None:
    rule = FaultRule(
        kinds=(FaultKind.SLOW, FaultKind.RACK), every_s=10.0, mended_after_s=35.0, nodes_per_rack=3
    )
    for seed in range(20):
        history = drawn_history(rule, num_nodes=8, duration_s=100.0, seed=seed)
        away = [c for c in history.changes if isinstance(c, NodesLost)]
        assert away and {change.nodes for change in away} <= {(0, 1, 2), (3, 4, 5), (6, 7)}
        slow = [c for c in history.changes if isinstance(c, SpeedChanged) and c.speed != 1.0]
        assert slow[0].node not in away[0].nodes, "a rack with a slow node is not whole"
        back = [c for c in history.changes if isinstance(c, NodesJoined)][1:]
        assert [c.nodes for c in back] == [c.nodes for c in away if c.at_s + 35.0 < 100.0]
    with pytest.raises(ValueError, match="nodes_per_rack: expected at least 1"):
        FaultRule(kinds=(FaultKind.RACK,), every_s=1.0, nodes_per_rack=0)


def test_faults_that_never_mend_leave_the_last_ones_alone() -> None:
    rule = FaultRule(kinds=(FaultKind.STOP,), every_s=1.0)
    assert drawn_history(rule, num_nodes=2, duration_s=9.0, seed=0).num_there()[-1] == (2.0, 0)
