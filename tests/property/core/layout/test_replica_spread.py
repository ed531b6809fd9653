"""A node's death is not lost state: where the first layout and survivors put an expert's hosts."""

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.controller.planning.token_split.linear_program import best_value
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import level_shares
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from support.layouts import load_of, on_nodes

NodeOf = dict[int, str]


@st.composite
def nodes(draw: st.DrawFn, *, are_equal: bool) -> NodeOf:
    """One to four nodes of one to four ranks; ranks neither from 0 nor node by node."""
    count = draw(st.integers(1, 4))
    size = st.integers(1, 4)
    sizes = [draw(size)] * count if are_equal else draw(st.lists(size, min_size=1, max_size=4))
    names = [name for name, n in zip("dbca", sizes, strict=False) for _ in range(n)]
    numbers = draw(st.permutations(range(5, 5 + len(names))))
    return dict(zip(numbers, names, strict=True))


def first(node_of: NodeOf, num_experts: int, replicas: int) -> Layout:
    return even_layout(
        ranks=node_of, num_layers=2, num_experts=num_experts, replicas=replicas, domain_of=node_of
    )


experts = st.integers(1, 12)


@given(st.booleans().flatmap(lambda equal: nodes(are_equal=equal)), experts, st.integers(1, 5))
def test_a_first_layout_puts_an_experts_hosts_on_as_many_nodes_as_can_be(
    node_of: NodeOf, num_experts: int, replicas: int
) -> None:
    assume(replicas <= len(node_of))
    layout = first(node_of, num_experts, replicas)
    wide = min(replicas, len(set(node_of.values())))
    assert all(wide == spread for layer in on_nodes(layout, node_of) for spread in layer)
    # The names of the nodes say nothing, nor does the order in which ranks are listed.
    renamed = {rank: "xyzu"["dbca".index(node_of[rank])] for rank in sorted(node_of)}
    assert first(renamed, num_experts, replicas) == layout


@given(nodes(are_equal=True), experts, st.integers(1, 5))
def test_on_equal_nodes_slots_are_balanced_as_well(
    node_of: NodeOf, num_experts: int, replicas: int
) -> None:
    assume(replicas <= len(node_of))
    layout = first(node_of, num_experts, replicas)
    for layer in range(layout.num_layers):
        slots = [len(layout.experts_on(rank, layer)) for rank in layout.ranks]
        assert max(slots) - min(slots) <= 1


@given(experts)
def test_on_unequal_nodes_the_small_one_holds_more_and_computes_no_more(num_experts: int) -> None:
    layout = first({0: "a", 1: "a", 2: "a", 3: "b"}, 3 * num_experts, 2)
    assert len(layout.experts_on(3, 0)) == 3 * num_experts
    load = load_of(layout, 0)
    assert max(load.values()) < 1.001 * min(load.values())


@pytest.mark.parametrize("count", [3, 4, 5, 8])
@pytest.mark.parametrize("replicas", [2, 3])
def test_slots_stay_balanced_over_many_nodes_and_experts(count: int, replicas: int) -> None:
    for size in (2, 3, 4):
        node_of = {rank: f"{rank // size}" for rank in range(count * size)}
        for num_experts in (12, 16, 30, 64):
            layout = first(node_of, num_experts, replicas)
            slots = [len(layout.experts_on(rank, 0)) for rank in layout.ranks]
            assert max(slots) - min(slots) <= 1


floors = st.integers(1, 3)


@st.composite
def deaths(draw: st.DrawFn) -> tuple[NodeOf, Layout, set[int]]:
    """Nodes, a layout spread over them, and ranks that die without losing any expert."""
    node_of = draw(nodes(are_equal=draw(st.booleans())))
    replicas = draw(st.integers(1, min(3, len(node_of))))
    layout = first(node_of, draw(experts), replicas)
    hosts = [{host.rank for host in on} for layer in layout.experts for on in layer]
    number, dead = draw(st.integers(1, len(layout.ranks))), set[int]()
    for rank in draw(st.permutations(layout.ranks))[:number]:
        with_it = dead | {rank}
        if with_it != set(layout.ranks) and not any(on <= with_it for on in hosts):
            dead = with_it
    assume(dead)
    return node_of, layout, dead


