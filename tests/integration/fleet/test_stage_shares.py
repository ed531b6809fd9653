"""A whole fleet in which a plan gives pipelines other rows by stage, and the engine follows it."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.asking import Asking, assert_no_step_is_lost, quick_fleet, quick_job, until

pytest.importorskip("transformers")

# Of the pipelines of ranks 0 and 1, and of 2 and 3: each has a slow stage, and another one.
VICTIMS = (0, 3)


def test_rows_are_divided_by_the_speeds_of_each_stage(tmp_path: Path) -> None:
    config = replace(
        quick_job(tmp_path, seed=1), num_stages=2, rows_per_microbatch=4, emulated_step_s=0.2
    )
    with quick_fleet(tmp_path, config) as fleet:
        ask = Asking(fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
        assert ask.layout().stage_shares == ()
        for rank in VICTIMS:
            fleet.set_fault(rank, 2.0)
        until("rows differ by stage", lambda: is_relieved(ask.layout().stage_shares))
        followed = ask.job().step
        until("training goes on", lambda: ask.job().step >= followed + 3)
        actions = [text for one in ask.faults() for text in one.actions]
        assert any("other rows at each stage" in text for text in actions)
        for rank in VICTIMS:
            fleet.set_fault(rank, 1.0)
        until("the layout goes home", lambda: ask.layout().stage_shares == ())
    assert_no_step_is_lost(fleet, range(4))


def is_relieved(shares: tuple[tuple[float, ...], ...]) -> bool:
    """Whether at either stage the pipeline with the slow rank has less than half of the rows."""
    return bool(shares) and shares[0][0] < 0.5 and shares[1][1] < 0.5
