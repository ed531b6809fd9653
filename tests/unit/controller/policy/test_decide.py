"""Which layout next: the ladder, its limits, and the way home."""

from dataclasses import replace

import pytest

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.plan_phase import RankRejection
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel, NoPlanCode
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.forecast import Workload
from support.layouts import with_shares

CONFIG = PolicyConfig()
SHAPE = ModelShape(
    num_layers=2,
    num_experts=8,
    experts_per_token=2,
    rows_per_step=32,
    slots_per_rank=8,
    expert_bytes=1_000_000,
    dense_bytes=1_000_000,
)
EVEN = even_layout(ranks=range(4), num_layers=2, num_experts=8, replicas=2, generation=5)
LONE = even_layout(ranks=range(4), num_layers=2, num_experts=8, replicas=1, generation=5)
HEALTHY = PlanningSnapshot(
    layout=EVEN,
    shape=SHAPE,
    model=None,
    workload=Workload(
        num_rows=32,
        tokens=5120.0,
        sum_len_squared=400_000.0,
        loads=((1280.0,) * 8, (1280.0,) * 8),
    ),
    slow={},
    baseline=None,
    step_s=1.1,
    steps_since_plan=100,
    is_provisional=False,
    num_load_steps=100,
    next_generation=9,
)
SLOW = replace(HEALTHY, slow={2: 1.6}, baseline=EVEN, step_s=1.7)


def hot(factor: float) -> Workload:
    return replace(HEALTHY.workload, loads=((1280.0 * factor,) + (1280.0,) * 7,) * 2)


def test_a_slow_rank_gets_a_smaller_share_of_tokens_and_rows() -> None:
    decision = decide(SLOW, CONFIG)
    assert decision.level is MitigationLevel.BATCH_SHARES
    layout = decision.layout
    assert layout is not None
    assert layout.generation == 9
    assert layout.rows_of(32) == {0: 9, 1: 9, 2: 5, 3: 9}
    assert [[h.rank for h in on] for on in layout.experts[0]] == [
        [h.rank for h in on] for on in EVEN.experts[0]
    ]
    assert decision.moved_bytes == 0
    assert decision.cost_s == CONFIG.plan_s
    assert "rank 2" in decision.reason
    assert decision.fluid_step_s <= decision.planned_step_s < decision.current_step_s


def test_rows_that_can_not_be_split_leave_token_shares() -> None:
    few = replace(SLOW.shape, rows_per_step=4)
    view = replace(SLOW, shape=few, workload=replace(SLOW.workload, num_rows=4))
    assert decide(view, CONFIG).level is MitigationLevel.TOKEN_SHARES


def test_a_plan_says_how_fast_it_takes_each_rank_to_be() -> None:
    layout = decide(SLOW, CONFIG).layout
    assert layout is not None
    assert dict(layout.speeds) == pytest.approx({2: 1 / 1.6})


def test_where_every_step_is_split_other_loads_need_no_other_shares() -> None:
    # The same hosts level one hot expert, if the shares change: the trainer does that by itself.
    view = replace(HEALTHY, workload=hot(2.0), step_s=1.4)
    by_plan = replace(CONFIG, rebalance_min_gain=0.01)
    assert decide(view, by_plan).level is MitigationLevel.TOKEN_SHARES
    by_itself = replace(view, shape=replace(SHAPE, splits_each_step=True))
    assert decide(by_itself, by_plan).level is MitigationLevel.NOTHING


def test_where_every_step_is_split_speeds_that_are_out_of_date_need_a_plan() -> None:
    shape = replace(SHAPE, splits_each_step=True, rows_per_step=4)
    view = replace(SLOW, shape=shape, workload=replace(SLOW.workload, num_rows=4))
    first = decide(view, CONFIG)
    assert first.level is MitigationLevel.TOKEN_SHARES and first.layout is not None
    after = replace(view, layout=first.layout, step_s=first.planned_step_s)
    assert decide(after, CONFIG).level is MitigationLevel.NOTHING
    slower = decide(replace(after, slow={2: 3.0}), CONFIG)
    assert slower.layout is not None
    assert dict(slower.layout.speeds) == pytest.approx({2: 1 / 3.0})