@given(deaths(), floors)
def test_survivors_spread_each_expert_over_the_nodes_that_live(
    case: tuple[NodeOf, Layout, set[int]], min_hosts: int
) -> None:
    node_of, layout, dead = case
    floor = ReplicationFloor(replicas=min_hosts, domain_of=node_of)
    after = shrink(layout, dead=dead, generation=2, floor=floor)
    num_living = len({node_of[rank] for rank in after.ranks})
    wide = min(min_hosts, num_living, len(after.ranks))
    pairs = zip(layout.experts[0], after.experts[0], on_nodes(after, node_of)[0], strict=True)
    for before, now, spread in pairs:
        assert spread >= wide
        # No copy more than it takes, and nobody gives a replica up.
        left = {host.rank for host in before} - dead
        left_on = {node_of[rank] for rank in left}
        assert left <= {host.rank for host in now}
        needed = max(min(min_hosts, len(after.ranks)) - len(left), wide - len(left_on), 0)
        assert len(now) == len(left) + needed


@given(deaths(), floors, st.integers(1, 12))
def test_where_slots_are_short_an_expert_lacks_nodes_only_if_these_are_full(
    case: tuple[NodeOf, Layout, set[int]], min_hosts: int, slots: int
) -> None:
    node_of, layout, dead = case
    floor = ReplicationFloor(replicas=min_hosts, domain_of=node_of, slots_per_rank=slots)
    after = shrink(layout, dead=dead, generation=2, floor=floor)
    wide = min(min_hosts, len({node_of[rank] for rank in after.ranks}))
    for layer, layer_experts in enumerate(after.experts):
        used = {rank: len(after.experts_on(rank, layer)) for rank in after.ranks}
        had = {rank: len(layout.experts_on(rank, layer)) for rank in after.ranks}
        for before, hosts in zip(layout.experts[layer], layer_experts, strict=True):
            covered = {node_of[host.rank] for host in hosts}
            was_hit = any(host.rank in dead for host in before)
            if was_hit and len(covered) < wide:
                others = [rank for rank in after.ranks if node_of[rank] not in covered]
                assert all(used[rank] >= slots for rank in others)
        # A rank goes beyond its slots only for an expert that finds a free one nowhere.
        for rank in [rank for rank in after.ranks if used[rank] > max(slots, had[rank])]:
            on_it = [
                {host.rank for host in layer_experts[expert]}
                for expert in after.experts_on(rank, layer)
            ]
            assert any(all(used[r] >= slots for r in set(used) - hosts) for hosts in on_it)


@given(st.integers(1, 12))
def test_an_expert_that_lost_nothing_costs_no_copy(num_experts: int) -> None:
    """Its hosts stand on one node, and stay: they are no less safe than before."""
    node_of = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    narrow = even_layout(ranks=range(5), num_layers=1, num_experts=2 * num_experts, replicas=2)
    after = shrink(narrow, dead=[4], generation=2, floor=ReplicationFloor(domain_of=node_of))
    hit = [e for e, on in enumerate(narrow.experts[0]) if any(h.rank == 4 for h in on)]
    assert {move.block.index for move in diff_layouts(narrow, after) if move.block.layer == 0} <= {
        *hit
    }


def test_an_expert_with_hosts_enough_gets_another_where_all_stand_on_one_node() -> None:
    node_of = {0: "a", 1: "a", 2: "b", 3: "b"}
    three = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=3)
    floor = ReplicationFloor(replicas=2, domain_of=node_of)
    for dead in range(4):
        after = shrink(three, dead=[dead], generation=2, floor=floor)
        assert on_nodes(after, node_of) == [[2] * 4]


