"""Scenarios of pipelined jobs: a description, faults of its devices, and who knows such jobs."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.cli.analysis.simulate import simulation_document
from pacekeeper.cli.analysis.simulate_report import write_report
from pacekeeper.core.errors import PacekeeperError
from pacekeeper.simulator.cluster.history import NodesLost
from pacekeeper.simulator.engine.statistics import summarize
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.scenario.loader import Scenario, read_scenario, run_scenario
from pacekeeper.simulator.scenario.pipeline import KINDS
from support.scenarios import Tables, written
from support.tree import ROOT

DESCRIPTION: dict[str, Any] = {
    "model": {"num_attention_shards": 4, "num_mlp_shards": 8, "boundary_bytes": 1e6},
    "layers": [
        {"count": 4, "attention_s": 0.1, "mlp_s": 0.3, "attention_bytes": 1e9, "mlp_bytes": 1e9,
         "activation_bytes": 1e8},
    ],
    "devices": {"num_nodes": 2, "ranks_per_node": 4, "memory_bytes": 1e12},
    "links": {"inside_bytes_per_s": 1e11, "between_bytes_per_s": 1e10},
    "home": {"tensor": 2, "data": 2, "stages": 2, "rows_per_batch": 4, "num_microbatches": 4},
}  # fmt: skip
TABLES: Tables = {
    "scenario": {"seeds": 1},
    "failures": {
        "source": "drawn",
        "num_nodes": 8,
        "kinds": "slow+stop",
        "slow_speed": 0.5,
        "every_s": 400.0,
        "mended_after_s": 700.0,
        "duration_s": 1500.0,
    },
    "job": {"partition": "job.json", "samples_per_row": 2.0, "tokens_per_row": 64},
    "policies": {
        **{kind: {"kind": kind, "checkpoint_steps": 50} for kind in KINDS},
        "strong": {"kind": "recycle", "strengthened": True, "checkpoint_steps": 50},
    },
}


def scenario(
    folder: Path, *, table: str = "", description: dict[str, Any] | None = None, **values: Any
) -> Scenario:
    """The small one, with these values in a table instead; None: without."""
    tables = deepcopy(TABLES)
    if table:
        changed = {**tables.get(table, {}), **values}
        tables[table] = {key: value for key, value in changed.items() if value is not None}
    (folder / "job.json").write_text(json.dumps(DESCRIPTION | (description or {})))
    return read_scenario(written(folder / "small.toml", tables))


def test_every_policy_for_such_jobs_is_played_told_and_shown(tmp_path: Path) -> None:
    known = scenario(tmp_path)
    assert isinstance(known.job, PipelineJob) and known.job.samples_per_row == 2.0
    found = run_scenario(known)
    rows = summarize(found)
    for row in rows:
        assert sum(row.spent.values()) == pytest.approx(1.0) and 0.0 < row.fluid <= 1.0 + 1e-9
    samples = {row.policy: row.samples for row in rows}
    assert samples["pacekeeper"] == max(samples.values()) > 1.2 * samples["none"]
    assert samples["strong"] >= samples["recycle"]
    json.dumps(simulation_document(known, found, rows), allow_nan=False)
    write_report(tmp_path / "page.html", known, found, rows)
    page = (tmp_path / "page.html").read_text()
    assert "2 pipelines of 2 stages, 2 devices each, with 4 micro-batches" in page


def test_of_one_seed_all_policies_meet_the_same_faults_and_seeds_differ(tmp_path: Path) -> None:
    known = scenario(tmp_path)
    assert known.history(3) == known.history(3) != known.history(4)
    assert known.history(3).num_nodes == 8


def test_all_devices_of_a_node_may_stop_at_once(tmp_path: Path) -> None:
    known = scenario(
        tmp_path, table="failures", kinds="rack", nodes_per_rack=4, every_s=600.0, slow_speed=None
    )
    away = [c.nodes for c in known.history(0).changes if isinstance(c, NodesLost)]
    assert away and {*away} <= {(0, 1, 2, 3), (4, 5, 6, 7)}
    (ours,) = run_scenario(known)["pacekeeper"]  # each stage stands on one node: its state is gone
    assert ours.restarts == len(away) and ours.needless_restarts == 0


def test_the_example_is_a_scenario() -> None:
    known = read_scenario(ROOT / "examples" / "simulate_pipelines.toml")
    assert {"degraded", "resihp", "pacekeeper"} <= known.policies.keys()
    assert known.history(0) == known.history(0) != known.history(1)


@pytest.mark.parametrize(
    ("table", "values", "said"),
    [
        ("job", {"partition": "none.json"}, "none.json: No such file"),
        ("job", {"partition": ""}, "[job] partition: expected a path"),
        ("job", {"partition": "\0"}, "[job] partition: expected a path"),
        ("job", {"samples_per_row": None}, "[job] samples_per_row: missing"),
        ("job", {"samples_per_row": 0.0}, "[job] samples_per_row: expected above 0"),
        ("job", {"tokens_per_row": 10**10}, "[job] tokens_per_row: expected above 0, at most"),
        ("job", {"num_layers": 3}, "[job] num_layers: unknown key"),
        ("failures", {"num_nodes": 9}, "[failures] num_nodes: 9, the job has 8 devices"),
        ("failures", {"kinds": "rack"}, "[failures] nodes_per_rack: missing, kinds with 'rack'"),
        ("failures", {"nodes_per_rack": -1}, "[failures] nodes_per_rack: expected at least 0"),
        ("failures", {"kinds": "fire"}, "[failures] kinds: expected rack or slow or stop"),
        ("failures", {"max_nodes": 4}, "[failures]: a pipelined job begins with all"),
        ("failures", {"source": "spot", "file": "x"}, "[failures]: a pipelined job begins"),
        ("routing", {"every_steps": 5}, "[routing]: a pipelined job spreads its experts evenly"),
        ("policies", {"x": {"kind": "lazarus"}}, "[policies.x] kind: expected one of none, ada"),
        ("policies", {"x": 3}, "[policies.x]: expected a table"),
        (
            "policies",
            {"x": {"kind": "none", "group_size": 2}},
            "[policies.x] group_size: unknown key",
        ),
        (
            "policies",
            {"x": {"kind": "resihp", "strengthened": True}},
            "[policies.x] strengthened: only recycle and oobleck",
        ),
        (
            "policies",
            {"x": {"kind": "none", "checkpoint_steps": -1}},
            "[policies.x] checkpoint_steps: expected at least 0",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_what_was_expected(
    tmp_path: Path, table: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(PacekeeperError) as refused:
        scenario(tmp_path, table=table, **values)
    assert said in str(refused.value), refused.value
    assert "small.toml" in str(refused.value) or "none.json" in str(refused.value)


def test_a_description_that_is_no_job_or_slow_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PacekeeperError, match=r"job\.json: \[speeds\]: a scenario begins"):
        scenario(tmp_path, description={"speeds": {"3": 0.5}})
    with pytest.raises(PacekeeperError, match=r"job\.json: \[links\] inside_bytes_per_s: missing"):
        scenario(tmp_path, description={"links": {}})


def test_squares_that_would_take_longer_than_attention_are_refused(tmp_path: Path) -> None:
    (tmp_path / "documents.csv").write_text("n\n10000\n")
    asked: dict[str, Any] = {"file": "documents.csv", "column": "n"}
    with pytest.raises(PacekeeperError, match=r"\[lengths\] doubling_tokens: .* 25% in all"):
        scenario(tmp_path, table="lengths", doubling_tokens=2.0, **asked)
    scenario(tmp_path, table="lengths", doubling_tokens=1e6, **asked)