def test_experts_with_one_host_need_another_where_it_pays() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    decision = decide(view, CONFIG)
    assert decision.level is MitigationLevel.MOVE_REPLICAS
    assert decision.moved_bytes > 0
    assert decision.moved_bytes % SHAPE.expert_bytes == 0
    assert decision.cost_s == pytest.approx(
        CONFIG.plan_s + CONFIG.move_s_per_byte * decision.moved_bytes
    )
    too_dear = replace(CONFIG, move_s_per_byte=1.0)
    assert decide(view, too_dear).level is MitigationLevel.BATCH_SHARES


def test_what_needs_nobodys_word_comes_first_and_what_moves_state_is_proposed_upon_it() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    asked = replace(CONFIG, mode="approve")
    shares = decide(view, asked)
    assert (shares.level, shares.moved_bytes) == (MitigationLevel.BATCH_SHARES, 0)
    assert shares.layout is not None
    upon = replace(view, layout=shares.layout, step_s=shares.planned_step_s)
    assert decide(upon, asked).level is MitigationLevel.MOVE_REPLICAS
    assert decide(view, replace(asked, approve="all")).level is MitigationLevel.MOVE_REPLICAS


def test_an_approved_plan_is_priced_again_and_no_other_is_looked_for() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    approved = decide(view, CONFIG)
    assert approved.level is MitigationLevel.MOVE_REPLICAS
    slower = replace(view, slow={2: 1.7}, approved=approved)
    again = decide(slower, CONFIG)
    assert (again.level, again.layout) == (approved.level, approved.layout)
    assert again.current_step_s > approved.current_step_s
    assert again.reason.startswith("approved") and again.reason.endswith(approved.reason)
    assert again.unconfirmed == ()


def test_an_approved_plan_that_pays_no_more_is_not_done_and_says_its_price() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    approved = decide(view, CONFIG)
    by_now = decide(replace(view, approved=approved), replace(CONFIG, move_s_per_byte=1.0))
    assert by_now.level is MitigationLevel.NOTHING
    assert by_now.no_plan is NoPlanCode.NO_LONGER_PAYS
    well = replace(view, slow={}, approved=approved)
    assert decide(well, replace(CONFIG, min_gain=0.5)).level is MitigationLevel.NOTHING


def test_an_approved_way_home_must_still_lead_there() -> None:
    around = decide(SLOW, CONFIG).layout
    assert around is not None
    over = replace(HEALTHY, layout=around, baseline=EVEN, is_provisional=True)
    approved = decide(over, CONFIG)
    assert approved.level is MitigationLevel.RETURN_HOME
    again = decide(replace(over, approved=approved), CONFIG)
    assert (again.level, again.layout) == (approved.level, approved.layout)
    elsewhere = decide(replace(over, baseline=None, approved=approved), CONFIG)
    assert (elsewhere.layout, elsewhere.no_plan) == (None, NoPlanCode.NO_WAY_BACK)


def test_an_approved_plan_for_safety_need_not_gain_time() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    close = even_layout(ranks=range(4), num_layers=2, num_experts=8, replicas=2, generation=5)
    hosts = tuple(
        tuple(
            (ExpertReplica(0, 0.5), ExpertReplica(1, 0.5))
            if e < 4
            else (ExpertReplica(2, 0.5), ExpertReplica(3, 0.5))
            for e in range(8)
        )
        for _ in range(2)
    )
    narrow = replace(HEALTHY, layout=replace(close, experts=hosts), node_of=nodes)
    approved = decide(narrow, CONFIG)
    assert approved.level is MitigationLevel.MOVE_REPLICAS
    dear = replace(CONFIG, move_s_per_byte=1e-5)
    assert decide(replace(narrow, approved=approved), dear).layout == approved.layout
    wide = replace(narrow, layout=replace(approved.layout or close, generation=6))
    assert decide(replace(wide, approved=approved), dear).level is MitigationLevel.NOTHING