def test_any_node_may_die_and_then_any_rank() -> None:
    node_of = {rank: "abc"[rank // 2] for rank in range(6)}
    layout = first(node_of, 16, 2)
    floor = ReplicationFloor(domain_of=node_of)
    for node in "abc":
        gone = [rank for rank in node_of if node_of[rank] == node]
        left = shrink(layout, dead=gone, generation=2, floor=floor)
        for others in combinations(left.ranks, 1):
            shrink(left, dead=others, generation=3, floor=floor)


def test_the_work_of_survivors_is_level() -> None:
    """The one rank left of its node holds a replica of everything, and computes no more of it."""
    node_of = {0: "a", 1: "a", 2: "b", 3: "b"}
    after = shrink(
        first(node_of, 8, 2), dead=[3], generation=2, floor=ReplicationFloor(domain_of=node_of)
    )
    assert len(after.experts_on(2, 0)) == 8
    load = load_of(after, 0)
    assert max(load.values()) < 1.001 * min(load.values())


def test_where_nobody_lacks_work_shares_are_equal() -> None:
    assert level_shares([(2, 1)], {1: 3.0, 2: 3.0}, 1.0) == [{1: 0.5, 2: 0.5}]


def host_nodes(layout: Layout, node_of: NodeOf) -> list[set[frozenset[str]]]:
    """By layer, the sets of nodes that hold all copies of some expert."""
    return [
        {frozenset(node_of[host.rank] for host in hosts) for hosts in layer}
        for layer in layout.experts
    ]


@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(1, 5)
)
def test_all_layers_of_a_first_layout_can_be_lost_with_the_same_few_sets_of_nodes(
    num_nodes: int, per_node: int, replicas: int, num_experts: int, num_layers: int
) -> None:
    num_ranks = num_nodes * per_node
    assume(replicas <= num_ranks)
    node_of = {rank: f"{rank // per_node}" for rank in range(num_ranks)}
    layout = even_layout(
        ranks=node_of,
        num_layers=num_layers,
        num_experts=num_experts,
        replicas=replicas,
        domain_of=node_of,
    )
    by_layer = host_nodes(layout, node_of)
    together = set[frozenset[str]]().union(*by_layer)
    assert len(together) <= (num_nodes if replicas < num_nodes else 1)
    if num_experts >= num_ranks:
        assert all(layer == together for layer in by_layer)
    if num_experts * replicas <= num_ranks and num_ranks % replicas == 0:
        ranks = {frozenset(h.rank for h in on) for layer in layout.experts for on in layer}
        assert all(one == other or not one & other for one in ranks for other in ranks)


@given(nodes(are_equal=False), experts, st.integers(1, 5), st.integers(1, 4))
def test_on_unequal_nodes_too_one_circle_serves_all_layers(
    node_of: NodeOf, num_experts: int, replicas: int, num_layers: int
) -> None:
    assume(replicas <= len(node_of))
    one, many = (
        even_layout(
            ranks=node_of,
            num_layers=n,
            num_experts=num_experts * len(node_of),
            replicas=replicas,
            domain_of=node_of,
        )
        for n in (1, num_layers)
    )
    (alone,) = host_nodes(one, node_of)
    assert set[frozenset[str]]().union(*host_nodes(many, node_of)) == alone


@given(st.integers(2, 9), st.integers(2, 3), st.integers(1, 3))
def test_a_slow_rank_can_give_work_to_all_others_over_its_neighbours(
    num_ranks: int, replicas: int, per_rank: int
) -> None:
    assume(replicas <= num_ranks)
    layout = even_layout(
        ranks=range(num_ranks),
        num_layers=1,
        num_experts=per_rank * num_ranks,
        replicas=replicas,
    )
    hosts = [[host.rank for host in on] for on in layout.experts[0]]
    speeds = dict.fromkeys(range(num_ranks), 1.0) | {0: 0.5}
    best = best_value([1.0] * len(hosts), hosts, speeds)
    assert best.value == pytest.approx(best.fluid)
