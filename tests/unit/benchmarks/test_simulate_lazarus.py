"""What `benchmarks.simulate_lazarus` makes of outcomes, and of the recorded nodes if there."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from benchmarks.simulate_lazarus import (
    LOST_AT_34,
    MAX_NODES,
    share_lost,
    show,
    summary,
    the_span,
)
from rich.console import Console

from pacekeeper.core.errors import DataError
from pacekeeper.simulator.cluster.history import NodesLost
from pacekeeper.simulator.cluster.membership import capped
from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.policies.base import Use

DATA = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
OUTCOME = SimulationResult(
    policy="x",
    seed=0,
    duration_s=10.0,
    samples=100.0,
    fluid_samples=200.0,
    steps=5,
    spent_s=dict.fromkeys(Use, 0.0) | {Use.TRAINED: 10.0},
    restarts=0,
    needless_restarts=0,
    reconfigurations=0,
    copied_bytes=0,
    points=((0.0, 0.0), (10.0, 100.0)),
    decisions=(),
)
needs_traces = pytest.mark.skipif(not (DATA / "spot_bamboo").exists(), reason="needs the traces")


def told(**samples: float) -> dict[str, list[SimulationResult]]:
    return {name: [replace(OUTCOME, samples=count)] for name, count in samples.items()}


def test_a_bar_is_met_by_ratio_above_lazarus_and_without_needless_restarts() -> None:
    good = told(checkpoint=100.0, checkpoint_low=110.0, lazarus=200.0, ours=230.0)
    assert summary(good, 2.3)["met"] is True
    assert summary(good, 2.31)["met"] is False
    assert summary(good | told(lazarus=231.0), 2.3)["met"] is False
    needless = {"ours": [replace(OUTCOME, samples=230.0, needless_restarts=1)]}
    assert summary(good | needless, 2.3)["met"] is False
    assert summary(good, 2.3)["ours_over_low"] == pytest.approx(230.0 / 110.0, abs=1e-3)


def test_the_table_has_a_head_over_each_use_of_the_time() -> None:
    rows = summary(told(checkpoint=100.0, checkpoint_low=110.0, lazarus=200.0, ours=230.0), 2.3)
    file = StringIO()
    show("x", rows, Console(file=file, width=160))
    heads, ours = (
        [
            cell.strip()
            for cell in line.strip("\u2503\u2502\n").replace("\u2503", "\u2502").split("\u2502")
        ]
        for line in file.getvalue().splitlines()
        if "policy" in line or "ours" in line
    )
    assert heads[-1] == "computing" and ours[-1] == "100.0%"


@needs_traces
def test_four_of_the_ten_nodes_are_lost_in_minute_34_as_the_paper_says() -> None:
    history = the_span(DATA)
    always = [int(name[4:]) - 1 for name in LOST_AT_34]
    for seed in range(5):
        mine = capped(history, max_nodes=MAX_NODES, seed=seed, always=always)
        lost = [change for change in mine.changes if isinstance(change, NodesLost)]
        assert lost[0].at_s == 34 * 60.0 and set(lost[0].nodes) == set(always)
        assert max(count for _, count in mine.num_there()) == MAX_NODES


@needs_traces
def test_the_likelihood_of_a_loss_comes_from_other_traces_than_the_one_that_is_played() -> None:
    assert 0.0 < share_lost(DATA) < 0.5


def test_the_share_lost_is_of_any_trace_but_p3(tmp_path: Path) -> None:
    folder = tmp_path / "spot_bamboo"
    folder.mkdir()
    (folder / "p3-trace.csv").write_text("0,add,a\n0,add,b\n9,remove,a\n")
    with pytest.raises(DataError, match="no trace but P3"):
        share_lost(tmp_path)
    (folder / "g4dn-trace.csv").write_text("0,add,a\n0,add,b\n0,add,c\n0,add,d\n9,remove,a\n")
    assert share_lost(tmp_path) == 0.25