def test_a_short_horizon_does_not_pay_for_a_move() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    short = replace(CONFIG, horizon_steps=1, move_s_per_byte=1e-6)
    assert decide(view, short).moved_bytes == 0


def test_replicas_move_in_the_layers_where_it_pays() -> None:
    # One expert is hot in the first layer, hardly so in the second; each has one host.
    loads = ((1280.0 * 6,) + (1280.0,) * 7, (1280.0 * 2,) + (1280.0,) * 7)
    view = replace(HEALTHY, layout=LONE, workload=replace(HEALTHY.workload, loads=loads))

    def moved_layers(move_s_per_byte: float) -> list[bool]:
        layout = decide(view, replace(CONFIG, move_s_per_byte=move_s_per_byte)).layout
        assert layout is not None
        return [
            any(len(on) > 1 for on in experts) or experts != LONE.experts[layer]
            for layer, experts in enumerate(layout.experts)
        ]

    assert moved_layers(2e-9) == [True, True]
    assert moved_layers(1e-5) == [True, False]


def test_too_many_slow_ranks_are_a_case_for_people() -> None:
    two, three = {0: 1.6, 1: 1.6}, {0: 1.6, 1: 1.6, 2: 1.6}
    assert decide(replace(SLOW, slow=two), CONFIG).layout is not None
    decision = decide(replace(SLOW, slow=three), CONFIG)
    assert decision.layout is None
    assert decision.no_plan is NoPlanCode.TOO_MANY_SLOW


def test_a_layout_that_fits_is_left_alone() -> None:
    first = decide(SLOW, CONFIG).layout
    assert first is not None
    again = decide(replace(SLOW, layout=first, step_s=1.25), CONFIG)
    assert (again.level, again.layout) == (MitigationLevel.NOTHING, None)


def test_a_small_gain_is_not_worth_a_plan() -> None:
    barely = replace(SLOW, slow={2: 1.03})
    decision = decide(barely, CONFIG)
    assert decision.layout is None
    assert decision.no_plan is NoPlanCode.GAIN_TOO_SMALL
    assert decide(barely, replace(CONFIG, min_gain=0.001)).layout is not None


def test_time_that_no_layout_changes_counts_against_a_plan() -> None:
    mild = replace(SLOW, slow={2: 1.15}, step_s=0.0)
    assert decide(mild, CONFIG).layout is not None
    assert decide(replace(mild, step_s=4.0), CONFIG).layout is None


def test_when_all_is_over_the_layout_goes_home() -> None:
    away = decide(SLOW, CONFIG).layout
    assert away is not None
    decision = decide(replace(HEALTHY, layout=away, baseline=EVEN), CONFIG)
    assert decision.level is MitigationLevel.RETURN_HOME
    assert decision.layout == replace(EVEN, generation=9)
    assert decision.fluid_step_s <= decision.planned_step_s < decision.current_step_s
    assert decision.cost_s == CONFIG.plan_s


def test_nobody_goes_home_to_a_layout_that_is_worse_by_now() -> None:
    hot_view = replace(HEALTHY, workload=hot(6.0), step_s=0.0, baseline=EVEN)
    fitting = decide(replace(hot_view, baseline=None), CONFIG).layout
    assert fitting is not None
    assert decide(replace(hot_view, layout=fitting), CONFIG).layout is None


def test_the_way_home_drops_replicas_and_copies_none() -> None:
    view = replace(SLOW, layout=LONE, baseline=LONE)
    away = decide(view, CONFIG).layout
    assert away is not None
    decision = decide(replace(HEALTHY, layout=away, baseline=LONE), CONFIG)
    assert (decision.level, decision.moved_bytes) == (MitigationLevel.RETURN_HOME, 0)


