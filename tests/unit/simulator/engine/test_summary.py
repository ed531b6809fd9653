"""Outcomes in rows: means, intervals, ratios seed by seed, and rates in windows."""

from dataclasses import replace

import pytest

from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.engine.statistics import rates, summarize, with_interval
from pacekeeper.simulator.policies.base import Use

OUTCOME = SimulationResult(
    policy="x",
    seed=0,
    duration_s=10.0,
    samples=20.0,
    fluid_samples=40.0,
    steps=5,
    spent_s=dict.fromkeys(Use, 0.0) | {Use.TRAINED: 8.0, Use.REDONE: 2.0},
    restarts=1,
    needless_restarts=1,
    reconfigurations=0,
    copied_bytes=7,
    points=((0.0, 0.0), (5.0, 10.0), (5.0, 4.0), (10.0, 20.0)),
    decisions=(),
)


def test_ratios_are_taken_seed_by_seed() -> None:
    first = [OUTCOME, replace(OUTCOME, samples=40.0)]
    second = [replace(OUTCOME, samples=40.0), replace(OUTCOME, samples=40.0)]
    base, row = summarize({"first": first, "second": second})
    assert (base.ratio, base.ratio_95) == (1.0, 0.0)
    assert row.ratio == 1.5 and row.samples == 40.0 and row.needless_restarts == 2
    # Student's t with one degree of freedom: 12.706 x 0.5.
    assert row.ratio_95 == pytest.approx(12.706 * 0.5, rel=1e-3)
    assert base.samples_per_s == 3.0 and row.samples_per_s_95 == 0.0
    assert base.spent[Use.TRAINED] == 0.8 and sum(base.spent.values()) == pytest.approx(1.0)


def test_one_seed_tells_no_interval() -> None:
    (row,) = summarize({"x": [OUTCOME]})
    assert row.ratio_95 is row.fluid_95 is row.samples_per_s_95 is None
    assert (with_interval(None, 0.5, ".1%"), with_interval(0.25, 0.5, ".2f")) == (
        "50.0%",
        "0.50 +- 0.25",
    )


def test_a_policy_that_trained_nothing_is_no_base() -> None:
    (none, some) = summarize({"none": [replace(OUTCOME, samples=0.0)], "some": [OUTCOME]})
    assert none.ratio == some.ratio == 0.0


def test_rates_tell_what_was_trained_whether_it_counted_or_not() -> None:
    (early, late) = rates(OUTCOME, 2)
    assert early == pytest.approx((2.5, 2.0)) and late == pytest.approx((7.5, 3.2))
