"""When a run of `failover_time` has passed: only if every fault was done and had an effect."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from benchmarks.failover_faults import FAULTS
from benchmarks.failover_tally import (
    BAR_S,
    COMMANDS_BAR_S,
    SERVES_BAR_S,
    ZERO,
    Tally,
    Times,
)
from benchmarks.failover_time import schedule


class World:
    """A host that has neither faketime nor the right to mount."""

    clocks = disk = None

    def __init__(self) -> None:
        self.random, self.left_out = Random(1), list[str]()


def test_faults_that_a_host_cannot_do_are_named_and_not_replaced_by_nothing() -> None:
    world: Any = World()
    needy = [kind for kind in FAULTS if kind.needs]
    assert len(needy) >= 2
    assert schedule(world, needy, 5) == []
    assert len(world.left_out) == len(needy)
    world = World()
    assert len(schedule(world, FAULTS, 40)) == 40
    assert len(world.left_out) == len(needy)


def tally() -> Tally:
    """A run of two faults in which all went well."""
    times = Times(leads_s=2.0, serves_s=3.0, commands_s=4.0)
    return Tally(
        asked=2,
        sums=Counter(faults=2, plans_applied=1),
        times={"direct: kill leader": [times, times]},
        takeovers=[times, times],
    )


def test_a_run_passes_only_if_all_its_faults_were_done_and_nothing_was_lost() -> None:
    assert tally().figures()["passed"]
    too_few = tally()
    too_few.asked = 3
    left_out = tally()
    left_out.left_out.append("disk full (needs mount)")
    assert not too_few.figures()["passed"] and not left_out.figures()["passed"]


@pytest.mark.parametrize("name", ZERO)
def test_a_run_with_one_of_these_has_not_passed(name: str) -> None:
    one = tally()
    one.sums[name] = 1
    assert not one.figures()["passed"]


@pytest.mark.parametrize(
    "times",
    [
        Times(leads_s=BAR_S + 0.1, serves_s=4.0, commands_s=4.0),
        Times(leads_s=None, serves_s=SERVES_BAR_S + 0.1, commands_s=4.0),
        Times(leads_s=None, serves_s=4.0, commands_s=COMMANDS_BAR_S + 0.1),
    ],
)
def test_a_late_leader_does_not_pass_whatever_the_fault(times: Times) -> None:
    late = tally()
    late.times["direct: server restart"] = [times]
    assert not late.figures()["passed"]


def test_a_run_without_plans_or_without_takeovers_has_not_passed() -> None:
    no_plans, no_takeovers = tally(), tally()
    no_plans.sums["plans_applied"] = 0
    no_takeovers.takeovers = []
    assert not no_plans.figures()["passed"] and not no_takeovers.figures()["passed"]
