"""Checkpoints made another way: when they count, and what partial ones remember."""

from dataclasses import replace

import pytest
from benchmarks.checkpoint_policies import DynamicK, PartsSaved, SavingAs

from pacekeeper.simulator.cluster.history import Change, History, NodesJoined, NodesLost
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.policies.base import Policy, Saving, Use
from pacekeeper.simulator.policies.checkpoint_restart import Restarting
from support.sim_jobs import EXACT, small_job

AT_ONCE = replace(EXACT, grow_wait_s=0.0)
RESTARTING = Restarting(group_size=2, costs=AT_ONCE)


def run(policy: Policy, *lost_s: float) -> SimulationResult:
    """Two nodes in steps of 2 s; at these moments one is lost, and is replaced at once."""
    changes: list[Change] = [NodesJoined(at_s=0.0, nodes=(0, 1))]
    for at, at_s in enumerate(lost_s):
        changes += [NodesLost(at_s=at_s, nodes=(at,)), NodesJoined(at_s=at_s, nodes=(at + 2,))]
    history = History(name="x", num_nodes=9, duration_s=100.0, changes=tuple(changes))
    return simulate(history, small_job(), even_routing(2, 2), policy)


def saving(*, stop_s: float, behind_s: float, every: int) -> SavingAs:
    return SavingAs(
        name="x",
        inner=RESTARTING,
        saving=Saving(stop_s=stop_s, behind_s=behind_s),
        checkpoint_steps=every,
    )


def test_a_window_that_is_whole_as_the_next_one_begins_loses_up_to_two() -> None:
    window = saving(stop_s=0.0, behind_s=6.0, every=3)  # of three steps
    assert run(window).spent_s[Use.REDONE] == 0.0
    # Windows begin after 6, 12, 18 s; that of 12 s is whole at 18 s.
    assert run(window, 18.5).spent_s[Use.REDONE] == 6.0
    assert run(window, 23.5).spent_s[Use.REDONE] == 10.0
    assert run(window, 17.5).spent_s[Use.REDONE] == 10.0


def test_a_checkpoint_begins_only_when_the_last_one_is_whole() -> None:
    slow = saving(stop_s=1.0, behind_s=9.0, every=1)
    outcome = run(slow)
    # Each holds training for 1 s; five steps take the 9 s that it is written behind them.
    assert outcome.spent_s[Use.SAVED] == pytest.approx(100.0 / 11.0, abs=1.0)
    # The one of 14 s was whole at 23 s.
    assert run(slow, 24.5).spent_s[Use.REDONE] == 10.0


def test_who_waits_comes_in_as_survivors_regroup() -> None:
    outcome = run(saving(stop_s=0.0, behind_s=0.0, every=1), 50.0)
    assert outcome.restarts == 1 and outcome.spent_s[Use.WAITED] == 0.0


def test_partial_experts_say_anew_what_a_checkpoint_costs_after_each_doubling() -> None:
    policy = DynamicK(
        name="x",
        inner=RESTARTING,
        checkpoint_steps=1,
        num_experts=4,
        first_experts=1,
        saving_of=lambda experts: Saving(stop_s=experts - 1.0, behind_s=0.0),
        lost_of=lambda experts: 0.1 / experts,
        budget=0.16,
    )
    parts = PartsSaved(experts=1)
    seen = []
    for _ in range(8):
        parts = policy.after_restart(parts)
        seen.append(parts.experts)
    assert seen == [1, 2, 2, 2, 2, 4, 4, 4]
    assert run(policy, 10.0).spent_s[Use.SAVED] == 0.0
    # After the second loss each step of 2 s is followed by 1 s of saving.
    twice = run(policy, 10.0, 30.0).spent_s
    assert twice[Use.SAVED] == pytest.approx(twice[Use.TRAINED] / 2.0 - 10.0, abs=4.0)
