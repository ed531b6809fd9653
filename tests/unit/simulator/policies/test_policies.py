"""Policies of the simulated cluster: each keeps its published rules, ours runs the real code."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.predictor.cost.forecast import forecast
from pacekeeper.simulator.cluster.history import History, NodesJoined, NodesLost
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel, copied_bytes, with_replicas
from pacekeeper.simulator.jobs.expert_routing import Routing, even_routing
from pacekeeper.simulator.policies.base import PUBLISHED, Cause, Draws, Policy, Use
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting, grouped
from pacekeeper.simulator.policies.lazarus import Lazarus, placed
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper, model_of, workload_of
from support.sim_jobs import EXACT, small_job

SKEWED = np.array([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])


def job_of_four(**more: object) -> JobModel:
    return small_job(num_experts=4, slots_per_node=2, **more)


def run(
    policy: Policy, *lost: int, num_nodes: int = 6, back_s: float | None = None
) -> SimulationResult:
    """All nodes from the start; some are lost at 50 s, and perhaps join again."""
    changes = [NodesJoined(at_s=0.0, nodes=tuple(range(num_nodes)))]
    more = [] if not lost else [NodesLost(at_s=50.0, nodes=lost)]
    if back_s is not None:
        more.append(NodesJoined(at_s=back_s, nodes=lost))  # type: ignore[arg-type]
    history = History(name="x", num_nodes=num_nodes, duration_s=200.0, changes=(*changes, *more))
    routing = Routing(parts=SKEWED[None], steps=np.zeros(1, dtype=np.intp))
    return simulate(history, job_of_four(), routing, policy, seed=1)


def test_the_price_of_a_layout_is_that_of_the_predictor_that_knows_the_job() -> None:
    job = job_of_four()
    layout = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=2)
    speed = {1: 0.5}
    told = forecast(layout, model=model_of(job), workload=workload_of(job, SKEWED, 4), speeds=speed)
    assert job.step_s(layout, SKEWED, speed, Dispatch.BY_SHARES) == pytest.approx(told.step_s)


def test_evened_tokens_are_as_even_as_hosts_allow_and_padded_ones_as_long_as_the_busiest() -> None:
    job = job_of_four()
    layout = with_replicas((0, 1), [[{0: 1.0}, {0: 0.5, 1: 0.5}, {1: 1.0}, {1: 1.0}]])
    # The first layer's busy expert stands alone on a node: 0.7 of 1.0 there, or twice the mean.
    assert job.imbalance(layout, SKEWED[:1], Dispatch.EVENED) == pytest.approx(1.4, abs=1e-3)
    assert job.imbalance(layout, SKEWED[:1], Dispatch.BY_SHARES) == pytest.approx(1.5)
    assert job.imbalance(layout, SKEWED[:1], Dispatch.PADDED) == pytest.approx(4 * 0.7)
    # Half of the step is experts' and each node is at half speed: all takes twice as long.
    for dispatch in Dispatch:
        whole = job.step_s(layout, SKEWED[:1], {}, dispatch)
        assert job.step_s(layout, SKEWED[:1], {0: 0.5, 1: 0.5}, dispatch) == 2.0 * whole


def test_checkpointing_restarts_at_every_loss_and_fast_reconfiguration_only_at_lost_experts() -> (
    None
):
    restarting = run(Restarting(group_size=2, checkpoint_steps=5, costs=EXACT), 0)
    assert (restarting.restarts, restarting.needless_restarts) == (1, 1)
    regrouping = Regrouping(group_size=2, checkpoint_steps=5, costs=EXACT)
    assert (run(regrouping, 0).restarts, run(regrouping, 0).reconfigurations) == (0, 1)
    # Nodes 0, 2 and 4 are the first ones of all three groups: their experts are gone.
    gone = run(regrouping, 0, 2, 4)
    assert (gone.restarts, gone.needless_restarts) == (1, 0)


def test_nodes_that_make_no_whole_group_stand_idle_and_cost_nothing_when_lost() -> None:
    layout = grouped(range(7), 2, job_of_four())
    assert layout is not None and layout.ranks == (0, 1, 2, 3, 4, 5)
    policy = Restarting(group_size=2, checkpoint_steps=5, costs=EXACT)
    assert run(policy, 6, num_nodes=7).restarts == 0
    with pytest.raises(ValueError, match="group_size"):
        grouped(range(4), 1, job_of_four())


def test_without_checkpoints_a_loss_takes_everything() -> None:
    outcome = run(Restarting(group_size=2, checkpoint_steps=None, costs=EXACT), 0)
    assert outcome.spent_s[Use.REDONE] > 40.0 and outcome.spent_s[Use.SAVED] == 0.0


def test_lazarus_gives_replicas_by_load_and_keeps_columns_near() -> None:
    job = job_of_four()
    layout = placed(range(6), SKEWED, job, min_replicas=2)
    assert layout is not None
    number = [[len(on) for on in experts] for experts in layout.experts]
    assert min(map(min, number)) >= 2 and number[0][0] > number[0][1]
    again = placed(range(6), SKEWED, job, min_replicas=2, layout=layout)
    assert again is not None
    assert copied_bytes(layout, again, job) == 0
    assert placed(range(1), SKEWED, job, min_replicas=2) is None
    wide = small_job(num_experts=8, slots_per_node=3)
    parts = np.array([[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05]] * 2)
    ten = placed(range(10), parts, wide, min_replicas=2)
    assert ten is not None
    left = range(1, 10)
    near = placed(left, parts, wide, min_replicas=2, layout=ten)
    far = placed(left, parts, wide, min_replicas=2)
    assert near is not None and far is not None
    copies = [copied_bytes(ten, layout, wide) for layout in (near, far)]
    assert copies[0] < copies[1]


def test_lazarus_plans_once_for_loads_that_stay() -> None:
    told = run(Lazarus(costs=EXACT, review_steps=5), 0).decisions
    assert [one.cause for one in told] == [Cause.START, Cause.LOST]


def test_lazarus_and_ours_go_on_without_a_restart_while_a_copy_lives() -> None:
    for policy in (Lazarus(costs=EXACT), Pacekeeper(costs=EXACT)):
        for lost in range(6):
            outcome = run(policy, lost)
            assert (outcome.restarts, outcome.reconfigurations >= 1) == (0, True), policy.name


def test_what_is_refused_as_ranks_regroup_is_not_asked_again_once_they_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def counted(view: PlanningSnapshot, config: PolicyConfig) -> Decision:
        asked.append(view.by_survivors)
        return decide(view, config)

    monkeypatch.setattr("pacekeeper.simulator.policies.pacekeeper.decide", counted)
    history = History(
        name="x",
        num_nodes=6,
        duration_s=200.0,
        changes=(NodesJoined(at_s=0.0, nodes=tuple(range(6))), NodesLost(at_s=50.0, nodes=(0,))),
    )
    policy = Pacekeeper(costs=EXACT, config=PolicyConfig(settle_steps=5))
    outcome = simulate(history, job_of_four(), even_routing(2, 4), policy)
    assert outcome.reconfigurations == 1 and "no layout is better" in outcome.decisions[-1].reason
    assert asked == [False, True]  # as it had settled first, and as survivors regrouped


def test_no_node_holds_more_experts_than_it_has_slots() -> None:
    seen = []

    class Watched(Pacekeeper):
        def answer(self, moment, job):  # type: ignore[no-untyped-def]
            told = Pacekeeper.answer(self, moment, job)
            seen.append(told.layout)
            return told

    run(Watched(costs=EXACT), 0, 3, back_s=90.0)
    held = [
        sum(rank in [host.rank for host in hosts] for hosts in experts)
        for layout in seen
        if layout is not None
        for experts in layout.experts
        for rank in layout.ranks
    ]
    assert held and max(held) <= 2


def test_too_few_nodes_wait_and_go_on_from_the_checkpoint() -> None:
    for policy in (
        Restarting(group_size=2, checkpoint_steps=5, costs=EXACT),
        Lazarus(checkpoint_steps=5, costs=EXACT),
        Pacekeeper(checkpoint_steps=5, costs=EXACT),
    ):
        outcome = run(policy, 0, 1, 2, 3, 4, back_s=100.0)
        assert outcome.spent_s[Use.WAITED] == pytest.approx(54.0), policy.name
        assert outcome.samples > 0.0 and outcome.restarts == 1


def test_a_checkpoint_that_is_written_behind_counts_when_it_is_whole() -> None:
    behind = replace(EXACT, copy_s_per_byte=0.0, save_s_per_byte=1.0)  # 10 s behind the training
    policy = Pacekeeper(checkpoint_steps=20, costs=behind, review_steps=None)
    assert run(policy).spent_s[Use.SAVED] == 0.0
    # Everything is lost at 50 s: the copy of 44 s or so was not written yet.
    assert run(policy, *range(6)).samples == 0.0


def test_a_loss_breaks_a_checkpoint_off_and_the_next_one_is_due_at_once() -> None:
    behind = replace(EXACT, copy_s_per_byte=0.0, save_s_per_byte=1.0)
    history = History(
        name="x",
        num_nodes=6,
        duration_s=200.0,
        changes=(
            NodesJoined(at_s=0.0, nodes=tuple(range(6))),
            NodesLost(at_s=50.0, nodes=(0,)),
            NodesLost(at_s=80.0, nodes=(1, 2, 3, 4, 5)),
        ),
    )
    policy = Pacekeeper(checkpoint_steps=20, costs=behind, review_steps=None)
    routing = Routing(parts=SKEWED[None], steps=np.zeros(1, dtype=np.intp))
    assert simulate(history, job_of_four(), routing, policy).steps >= 20


def test_to_copy_nothing_costs_nothing_and_the_rest_is_the_printed_line() -> None:
    assert PUBLISHED.copying_s(0) == 0.0
    # Through four printed transfers: 3.1 s and 0.29 s for each GB.
    assert PUBLISHED.copying_s(1) == pytest.approx(3.13, abs=0.05)
    assert PUBLISHED.copying_s(10**10) == pytest.approx(6.05, abs=0.1)


def test_luck_belongs_to_the_event_and_not_to_the_order_of_questions() -> None:
    draws = Draws(7)
    assert draws.between((1.0, 2.0), 5.0, "x") == Draws(7).between((1.0, 2.0), 5.0, "x")
    assert draws.between((1.0, 2.0), 5.0, "x") != draws.between((1.0, 2.0), 5.0, "y")
    drawn = [Draws(seed).between((1.0, 2.0), 5.0, "x") for seed in range(200)]
    assert 1.0 <= min(drawn) < 1.1 and 1.9 < max(drawn) <= 2.0


def test_a_routing_of_another_model_is_refused() -> None:
    history = History(
        name="x", num_nodes=1, duration_s=1.0, changes=(NodesJoined(at_s=0.0, nodes=(0,)),)
    )
    with pytest.raises(ValueError, match="routing of 2 layers x 3"):
        simulate(history, small_job(), even_routing(2, 3), Lazarus())


def test_ours_spreads_experts_over_the_racks_that_agents_tell_and_a_whole_rack_may_die() -> None:
    """Three racks of two nodes; a fresh layout puts the two hosts of an expert side by side."""
    job, routing = small_job(num_experts=6, slots_per_node=2), even_routing(2, 6)

    def restarts(nodes_per_rack: int) -> int:
        found = 0
        for rack in range(3):
            changes = (
                NodesJoined(at_s=0.0, nodes=tuple(range(6))),
                NodesLost(at_s=150.0, nodes=(2 * rack, 2 * rack + 1)),
            )
            history = History(name="x", num_nodes=6, duration_s=200.0, changes=changes)
            policy = Pacekeeper(costs=EXACT, nodes_per_rack=nodes_per_rack)
            found += simulate(history, job, routing, policy, seed=1).restarts
        return found

    assert restarts(2) == 0 < restarts(0)


@pytest.mark.parametrize("lost_s", [24.0, 24.5, 25.0])
def test_where_newcomers_are_all_that_is_left_ours_starts_again_from_storage(lost_s: float) -> None:
    """Nodes 2 and 3 wait, or are just let in, while those that hold the state are lost."""
    changes = (
        NodesJoined(at_s=0.0, nodes=(0, 1)),
        NodesJoined(at_s=20.0, nodes=(2, 3)),
        NodesLost(at_s=lost_s, nodes=(0, 1)),
    )
    history = History(name="x", num_nodes=4, duration_s=60.0, changes=changes)
    policy = Pacekeeper(checkpoint_steps=4, review_steps=5, costs=EXACT)
    outcome = simulate(history, small_job(), even_routing(2, 2), policy, seed=0)
    assert outcome.restarts == 1 and outcome.needless_restarts == 0 and outcome.samples > 0.0
