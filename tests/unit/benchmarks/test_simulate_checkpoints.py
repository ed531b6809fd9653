"""What `benchmarks.simulate_checkpoints` asks of windows, failures and policies."""

import pytest
from benchmarks.checkpoint_policies import DynamicK
from benchmarks.simulate_checkpoints import (
    EXPERTS,
    FIRST_EXPERTS,
    HELD,
    NODES,
    TOKENS_LOST,
    Setting,
    block_costs,
    budget_bytes,
    history_of,
    job_of,
    lost_tokens,
    played,
    policies,
    published_window,
    window_steps,
)

from pacekeeper.core.checkpoint.sparse_window import plan_window
from pacekeeper.simulator.cluster.history import NodesJoined, NodesLost
from pacekeeper.simulator.policies.base import Use

SETTING = Setting()


def test_windows_fit_what_a_step_can_copy_and_ours_is_no_longer_than_the_published_one() -> None:
    costs = block_costs()
    budget = budget_bytes(costs)
    ours, theirs = plan_window(costs, budget), published_window(costs, budget)
    for window in (ours, theirs):
        assert max(window.saved_bytes(costs)) <= budget
        assert sorted(block for turn in window.turns for block in turn) == sorted(costs)
    assert 1 < len(ours.turns) <= len(theirs.turns)
    assert window_steps() == {"moevement": len(theirs.turns), "windows": len(ours.turns)}
    with pytest.raises(ValueError, match="no window saves"):
        published_window(dict(list(costs.items())[:3]), 1.0)


def test_the_blocks_are_the_whole_model() -> None:
    state = sum(cost.state_bytes for cost in block_costs().values())
    assert state == pytest.approx(job_of(SETTING).state_bytes)


def test_a_spare_with_a_number_of_its_own_takes_the_place_of_each_node_that_fails() -> None:
    history = history_of(SETTING, 1)
    lost = [change for change in history.changes if isinstance(change, NodesLost)]
    back = [change for change in history.changes if isinstance(change, NodesJoined)]
    assert 50 < len(lost) < 95  # 72 are expected
    assert [change.at_s for change in lost] == [change.at_s for change in back[1:]]
    joined = [node for change in back for node in change.nodes]
    assert len(set(joined)) == len(joined) == NODES + len(lost)
    assert {number for _, number in history.num_there()} == {NODES}
    assert history != history_of(SETTING, 2) and history == history_of(SETTING, 1)


def test_windows_cost_what_the_formula_says() -> None:
    (windows,) = played(SETTING, 1, ("windows",))["windows"]
    lost = sum(isinstance(change, NodesLost) for change in history_of(SETTING, 0).changes)
    assert windows.restarts == lost
    # A window and a half is done again, the step under way among it.
    again_s = 1.5 * window_steps()["windows"] * SETTING.step_s
    restart_s = windows.spent_s[Use.RESTARTED] / lost
    mtbf_s = (windows.duration_s - lost * (restart_s + again_s)) / lost
    told = 1.0 / (1.0 + HELD) / (1.0 + (restart_s + again_s) / mtbf_s)  # MoEvement, section 2
    assert windows.samples / windows.fluid_samples == pytest.approx(told, abs=0.005)


def test_copies_spare_the_way_back() -> None:
    hour = Setting(hours=0.6)
    found = played(hour, 1, ("windows", "ours"))
    (windows,), (ours,) = found["windows"], found["ours"]
    assert windows.restarts > ours.restarts and ours.reconfigurations > 0
    assert ours.samples > windows.samples


def test_partial_experts_double_until_no_more_tokens_may_be_lost() -> None:
    moc = policies(SETTING)["moc"]
    assert isinstance(moc, DynamicK)
    few, experts = lost_tokens(moc, 3)
    assert few == pytest.approx(3.0 * moc.lost_of(FIRST_EXPERTS)) and experts == FIRST_EXPERTS
    numbers = [lost_tokens(moc, count)[1] for count in range(0, 400, 10)]
    assert numbers == sorted(numbers) and numbers[-1] == EXPERTS
    most, _ = lost_tokens(moc, 400)
    # The restart that passes a budget counts with those before it.
    assert TOKENS_LOST < most < TOKENS_LOST + 3.0 * moc.lost_of(FIRST_EXPERTS)
    assert moc.lost_of(EXPERTS) == 0.0
    assert moc.saving_of(EXPERTS).stop_s > moc.saving_of(FIRST_EXPERTS).stop_s == 0.0
