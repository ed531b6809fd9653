"""A floor on distinct nodes and racks: no plan goes below it, what can be mended is, and the rest
is said.
"""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.failure_domains import SpreadFloor, num_narrow
from pacekeeper.controller.state.plan_phase import Forecast, Judged, RankRejection, Verdict
from pacekeeper.controller.state.planning_snapshot import PlanHistory, PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.telemetry.attachment import ModelShape
from pacekeeper.predictor.cost.forecast import Workload
from support.examples import examples
from support.layouts import on_nodes, with_shares
from support.spread_cases import NodeOf, SpreadCase, hosted

CONFIG = PolicyConfig()

skewed = st.lists(st.sampled_from([1.0, 5.0, 40.0, 200.0]), min_size=16, max_size=16)


def view_of(layout: Layout, node_of: NodeOf, slots: int, **change: object) -> PlanningSnapshot:
    num_experts = len(layout.experts[0])
    view = PlanningSnapshot(
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
        baseline=None,
        step_s=0.0,
        steps_since_plan=100,
        is_provisional=False,
        num_load_steps=100,
        next_generation=9,
        node_of=node_of,
    )
    return replace(view, **change)  # type: ignore[arg-type]


@settings(max_examples=examples(150))
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
    assert decision.exposure is not None and decision.exposure.num_experts == left
    if decision.layout is not None:
        assert left <= num_narrow(layout, floor)
    assert (decision.exposure.num_nodes == 1) == (len(set(node_of.values())) == 1)


