"""`pacekeeper plan partition`: what it reads, plans, prints and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pacekeeper.cli.planning.partition import partition
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.simulator.scenario.partition_spec import read_partition, read_problem
from support.tree import ROOT

EXAMPLE = ROOT / "examples" / "partition.toml"
SMALL: dict[str, Any] = {
    "model": {"num_attention_shards": 4, "num_mlp_shards": 8, "boundary_bytes": 1e6},
    "layers": [
        {"count": 3, "attention_s": 1.0, "mlp_s": 3.0, "attention_bytes": 1e9, "mlp_bytes": 1e9,
         "activation_bytes": 1e8},
        {"attention_s": 2.0, "mlp_s": 6.0, "attention_bytes": 1e9, "mlp_bytes": 1e9,
         "activation_bytes": 1e8},
    ],
    "devices": {"num_nodes": 1, "ranks_per_node": 4, "memory_bytes": 1e12},
    "links": {"inside_bytes_per_s": 1e11, "between_bytes_per_s": 1e10},
    "home": {"tensor": 2, "data": 1, "stages": 2, "rows_per_batch": 8, "num_microbatches": 4},
}  # fmt: skip


def written(tmp_path: Path, **tables: Any) -> Path:
    """A description with these tables instead; None: without."""
    document = {name: table for name, table in {**SMALL, **tables}.items() if table is not None}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    return path


def planned(path: Path, *more: str) -> dict[str, Any]:
    done = CliRunner().invoke(partition, [str(path), "--json", *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.output)
    return document


def test_the_example_is_planned_around_a_slow_rank() -> None:
    plan = planned(EXAMPLE, "--speeds", "5=0.5")
    assert plan["step_s"] < 0.75 * plan["present_step_s"]
    assert plan["fluid_fraction"] > 0.95 and plan["gap"] < 0.05
    held = {
        run["rank"]: run["end"] - run["first"]
        for pipeline in plan["pipelines"]
        for cell in pipeline["cells"]
        for run in cell["mlp"]
    }
    assert held[5] < held[4]
    assert len(plan["memory_bytes"]) == 16 and plan["moves"]["total_bytes"] > 0.0


def test_the_step_program_of_each_kind_of_pipeline_is_printed(tmp_path: Path) -> None:
    path = written(tmp_path)
    (program,) = planned(path, "--program")["programs"]
    assert program["pipelines"] == [0] and len(program["stages"]) == 2
    assert "programs" not in planned(path)


def test_layers_of_several_kinds_and_speeds_of_the_file_count(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, speeds={"3": 0.5}), {}, None)
    assert [layer.mlp_s for layer in problem.model.layers] == [3.0, 3.0, 3.0, 6.0]
    assert [device.speed for device in problem.devices] == [1.0, 1.0, 1.0, 0.5]
    over = read_problem(written(tmp_path, speeds={"3": 0.5}), {3: 0.25}, None)
    assert over.devices[3].speed == 0.25


def test_moves_are_counted_from_the_plan_that_runs_now(tmp_path: Path) -> None:
    path = written(tmp_path)
    first = planned(path, "--speeds", "1=0.5")
    (tmp_path / "now.json").write_text(json.dumps(first))
    assert read_partition(tmp_path / "now.json").rows_per_step == 32
    again = planned(path, "--speeds", "1=0.5", "--current", str(tmp_path / "now.json"))
    assert again["pipelines"] == first["pipelines"]
    assert again["moves"]["total_bytes"] == 0.0


def test_the_dead_have_no_work_and_the_living_keep_some_if_wished(tmp_path: Path) -> None:
    path = written(tmp_path)
    plan = planned(path, "--speeds", "1=0")
    assert plan["evicted"] == [1] and plan["present_step_s"] is None
    hopeless = planned(path, "--speeds", "1=0.001")
    assert hopeless["standby"] == [1]
    whole = planned(path, "--speeds", "1=0.001", "--whole")
    assert whole["standby"] == [] and whole["step_s"] > hopeless["step_s"]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"links": None}, r"\[links\]"),
        ({"link": {}}, r"\[link\]"),
        ({"model": {"num_attention_shards": 4}}, "num_mlp_shards"),
        ({"layers": {}}, "layers"),
        ({"layers": [{"count": 0}]}, "count"),
        ({"devices": {**SMALL["devices"], "ranks_per_node": 3}}, "3"),
        ({"devices": {**SMALL["devices"], "memory_bytes": 1e3}}, "memory"),
        ({"devices": {**SMALL["devices"], "num_nodes": 0}}, "num_nodes|node"),
        ({"home": {**SMALL["home"], "schedule": "gpipe"}}, "zero_bubble"),
        ({"home": {**SMALL["home"], "stages": "2"}}, "stages"),
        ({"speeds": {"first": 1.0}}, "RANK"),
        ({"speeds": {"7": 1.0}}, "7"),
        ({"speeds": {"1": -1.0}}, "speed"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_problem(written(tmp_path, **tables), {}, None)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none"):
        read_problem(tmp_path / "none.toml", {}, None)
    (tmp_path / "text.toml").write_text("no toml")
    with pytest.raises(DataError, match="text"):
        read_problem(tmp_path / "text.toml", {}, None)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="list"):
        read_problem(tmp_path / "list.json", {}, None)
    with pytest.raises(DataError, match="job"):
        read_partition(written(tmp_path))
    with pytest.raises(ConfigError, match="RANK=NUMBER"):
        CliRunner().invoke(
            partition, [str(written(tmp_path)), "--speeds", "1"], catch_exceptions=False
        )


def test_where_nothing_holds_the_model_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="job"):
        CliRunner().invoke(
            partition,
            [str(written(tmp_path)), "--speeds", "0=0,1=0,2=0,3=0"],
            catch_exceptions=False,
        )
