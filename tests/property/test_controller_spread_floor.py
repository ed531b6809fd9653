"""A floor on distinct nodes: no plan goes below it, what can be mended is, and the rest is said."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.policy import decide
from pacekeeper.controller.policy_view import View
from pacekeeper.controller.spread_floor import SpreadFloor, num_narrow
from pacekeeper.controller.state import Refusal
from pacekeeper.core.config import PolicyConfig
from pacekeeper.core.findings import Rung
from pacekeeper.core.layout import Host, Layout, even_layout
from pacekeeper.core.topology import ModelShape
from pacekeeper.predictor.forecast import Workload
from support.layouts import on_nodes
from support.spread_cases import NodeOf, SpreadCase, hosted

CONFIG = PolicyConfig()

skewed = st.lists(st.sampled_from([1.0, 5.0, 40.0, 200.0]), min_size=16, max_size=16)


def view_of(layout: Layout, node_of: NodeOf, slots: int, **change: object) -> View:
    num_experts = len(layout.experts[0])
    view = View(
        layout=layout,
        shape=ModelShape(
            num_layers=1,
            num_experts=num_experts,
            experts_per_token=1,
            rows_per_step=16,
            slots_per_rank=slots,
            expert_bytes=1000,
            dense_bytes=1000,
        ),
        model=None,
        workload=Workload(
            num_rows=16, tokens=1600.0, sum_len_squared=1e5, loads=((100.0,) * num_experts,)
        ),
        slow={},
        home=None,
        step_s=0.0,
        steps_since_plan=100,
        is_makeshift=False,
        num_load_steps=100,
        next_generation=9,
        node_of=node_of,
    )
    return replace(view, **change)  # type: ignore[arg-type]


@settings(max_examples=150)
@given(hosted(), skewed, st.booleans(), st.booleans())
def test_no_decision_goes_below_the_floor_and_what_is_left_is_said(
    case: SpreadCase, loads: list[float], is_slow: bool, is_young: bool
) -> None:
    layout, node_of, slots = case
    view = view_of(layout, node_of, slots, slow={0: 2.0} if is_slow else {})
    view = replace(
        view,
        workload=replace(view.workload, loads=(tuple(loads[: len(layout.experts[0])]),)),
        num_load_steps=0 if is_young else 100,
    )
    floor = SpreadFloor(least=CONFIG.min_nodes, domain_of=node_of)
    decision = decide(view, CONFIG)
    after = decision.layout or layout
    for then, now in zip(on_nodes(layout, node_of)[0], on_nodes(after, node_of)[0], strict=True):
        assert now >= min(then, CONFIG.min_nodes)
    left = num_narrow(after, floor)
    assert (f"experts on fewer than 2 nodes: {left} (" in decision.reason) == (left > 0)
    if decision.layout is not None:
        assert left <= num_narrow(layout, floor)
    assert ("all ranks are on one node" in decision.reason) == (len(set(node_of.values())) == 1)


PAIRS = {0: "a", 1: "a", 2: "b", 3: "b"}
SPREAD = even_layout(
    ranks=range(4), num_layers=1, num_experts=8, replicas=2, generation=5, domain_of=PAIRS
)


def narrowed(layout: Layout) -> Layout:
    """The same with all experts on both ranks of one node."""
    sides = ((Host(0, 0.5), Host(1, 0.5)), (Host(2, 0.5), Host(3, 0.5)))
    return replace(layout, experts=(tuple(sides[expert % 2] for expert in range(8)),))


def test_a_narrow_layout_is_mended_though_nothing_is_gained_and_no_slot_is_free() -> None:
    for change in ({}, {"num_load_steps": 0}, {"steps_since_plan": 3}, {"slow": {1: 1.01}}):
        decision = decide(view_of(narrowed(SPREAD), PAIRS, 4, **change), CONFIG)
        assert decision.rung is Rung.MOVE_REPLICAS
        assert "experts on fewer than 2 nodes: 8 before, 0 after" in decision.reason
        assert decision.layout is not None
        assert on_nodes(decision.layout, PAIRS) == [[2] * 8]
        assert decision.moved_bytes == 8 * 1000


def test_replicas_that_a_rank_refused_are_not_moved_for_safety_either() -> None:
    refusal = Refusal(plan=SPREAD, rank=3, reason="no room", count=1, until_s=60.0)
    held = view_of(narrowed(SPREAD), PAIRS, 4, refusals={Rung.MOVE_REPLICAS: refusal})
    assert decide(held, CONFIG).layout is None
    assert decide(replace(held, asked_s=60.0), CONFIG).rung is Rung.MOVE_REPLICAS


def test_who_may_stand_on_one_node_is_left_alone() -> None:
    view = view_of(narrowed(SPREAD), PAIRS, 4)
    assert decide(view, replace(CONFIG, min_nodes=1)).layout is None
    assert decide(replace(view, node_of={}), CONFIG).layout is None
    assert decide(replace(view, node_of=dict.fromkeys(range(4), "a")), CONFIG).layout is None


def test_the_way_home_is_not_taken_where_it_is_less_safe() -> None:
    home = replace(narrowed(SPREAD), generation=3)
    lopsided = replace(SPREAD, batch_shares=((0, 0.3), (1, 0.3), (2, 0.2), (3, 0.2)))
    view = view_of(lopsided, PAIRS, 4, home=home)
    assert decide(replace(view, node_of={}), CONFIG).rung is Rung.RETURN_HOME
    assert decide(view, CONFIG).rung is not Rung.RETURN_HOME


def test_a_mending_that_would_slow_the_step_is_not_offered_but_said() -> None:
    """The one rank of the other node hardly computes: two must go on sharing the hot expert."""
    node_of = {0: "a", 1: "a", 2: "b"}
    three = even_layout(ranks=range(3), num_layers=1, num_experts=2, replicas=1, generation=5)
    hot, cold = (Host(0, 0.5), Host(1, 0.5)), (Host(2, 1.0),)
    layout = replace(three, experts=((hot, cold),), batch_shares=((0, 0.5), (1, 0.5), (2, 0.0)))
    view = view_of(layout, node_of, 1, slow={2: 50.0})
    view = replace(view, workload=replace(view.workload, loads=((1000.0, 1.0),)))
    decision = decide(view, CONFIG)
    assert decision.layout is None
    assert "experts on fewer than 2 nodes: 1 (" in decision.reason
    even = replace(view, layout=replace(layout, batch_shares=three.batch_shares), slow={})
    swapped = decide(even, CONFIG).layout
    assert swapped is not None and on_nodes(swapped, node_of) == [[2, 1]]