@settings(max_examples=examples(150))
@given(
    hosted(),
    skewed,
    st.lists(st.sampled_from("RST"), min_size=4, max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
def test_no_decision_takes_an_expert_to_fewer_racks(
    case: SpreadCase, loads: list[float], racks: list[str], min_racks: int, is_slow: bool
) -> None:
    layout, node_of, slots = case
    rack_of = {rank: dict(zip("abcd", racks, strict=True))[node_of[rank]] for rank in node_of}
    view = view_of(layout, node_of, slots, slow={0: 2.0} if is_slow else {}, rack_of=rack_of)
    view = replace(
        view, workload=replace(view.workload, loads=(tuple(loads[: len(layout.experts[0])]),))
    )
    config = replace(CONFIG, min_racks=min_racks, rack_failure_probability=0.01)
    decision = decide(view, config)
    after = decision.layout or layout
    for domain_of, least in ((node_of, config.min_nodes), (rack_of, min_racks)):
        before, now = on_nodes(layout, domain_of)[0], on_nodes(after, domain_of)[0]
        assert all(b >= min(a, least) for a, b in zip(before, now, strict=True))
    floor = SpreadFloor(
        least=config.min_nodes, domain_of=node_of, least_racks=min_racks, rack_of=rack_of
    )
    left = num_narrow(after, floor)
    assert left <= num_narrow(layout, floor) or decision.layout is None
    assert decision.exposure is not None and decision.exposure.num_experts == left


PAIRS = {0: "a", 1: "a", 2: "b", 3: "b"}
SPREAD = even_layout(
    ranks=range(4), num_layers=1, num_experts=8, replicas=2, generation=5, domain_of=PAIRS
)


def narrowed(layout: Layout) -> Layout:
    """The same with all experts on both ranks of one node."""
    sides = (
        (ExpertReplica(0, 0.5), ExpertReplica(1, 0.5)),
        (ExpertReplica(2, 0.5), ExpertReplica(3, 0.5)),
    )
    return replace(layout, experts=(tuple(sides[expert % 2] for expert in range(8)),))


def test_a_narrow_layout_is_mended_though_nothing_is_gained_and_no_slot_is_free() -> None:
    for change in ({}, {"num_load_steps": 0}, {"steps_since_plan": 3}, {"slow": {1: 1.01}}):
        decision = decide(view_of(narrowed(SPREAD), PAIRS, 4, **change), CONFIG)
        assert decision.level is MitigationLevel.MOVE_REPLICAS
        assert decision.layout is not None
        assert on_nodes(decision.layout, PAIRS) == [[2] * 8]
        assert decision.moved_bytes == 8 * 1000


def test_replicas_that_a_rank_refused_are_not_moved_for_safety_either() -> None:
    refusal = RankRejection(plan=SPREAD, rank=3, reason="no room", count=1, until_s=60.0)
    held = view_of(
        narrowed(SPREAD),
        PAIRS,
        4,
        history=PlanHistory(refusals={MitigationLevel.MOVE_REPLICAS: refusal}),
    )
    assert decide(held, CONFIG).layout is None
    assert decide(replace(held, asked_s=60.0), CONFIG).level is MitigationLevel.MOVE_REPLICAS


def test_who_may_stand_on_one_node_is_left_alone() -> None:
    view = view_of(narrowed(SPREAD), PAIRS, 4)
    assert decide(view, replace(CONFIG, min_nodes=1)).layout is None
    assert decide(replace(view, node_of={}), CONFIG).layout is None
    assert decide(replace(view, node_of=dict.fromkeys(range(4), "a")), CONFIG).layout is None


def test_the_way_home_is_not_taken_where_it_is_less_safe() -> None:
    baseline = replace(narrowed(SPREAD), generation=3)
    lopsided = with_shares(SPREAD, 0.3, 0.3, 0.2, 0.2)
    view = view_of(lopsided, PAIRS, 4, baseline=baseline)
    assert decide(replace(view, node_of={}), CONFIG).level is MitigationLevel.RETURN_HOME
    assert decide(view, CONFIG).level is not MitigationLevel.RETURN_HOME


def test_a_mending_that_would_slow_the_step_is_not_offered_but_said() -> None:
    """The one rank of the other node hardly computes: two must go on sharing the hot expert."""
    node_of = {0: "a", 1: "a", 2: "b"}
    three = even_layout(ranks=range(3), num_layers=1, num_experts=2, replicas=1, generation=5)
    hot, cold = (ExpertReplica(0, 0.5), ExpertReplica(1, 0.5)), (ExpertReplica(2, 1.0),)
    layout = with_shares(replace(three, experts=((hot, cold),)), 0.5, 0.5, 0.0)
    view = view_of(layout, node_of, 1, slow={2: 50.0})
    view = replace(view, workload=replace(view.workload, loads=((1000.0, 1.0),)))
    decision = decide(view, CONFIG)
    assert decision.layout is None
    assert decision.exposure is not None and decision.exposure.num_experts == 1
    even = replace(view, layout=replace(layout, pipelines=three.pipelines), slow={})
    swapped = decide(even, CONFIG).layout
    assert swapped is not None and on_nodes(swapped, node_of) == [[2, 1]]


ALONE = {0: "a", 1: "b", 2: "c", 3: "d"}
RACKS = {0: "R", 1: "R", 2: "S", 3: "S"}


def test_experts_within_one_rack_are_brought_to_two() -> None:
    view = view_of(narrowed(SPREAD), ALONE, 4, rack_of=RACKS)
    decision = decide(view, CONFIG)
    assert decision.level is MitigationLevel.MOVE_REPLICAS and decision.layout is not None
    assert on_nodes(decision.layout, RACKS) == [[2] * 8]


def test_racks_are_no_reason_where_they_are_not_wished_for_or_not_known_of_all() -> None:
    view = view_of(narrowed(SPREAD), ALONE, 4, rack_of=RACKS)
    assert decide(view, replace(CONFIG, min_racks=1)).layout is None
    assert decide(replace(view, rack_of={}), CONFIG).layout is None
    assert decide(replace(view, rack_of=dict.fromkeys(range(4), "R")), CONFIG).layout is None
    partly = decide(replace(view, rack_of={0: "R", 2: "S", 3: "S"}), CONFIG)
    assert partly.layout is None
    assert partly.exposure is not None and partly.exposure.nodes_without_rack == ("b",)


def test_a_rack_that_may_fail_is_a_reason_by_itself_after_a_death() -> None:
    survivors = view_of(narrowed(SPREAD), ALONE, 4, rack_of=RACKS, by_survivors=True)
    careless = replace(CONFIG, min_racks=1, failure_probability=1e-9)
    assert decide(survivors, careless).moved_bytes == 0
    decision = decide(survivors, replace(careless, rack_failure_probability=0.01))
    assert decision.layout is not None
    assert on_nodes(decision.layout, RACKS) == [[2] * 8]


def test_a_plan_that_made_nothing_faster_is_not_undone_where_that_is_less_safe() -> None:
    base = replace(narrowed(SPREAD), generation=4)
    forecast = Forecast(
        plan=SPREAD, level=MitigationLevel.MOVE_REPLICAS, base=base, before_s=0.1, planned_s=0.09,
        slow={},
    )  # fmt: skip
    failed = Judged(forecast=forecast, verdict=Verdict.NOTHING, measured_s=0.2)
    view = view_of(
        SPREAD, PAIRS, 4, history=PlanHistory(failed=failed), step_s=0.2, is_provisional=True
    )
    assert decide(replace(view, node_of={}), CONFIG).level is MitigationLevel.ROLL_BACK
    assert decide(view, CONFIG).level is not MitigationLevel.ROLL_BACK
