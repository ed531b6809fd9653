"""A floor on distinct nodes: no plan goes below it, what can be mended is, and the rest is said."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller import placement
from pacekeeper.controller.placement import place
from pacekeeper.controller.policy import View, decide
from pacekeeper.controller.shares import split_layers
from pacekeeper.controller.spread_floor import SpreadFloor, num_narrow, restored
from pacekeeper.controller.state import Refusal
from pacekeeper.core.config import PolicyConfig
from pacekeeper.core.findings import Rung
from pacekeeper.core.layout import Host, Layout, even_layout
from pacekeeper.core.topology import ModelShape
from pacekeeper.predictor.forecast import Workload
from support.layouts import on_nodes

NodeOf = dict[int, str]
CONFIG = PolicyConfig()


@st.composite
def hosted(draw: st.DrawFn) -> tuple[Layout, NodeOf, int]:
    """Any hosts on two to eight ranks of one to four nodes, and slots that hold them or more."""
    num_ranks, num_experts = draw(st.integers(2, 8)), draw(st.integers(1, 10))
    node_of = {rank: draw(st.sampled_from("abcd")) for rank in range(num_ranks)}
    base = even_layout(
        ranks=range(num_ranks), num_layers=1, num_experts=num_experts, replicas=1, generation=5
    )
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=3).map(sorted)
    hosts = draw(st.lists(ranks, min_size=num_experts, max_size=num_experts))
    layer = tuple(tuple(Host(rank, 1.0 / len(on)) for rank in on) for on in hosts)
    layout = replace(base, experts=(layer,))
    fullest = max(len(layout.experts_on(rank, 0)) for rank in layout.ranks)
    return layout, node_of, draw(st.integers(max(1, fullest - 1), fullest + 2))


@st.composite
def full(draw: st.DrawFn) -> tuple[Layout, NodeOf, int]:
    """Two hosts for each expert, as many on each rank and no slot free: only swaps are left."""
    num_ranks = draw(st.integers(4, 8))
    node_of = {rank: draw(st.sampled_from("abc")) for rank in range(num_ranks)}
    num_experts = num_ranks * draw(st.integers(1, 2))
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=1,
        num_experts=num_experts,
        replicas=2,
        generation=5,
        domain_of=draw(st.sampled_from([{}, node_of])),
    )
    slots = max(len(layout.experts_on(rank, 0)) for rank in layout.ranks)
    return layout, node_of, slots


skewed = st.lists(st.sampled_from([1.0, 5.0, 40.0, 200.0]), min_size=16, max_size=16)
speeds_ = st.lists(st.sampled_from([0.4, 1.0]), min_size=8, max_size=8)
leasts = st.integers(1, 3)


@pytest.mark.parametrize("num_solves", [64, 1])  # a change at a time, or all at once
@settings(max_examples=300)
@given(st.one_of(hosted(), full()), skewed, speeds_, leasts, st.integers(1, 3))
def test_a_placement_takes_no_expert_below_the_floor(
    num_solves: int,
    case: tuple[Layout, NodeOf, int],
    loads: list[float],
    listed: list[float],
    least: int,
    min_hosts: int,
) -> None:
    layout, node_of, slots = case
    rows = [loads[: len(layout.experts[0])]]
    speeds = {rank: listed[rank] for rank in layout.ranks}
    splits = split_layers(layout, loads=rows, speeds=speeds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "MAX_SOLVES", num_solves)
        placed = place(
            layout,
            splits=splits,
            loads=rows,
            speeds=speeds,
            slots_per_rank=slots,
            min_hosts=min_hosts,
            spread=SpreadFloor(least=least, domain_of=node_of),
        )
    after = replace(layout, experts=tuple(split.hosts for split in placed))
    before_on, after_on = on_nodes(layout, node_of)[0], on_nodes(after, node_of)[0]
    assert all(now >= min(then, least) for then, now in zip(before_on, after_on, strict=True))


@settings(max_examples=300)
@given(st.one_of(hosted(), full()), leasts)
def test_what_is_mended_keeps_hosts_and_slots_and_takes_few_moves(
    case: tuple[Layout, NodeOf, int], least: int
) -> None:
    layout, node_of, slots = case
    floor = SpreadFloor(least=least, domain_of=node_of)
    lacks = [
        max(0, floor.wanted(len(on), len(set(node_of.values()))) - spread)
        for on, spread in zip(layout.experts[0], on_nodes(layout, node_of)[0], strict=True)
    ]
    assert num_narrow(layout, floor) == sum(lack > 0 for lack in lacks)
    found = restored(layout, floor, slots_per_rank=slots)
    if not found:
        assert not any(lacks) or is_stuck(layout, node_of, slots, lacks)
        return
    hosts = found[0]
    assert found == restored(layout, floor, slots_per_rank=slots)
    experts = tuple(tuple(Host(rank, 1.0 / len(on)) for rank in on) for on in hosts)
    after = replace(layout, experts=(experts,))
    assert [len(on) for on in hosts] == [len(on) for on in layout.experts[0]]
    for rank in layout.ranks:
        assert len(after.experts_on(rank, 0)) <= max(slots, len(layout.experts_on(rank, 0)))
    wider = zip(on_nodes(layout, node_of)[0], on_nodes(after, node_of)[0], strict=True)
    assert all(now >= min(then, least) for then, now in wider)
    assert num_narrow(after, floor) <= num_narrow(layout, floor)
    moved = sum(
        len(set(on) - {host.rank for host in was})
        for on, was in zip(hosts, layout.experts[0], strict=True)
    )
    assert 0 < moved <= 2 * sum(lacks)


def is_stuck(layout: Layout, node_of: NodeOf, slots: int, lacks: list[int]) -> bool:
    """No free slot on a node that an expert lacks, and no two replicas could swap: dumb search."""
    hosts = [{host.rank for host in on} for on in layout.experts[0]]
    held = {rank: set(layout.experts_on(rank, 0)) for rank in layout.ranks}
    for expert in [e for e, lack in enumerate(lacks) if lack]:
        covered = {node_of[rank] for rank in hosts[expert]}
        for target in [rank for rank in layout.ranks if node_of[rank] not in covered]:
            if len(held[target]) < slots:
                return False
            for source in hosts[expert]:
                if len({node_of[r] for r in hosts[expert] - {source}}) < len(covered):
                    continue
                for guest in held[target] - held[source]:
                    before = {node_of[rank] for rank in hosts[guest]}
                    after = {node_of[rank] for rank in hosts[guest] - {target} | {source}}
                    if len(after) >= len(before):
                        return False
    return True


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
    case: tuple[Layout, NodeOf, int], loads: list[float], is_slow: bool, is_young: bool
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
    three = even_layout(ranks=range(3), num_layers=1, num_experts=1, replicas=1, generation=5)
    layout = replace(three, experts=(((Host(0, 0.5), Host(1, 0.5)),),))
    batch = ((0, 0.5), (1, 0.5), (2, 0.0))
    view = view_of(replace(layout, batch_shares=batch), node_of, 1, slow={2: 50.0})
    assert restored(layout, SpreadFloor(least=2, domain_of=node_of), slots_per_rank=1)
    decision = decide(view, CONFIG)
    assert decision.layout is None
    assert "experts on fewer than 2 nodes: 1 (" in decision.reason
    assert decide(replace(view, slow={}), CONFIG).layout is not None
