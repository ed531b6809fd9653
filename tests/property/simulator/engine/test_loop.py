"""The event loop: no second is lost or told twice, and a walk second by second sees the same."""

from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.simulator.cluster.history import History
from pacekeeper.simulator.engine.event_loop import MOST_POINTS, simulate
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.policies.base import Policy, Use
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting
from pacekeeper.simulator.policies.lazarus import Lazarus
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper
from support.examples import examples
from support.sim_jobs import EXACT, histories, small_job
from support.sim_walk import Walk

POLICIES: tuple[Policy, ...] = (
    Restarting(group_size=1, checkpoint_steps=None, costs=EXACT),
    Restarting(group_size=2, checkpoint_steps=3, costs=EXACT),
    Regrouping(group_size=2, checkpoint_steps=3, costs=EXACT),
    Lazarus(checkpoint_steps=4, review_steps=5, costs=EXACT),
    Pacekeeper(checkpoint_steps=4, review_steps=5, costs=EXACT),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@settings(max_examples=examples(25), deadline=None)
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
    # Computing is what the steps that count take at full pace, and no policy passes the limit.
    paced_s = outcome.steps * job.balanced_step_s
    assert isclose(outcome.spent_s[Use.TRAINED], paced_s, abs_tol=1e-6)
    assert outcome.samples <= outcome.fluid_samples + 1e-6
    assert outcome == simulate(history, job, even_routing(2, 2), policy, seed=seed)


@settings(max_examples=examples(120), deadline=None)
@given(
    history=histories(),
    every=st.integers(1, 5),
    step_s=st.integers(1, 4),
)
def test_a_walk_second_by_second_sees_the_same(history: History, every: int, step_s: int) -> None:
    job = small_job(balanced_step_s=float(step_s))
    policy = Restarting(group_size=1, checkpoint_steps=every, costs=EXACT)
    outcome = simulate(history, job, even_routing(2, 2), policy)
    walk = Walk(every=every, step_s=step_s)
    walk.through(history)
    told = {use: round(taken_s, 6) for use, taken_s in outcome.spent_s.items()}
    assert {use: taken_s for use, taken_s in told.items() if taken_s} == {
        use: float(taken_s) for use, taken_s in walk.spent.items() if taken_s
    }
    assert (outcome.samples, outcome.restarts) == (walk.samples, walk.restarts)


@settings(max_examples=examples(25), deadline=None)
@given(history=histories(is_paced=True), policy=st.sampled_from(POLICIES[:4]))
def test_few_points_tell_as_many_samples_at_every_moment_within_their_distance(
    history: History, policy: Policy
) -> None:
    """Bends that are near to each other are one; what was lost stays lost."""
    job = small_job()
    ledgers = []
    for most in (MOST_POINTS, 6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pacekeeper.simulator.engine.event_loop.MOST_POINTS", most)
            ledgers.append(simulate(history, job, even_routing(2, 2), policy).points)
    all_points, few = ledgers
    assert few[-1] == all_points[-1]
    losses = [sum(b - a for (_, b), (_, a) in pairwise(p) if b < a) for p in ledgers]
    assert isclose(*losses)
    num_losses = sum(b < a for (_, a), (_, b) in pairwise(few))
    assert len(few) <= 2 * 6 + 3 + 3 * num_losses
