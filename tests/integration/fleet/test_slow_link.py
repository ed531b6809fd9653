"""A slow link of a running job, with real processes: a link is named, and nobody's computing."""

import json
from pathlib import Path

import pytest

from pacekeeper.cli.demo.fleet import Fleet
from support.asking import Asking, quick_fleet, until

VICTIM = 1


def order(fleet: Fleet, slowdown: float) -> None:
    """A fault of the rank's emulated link; 1.0 lifts it."""
    path = fleet.run_dir / "faults" / f"rank-{VICTIM}.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps({"slowdown": slowdown, "kind": "link"}))
    fresh.rename(path)


def test_a_slow_link_is_named_as_a_link_and_closed_when_it_is_well(tmp_path: Path) -> None:
    with quick_fleet(tmp_path, seed=5) as fleet:
        ask = Asking(fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
        order(fleet, 8.0)
        until("the link is found", lambda: bool(ask.faults()))
        (found,) = ask.faults()
        assert (found.kind, found.rank) == ("link", VICTIM)
        assert found.slowdown == pytest.approx(8.0, rel=0.1)
        assert "its link" in found.reason
        assert ask.job().generation == 1, "no layout avoids a link"
        order(fleet, 1.0)
        until("it is closed", lambda: ask.faults()[0].HasField("closed_unix_s"))
        assert len(ask.faults()) == 1
        assert {rank.state for rank in ask.job().ranks} == {"alive"}