def test_there_is_no_way_home_to_a_layout_with_the_dead() -> None:
    left = shrink(EVEN, dead=[3], generation=6)
    decision = decide(replace(HEALTHY, layout=left, baseline=EVEN), CONFIG)
    assert decision.level is not MitigationLevel.RETURN_HOME


def test_survivors_are_planned_for_at_their_speeds() -> None:
    left = with_shares(shrink(EVEN, dead=[3], generation=6), 0.5, 0.25, 0.25)
    view = replace(HEALTHY, layout=left, is_provisional=True, steps_since_plan=3, slow={2: 2.0})
    layout = decide(view, CONFIG).layout
    assert layout is not None
    assert layout.ranks == (0, 1, 2)
    assert layout.rows_of(32) == {0: 13, 1: 13, 2: 6}


def test_a_makeshift_is_improved_at_once_but_a_chosen_layout_is_not() -> None:
    lopsided = with_shares(EVEN, 0.4, 0.2, 0.2, 0.2)
    young = replace(HEALTHY, layout=lopsided, steps_since_plan=3)
    assert decide(young, CONFIG).no_plan is NoPlanCode.LAYOUT_TOO_NEW
    assert decide(replace(young, is_provisional=True), CONFIG).layout is not None


def test_hot_experts_alone_need_a_large_and_settled_gain() -> None:
    steady = replace(HEALTHY, workload=hot(6.0), step_s=0.0)
    assert decide(steady, CONFIG).layout is not None
    for change, code in (
        ({"num_load_steps": 39}, NoPlanCode.LOADS_UNSETTLED),
        ({"steps_since_plan": 39}, NoPlanCode.LAYOUT_TOO_NEW),
        ({"workload": hot(1.5)}, NoPlanCode.GAIN_TOO_SMALL),
    ):
        assert decide(replace(steady, **change), CONFIG).no_plan is code
    assert decide(HEALTHY, CONFIG).layout is None


def refused(
    view: PlanningSnapshot, level: MitigationLevel, layout: Layout, *, wait_s: float = 30.0
) -> PlanningSnapshot:
    refusal = RankRejection(plan=layout, rank=3, reason="no room", count=1, until_s=100.0 + wait_s)
    return replace(view, history=PlanHistory(refusals={level: refusal}), asked_s=100.0)


def test_a_kind_of_plan_that_was_refused_waits_and_the_next_best_is_taken() -> None:
    view = refused(SLOW, MitigationLevel.BATCH_SHARES, replace(LONE, generation=6))
    decision = decide(view, CONFIG)
    assert decision.level is MitigationLevel.TOKEN_SHARES
    assert decision.reason.endswith(
        "; no batch_shares plan for 30 s more: rank 3 refused plan 6: no room"
    )
    over = decide(replace(view, asked_s=130.0), CONFIG)
    assert over.level is MitigationLevel.BATCH_SHARES
    assert over.reason.endswith("; tried again: rank 3 refused plan 6: no room")


def test_a_refused_layout_is_not_offered_under_another_name() -> None:
    few = replace(SLOW.shape, rows_per_step=4)  # no other batch shares than the even ones
    view = replace(SLOW, shape=few, workload=replace(SLOW.workload, num_rows=4))
    layout = decide(view, CONFIG).layout
    assert layout is not None
    held = refused(view, MitigationLevel.TOKEN_SHARES, replace(layout, generation=6))
    assert decide(held, CONFIG).level is MitigationLevel.NOTHING
    other = refused(view, MitigationLevel.TOKEN_SHARES, replace(LONE, generation=6))
    assert decide(other, CONFIG).level is MitigationLevel.BATCH_SHARES


def test_a_way_home_that_was_refused_waits_too() -> None:
    away = decide(SLOW, CONFIG).layout
    assert away is not None
    view = replace(HEALTHY, layout=away, baseline=EVEN)
    held = decide(refused(view, MitigationLevel.RETURN_HOME, replace(EVEN, generation=8)), CONFIG)
    assert held.level is not MitigationLevel.RETURN_HOME
    assert "no return_home plan for 30 s more" in held.reason
