"""The event loop: no second is lost or told twice, and a walk second by second sees the same."""

from collections import Counter
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.simulator.changes import Change, History, NodesJoined, NodesLost
from pacekeeper.simulator.policy_checkpoint import Regrouping, Restarting
from pacekeeper.simulator.policy_lazarus import Lazarus
from pacekeeper.simulator.policy_pacekeeper import Pacekeeper
from pacekeeper.simulator.routing import even_routing
from pacekeeper.simulator.sim_policy import Policy, Use
from pacekeeper.simulator.simulate import simulate
from support.sim_jobs import EXACT, histories, small_job

POLICIES: tuple[Policy, ...] = (
    Restarting(group_size=1, checkpoint_steps=None, costs=EXACT),
    Restarting(group_size=2, checkpoint_steps=3, costs=EXACT),
    Regrouping(group_size=2, checkpoint_steps=3, costs=EXACT),
    Lazarus(checkpoint_steps=4, review_steps=5, costs=EXACT),
    Pacekeeper(checkpoint_steps=4, review_steps=5, costs=EXACT),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@settings(max_examples=40, deadline=None)
@given(history=histories(is_paced=True), seed=st.integers(0, 3))
def test_every_second_and_every_sample_is_told_once(
    policy: Policy, history: History, seed: int
) -> None:
    job = small_job()
    outcome = simulate(history, job, even_routing(2, 2), policy, seed=seed)
    assert isclose(sum(outcome.spent_s.values()), history.duration_s, abs_tol=1e-6)
    assert all(spent_s >= -1e-9 for spent_s in outcome.spent_s.values()), outcome.spent_s
    times = [at_s for at_s, _ in outcome.points]
    assert times == sorted(times) and times[-1] <= history.duration_s
    assert isclose(outcome.points[-1][1], outcome.samples)
    assert outcome.samples <= outcome.steps * history.num_nodes * job.samples_per_node + 1e-9
    assert outcome == simulate(history, job, even_routing(2, 2), policy, seed=seed)


@settings(max_examples=200, deadline=None)
@given(
    history=histories(),
    every=st.integers(1, 5),
    step_s=st.integers(1, 4),
)
def test_a_walk_second_by_second_sees_the_same(history: History, every: int, step_s: int) -> None:
    job = small_job(balanced_step_s=float(step_s))
    policy = Restarting(group_size=1, checkpoint_steps=every, costs=EXACT)
    outcome = simulate(history, job, even_routing(2, 2), policy)
    spent, samples, restarts = walked(history, every=every, step_s=step_s)
    assert {use: round(taken_s, 6) for use, taken_s in outcome.spent_s.items() if taken_s} == {
        use: float(taken_s) for use, taken_s in spent.items() if taken_s
    }
    assert (outcome.samples, outcome.restarts) == (samples, restarts)


def walked(history: History, *, every: int, step_s: int) -> tuple[Counter[Use], int, int]:
    """`Restarting` with groups of one node, one second after the other."""
    save, restart, wait, per_node = 3, 7, 4, 3
    spent: Counter[Use] = Counter()
    nodes, waiting, layout, target = set[int](), set[int](), set[int](), set[int]()
    phases: list[list[int]] = []  # [0: save, 1: restart; seconds left]
    unsaved: list[int] = []
    samples = restarts = into = 0
    let_in = -1
    is_fresh = True

    def end_phase() -> None:
        nonlocal unsaved, layout
        if phases.pop(0)[0] == 0:
            unsaved = []
        if not phases:
            layout = set(target)

    def roll_back() -> None:
        nonlocal samples, unsaved, restarts
        spent[Use.REDONE] += step_s * len(unsaved)
        spent[Use.TRAINED] -= step_s * len(unsaved)
        samples -= sum(unsaved)
        unsaved = []
        restarts += 1

    def go_on(*, is_grown: bool) -> None:
        nonlocal target, phases, layout, is_fresh
        target = set(nodes)
        if is_fresh and nodes:
            is_fresh, layout = False, set(nodes)
        elif is_grown and layout:
            phases = [[0, save], [1, restart]]
        else:
            roll_back()
            layout = set()
            phases = [[1, restart]] if nodes else []

    by_second: dict[int, list[Change]] = {}
    for change in history.changes:
        by_second.setdefault(int(change.at_s), []).append(change)
    for now in range(int(history.duration_s)):
        lost: set[int] = set()
        for change in by_second.get(now, []):
            if isinstance(change, NodesLost):
                lost |= set(change.nodes)
                nodes -= lost
                waiting -= lost
            elif isinstance(change, NodesJoined):
                if not waiting:
                    let_in = now + (0 if is_fresh else wait)
                waiting |= set(change.nodes)
        if lost & (layout | (target if phases else set())):
            spent[Use.BROKEN_OFF] += into
            into, phases = 0, []
            go_on(is_grown=False)
        while not into:
            if phases and not phases[0][1]:
                end_phase()
            elif phases:
                break
            elif layout and len(unsaved) >= every:
                phases, target = [[0, save]], set(layout)
            elif waiting and now >= let_in:
                nodes |= waiting
                waiting = set()
                go_on(is_grown=True)
            else:
                break
        if phases:
            spent[(Use.SAVED, Use.RESTARTED)[phases[0][0]]] += 1
            phases[0][1] -= 1
            if not phases[0][1]:
                end_phase()
        elif not layout:
            spent[Use.WAITED] += 1
        else:
            into += 1
            if into == step_s:
                spent[Use.TRAINED] += step_s
                unsaved.append(len(layout) * per_node)
                samples += unsaved[-1]
                into = 0
    spent[Use.BROKEN_OFF] += into
    return spent, samples, restarts
