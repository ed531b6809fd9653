"""EPLB's tables of plans and layouts in files: what EPLB promises of them, and read back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pacekeeper.cli.planning.eplb import check_suffix, layout_tables, write_tables
from pacekeeper.cli.planning.inputs import read_loads, read_replica_ranks
from pacekeeper.controller.planning.eplb import Tables, tables_of
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.layout.even_layout import even_layout

REPLICAS = [[[0, 1], [2], [3]], [[1], [0, 2, 3], [1]]]  # layers, experts, devices


def read(file: Path) -> dict[str, Any]:
    if file.suffix == ".npz":
        with np.load(file) as arrays:
            return {name: arrays[name] for name in arrays.files}
    return {name: np.array(values) for name, values in json.loads(file.read_text()).items()}


def check_tables(phy2log: Any, log2phy: Any, logcnt: Any) -> None:
    """What every result of EPLB's `rebalance_experts` satisfies."""
    layers, slots = phy2log.shape
    assert logcnt.shape[0] == log2phy.shape[0] == layers
    assert log2phy.shape[2] == logcnt.max()
    assert (logcnt >= 1).all() and (logcnt.sum(axis=1) == slots).all()
    for layer in range(layers):
        for expert, count in enumerate(logcnt[layer]):
            own = log2phy[layer, expert]
            assert (phy2log[layer, own[:count]] == expert).all()
            assert len(set(own[:count])) == count and (own[count:] == -1).all()


@pytest.mark.parametrize("name", ["plan.npz", "plan.json"])
def test_a_written_plan_holds_eplbs_tables_and_is_read_back(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    write_tables(file, tables_of(REPLICAS, 4, 2))
    tables = read(file)
    check_tables(**tables)
    there = read_replica_ranks(file, 4)
    for planned, layer in zip(REPLICAS, there, strict=True):
        for before, after in zip(planned, layer, strict=True):
            assert set(before) <= set(after)


def test_free_slots_go_to_the_experts_with_most_load_each() -> None:
    loads: npt.NDArray[np.float64] = np.array([[1.0, 9.0, 5.0]])
    tables = tables_of([[[0], [1], [0]]], 2, 2, loads=loads)
    assert tables.logcnt.tolist() == [[1, 1, 2]]
    with pytest.raises(ValueError, match="slots"):
        tables_of([[[0], [1], [0]]], 2, 1)


def test_a_layout_of_stages_names_the_ranks_of_each_layer() -> None:
    layout = even_layout(ranks=range(2, 10), num_layers=4, num_experts=6, replicas=2, num_stages=2)
    tables, layers, ranks = layout_tables(layout)
    check_tables(*tables)
    assert layers == [0, 1, 2, 3] and ranks == [list(layout.ranks_of_layer(n)) for n in layers]
    slots = tables.phy2log.shape[1] // len(ranks[0])
    for layer, on in zip(layers, ranks, strict=True):
        for slot, expert in enumerate(tables.phy2log[layer]):
            held = [replica.rank for replica in layout.experts[layer][expert]]
            assert on[slot // slots] in held  # this layout leaves no slot free


def test_layers_of_different_sizes_have_no_tables() -> None:
    layout = even_layout(ranks=range(3), num_layers=2, num_experts=0, replicas=1)
    with pytest.raises(ValueError, match="layer"):
        layout_tables(layout)


@pytest.mark.parametrize(
    "wrong", [{"phy2log": [[0, 9]]}, {"phy2log": [0, 1]}, {"phy2log": [[0.5, 1.0]]}, {"logcnt": 1}]
)
def test_tables_that_are_none_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"phy2log": [[0, 1]], "logcnt": [[1, 1]]} | wrong))
    with pytest.raises(DataError):
        read_replica_ranks(file, 2)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        check_suffix(tmp_path / "plan.pt")


def test_loads_are_read_from_a_recorded_run(tmp_path: Path) -> None:
    lines = [
        {"step": step, "block": "decoder", "layer": layer, "rank": 0, "num_tokens": 2, "topk": 1,
         "top_indices": [[layer], [2]]}
        for step in (0, 1) for layer in (0, 1)
    ]  # fmt: skip
    trace = tmp_path / "router_trace_rank0.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    assert read_loads(tmp_path) == read_loads(trace) == [[2.0, 0.0, 2.0], [0.0, 2.0, 2.0]]
    (tmp_path / "steps.csv.gz").write_bytes(b"step,duration_s\n1,0.5\n2,0.5\n")
    with pytest.raises(DataError, match="expert loads"):
        read_loads(tmp_path / "steps.csv.gz")


def test_tables_name_their_parts() -> None:
    assert Tables._fields == ("phy2log", "log2phy", "logcnt")
