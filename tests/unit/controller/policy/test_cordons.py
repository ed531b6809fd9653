"""No plan gives a cordoned rank work, and it is left out as soon as it may be."""

from dataclasses import replace

import pytest

from pacekeeper.controller.policy.cordons import (
    KeptAtWork,
    KeptReason,
    cordoned_at_work,
    layout_without_cordoned,
    ranks_given_work,
)
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.plan_phase import RankRejection
from pacekeeper.controller.state.planning_snapshot import PlanHistory
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel, NoPlanCode
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from support.partitioned import staged_layout, view_of

CONFIG = PolicyConfig(min_nodes=1)
EVEN = staged_layout()
CORDONED = replace(view_of(EVEN, slow={}, baseline=None), cordoned=frozenset({1}))


def planned() -> Layout:
    decision = decide(CORDONED, CONFIG)
    assert decision.layout is not None, decision.reason
    return decision.layout


def test_a_rank_of_a_tensor_group_is_left_out_though_that_costs_time() -> None:
    decision = decide(CORDONED, CONFIG)
    assert (
        decision.level is MitigationLevel.LEAVE_OUT
        and decision.planned_step_s > decision.current_step_s
    )
    layout = planned()
    assert layout.ranks == EVEN.ranks and layout.standing_by == (1,)
    assert decision.moved_bytes > 0, "its shards are copied from it"


def test_who_stands_by_is_named_so_that_newcomers_do_not_bring_it_back() -> None:
    assert dict(planned().speeds)[1] < 1.0


def test_once_it_is_out_nothing_is_left_to_do() -> None:
    after = replace(CORDONED, layout=planned(), work={})
    assert cordoned_at_work(after) == ()


def test_more_than_the_circuit_breaker_allows_keep_their_work_and_it_is_said() -> None:
    many = replace(CORDONED, cordoned=frozenset(EVEN.ranks[: len(EVEN.ranks) // 2 + 1]))
    kept = layout_without_cordoned(many, CONFIG)
    assert isinstance(kept, KeptAtWork) and kept.reason is KeptReason.TOO_MANY
    assert decide(many, CONFIG).reason.endswith(kept.text)


def test_a_rank_that_alone_holds_layers_keeps_its_work() -> None:
    lone = staged_layout(data=1, tensor=1, experts=0)
    view = replace(view_of(lone, slow={}, baseline=None), cordoned=frozenset({0}))
    kept = layout_without_cordoned(view, CONFIG)
    assert isinstance(kept, KeptAtWork) and kept.reason is KeptReason.LOST_STATE


def test_a_refused_plan_of_this_kind_waits() -> None:
    refusal = RankRejection(plan=EVEN, rank=0, reason="no room", count=1, until_s=60.0)
    view = replace(CORDONED, history=PlanHistory(refusals={MitigationLevel.LEAVE_OUT: refusal}))
    decision = decide(view, CONFIG)
    assert decision.level is not MitigationLevel.LEAVE_OUT and "cordoned" in decision.reason


def test_home_waits_while_somebody_who_works_there_is_cordoned() -> None:
    out = planned()
    baseline = replace(EVEN, generation=3)
    view = replace(CORDONED, layout=out, baseline=baseline, next_generation=out.generation + 1)
    assert decide(view, CONFIG).level is not MitigationLevel.RETURN_HOME
    free = replace(view, cordoned=frozenset())
    assert decide(free, CONFIG).level is MitigationLevel.RETURN_HOME


def test_an_approved_plan_that_would_give_it_work_is_given_up() -> None:
    slow = view_of(EVEN, slow={0: 2.0}, baseline=EVEN)
    approved = decide(slow, CONFIG)
    assert approved.layout is not None
    gets_more = ranks_given_work(replace(slow, cordoned=frozenset({1})), approved.layout)
    assert gets_more == (1,), "the partner of the slow rank takes over"
    view = replace(slow, approved=approved, cordoned=frozenset({1}))
    assert decide(view, CONFIG).no_plan is NoPlanCode.CORDONED
    assert decide(replace(slow, approved=approved), CONFIG).layout == approved.layout


@pytest.mark.parametrize("rank", range(4))
def test_what_is_taken_from_a_rank_is_no_work_for_it(rank: int) -> None:
    even = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2)
    view = replace(view_of(EVEN, slow={}, baseline=None), layout=even, cordoned=frozenset({rank}))
    layout = layout_without_cordoned(view, CONFIG)
    assert isinstance(layout, Layout)
    assert ranks_given_work(view, layout) == () and rank in layout.standing_by
    assert ranks_given_work(replace(view, layout=layout), even) == (rank,)
