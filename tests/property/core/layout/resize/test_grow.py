"""Wishes about joins: every rank at work, every expert as safe as can be, little moved."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.diff import diff_layouts
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.layout.resize.grow import grow, resize
from pacekeeper.core.layout.resize.shrink import ReplicationFloor, shrink
from support.layouts import ModelBlocks, layouts, load_of, on_nodes


@dataclass(frozen=True, kw_only=True)
class Join:
    """A layout, who joins it, and where everybody stands."""

    layout: Layout
    newcomers: tuple[int, ...]
    node_of: Mapping[int, Hashable]
    hosts: int
    slots: int | None = None

    @property
    def floor(self) -> ReplicationFloor:
        return ReplicationFloor(
            replicas=self.hosts, domain_of=self.node_of, slots_per_rank=self.slots
        )

    def grown(self) -> Layout:
        return grow(self.layout, newcomers=self.newcomers, generation=9, floor=self.floor)


@st.composite
def any_joins(draw: st.DrawFn) -> Join:
    """Any hosts and shares at all, newcomers on old nodes or new ones, slots or none."""
    model = ModelBlocks(num_virtual_shards=1, experts_per_layer=(draw(st.integers(0, 6)),))
    layout = draw(layouts(model=model, may_stand_by=False))
    free = sorted(set(range(40)) - set(layout.ranks))
    newcomers = draw(st.sets(st.sampled_from(free), min_size=1, max_size=4))
    node_of = {r: draw(st.integers(0, 4)) for r in (*layout.ranks, *newcomers)}
    return Join(
        layout=layout,
        newcomers=tuple(sorted(newcomers)),
        node_of=node_of,
        hosts=draw(st.integers(1, 3)),
        slots=draw(st.none() | st.integers(1, 6)),
    )


@st.composite
def come_back(draw: st.DrawFn) -> Join:
    """Whole nodes died, and as many ranks come back, on nodes of new numbers."""
    num_nodes, per_node = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    ranks = range(num_nodes * per_node)
    node_of = {rank: rank // per_node for rank in ranks}
    replicas = draw(st.integers(2, min(3, num_nodes)))
    first = even_layout(
        ranks=ranks, num_layers=3, num_experts=draw(st.integers(2, 12)), replicas=replicas,
        domain_of=node_of,
    )  # fmt: skip
    lost = draw(st.sets(st.integers(0, num_nodes - 1), min_size=1, max_size=num_nodes - 1))
    dead = [rank for rank in ranks if node_of[rank] in lost]
    floor = ReplicationFloor(replicas=min(replicas, len(ranks) - len(dead)), domain_of=node_of)
    try:
        left = shrink(first, dead=dead, generation=2, floor=floor)
    except LostStateError:
        assume(False)
    newcomers = tuple(len(ranks) + i for i in range(len(dead)))
    node_of |= {rank: num_nodes + i // per_node for i, rank in enumerate(newcomers)}
    return Join(layout=left, newcomers=newcomers, node_of=node_of, hosts=replicas)


def held(layout: Layout, rank: int) -> set[tuple[int, int]]:
    """(layer, expert) of every replica on `rank`."""
    return {
        (layer, e) for layer in range(layout.num_layers) for e in layout.experts_on(rank, layer)
    }


@given(any_joins())
def test_all_ranks_are_there_and_compute_their_part_of_the_batch(join: Join) -> None:
    after = join.grown()
    assert after.generation == 9
    assert after.ranks == tuple(sorted((*join.layout.ranks, *join.newcomers)))
    assert after.speeds == join.layout.speeds
    shares, speed = dict(after.batch_shares), after.speed_by_rank
    whole = sum(speed.values())
    assert shares == pytest.approx({rank: speed[rank] / whole for rank in after.ranks})
    assert min(shares.values()) > 0.0


@given(any_joins())
def test_it_is_the_same_whoever_computes_it(join: Join) -> None:
    backwards = replace(join, newcomers=tuple(reversed(join.newcomers)))
    renamed = replace(join, node_of={r: f"node {n}" for r, n in join.node_of.items()})
    assert join.grown() == backwards.grown() == renamed.grown()


@given(any_joins())
def test_no_expert_stands_on_fewer_hosts_or_nodes_than_before(join: Join) -> None:
    after = join.grown()
    enough = min(join.hosts, len(after.ranks))
    for old, new in zip(join.layout.experts, after.experts, strict=True):
        for was, now in zip(old, new, strict=True):
            assert len(now) == max(len(was), enough), "nor a copy more than the floor asks for"
    before = on_nodes(join.layout, join.node_of)
    for old_nodes, nodes in zip(before, on_nodes(after, join.node_of), strict=True):
        assert all(a >= b for a, b in zip(nodes, old_nodes, strict=True))


@given(any_joins())
def test_an_expert_on_too_few_nodes_gets_another_where_newcomers_have_one_and_a_slot(
    join: Join,
) -> None:
    after = join.grown()
    wide = min(join.hosts, len(set(join.node_of.values())))
    for layer, nodes in enumerate(on_nodes(after, join.node_of)):
        full = len(after.experts[layer]) if join.slots is None else join.slots
        for expert, count in enumerate(nodes):
            on = {join.node_of[host.rank] for host in after.experts[layer][expert]}
            free = [
                rank
                for rank in join.newcomers
                if join.node_of[rank] not in on and len(after.experts_on(rank, layer)) < full
            ]
            assert count >= wide or not free or join.slots is not None


@given(any_joins())
def test_newcomers_receive_and_nobody_else_unless_a_floor_needs_it(join: Join) -> None:
    after = join.grown()
    moves = diff_layouts(join.layout, after)
    assert all(move.source in join.layout.ranks for move in moves), "all can be had"
    enough = min(join.hosts, len(after.ranks))
    for rank in join.layout.ranks:
        for layer, expert in held(after, rank) - held(join.layout, rank):
            assert len(join.layout.experts[layer][expert]) < enough


@given(come_back())
def test_a_newcomer_holds_its_even_part_and_no_more_than_that_moves(join: Join) -> None:
    after = join.grown()
    for layer in range(after.num_layers):
        slots = {rank: len(after.experts_on(rank, layer)) for rank in after.ranks}
        even = sum(slots.values()) / len(slots)
        missing = sum(
            max(0, join.hosts - len({join.node_of[h.rank] for h in hosts}))
            for hosts in join.layout.experts[layer]
        )
        received = sum(slots[rank] for rank in join.newcomers)
        assert received <= max(missing, even * len(join.newcomers))
        # One less where each replica left to take would bring an expert twice onto one node.
        assert all(slots[rank] >= int(even) - 1 for rank in join.newcomers)


@given(come_back())
def test_nodes_that_come_back_make_every_expert_as_safe_as_at_first(join: Join) -> None:
    after = join.grown()
    assert all(nodes >= join.hosts for layer in on_nodes(after, join.node_of) for nodes in layer)


@given(come_back())
def test_newcomers_take_their_part_of_the_work(join: Join) -> None:
    after = join.grown()
    for layer in range(after.num_layers):
        load = load_of(after, layer)
        even = len(after.experts[layer]) / len(after.ranks)
        for rank in join.newcomers:
            assert load[rank] >= 0.5 * min(even, len(after.experts_on(rank, layer)))


@given(any_joins())
def test_shares_of_untouched_experts_stay(join: Join) -> None:
    after = join.grown()
    for old, new in zip(join.layout.experts, after.experts, strict=True):
        for was, now in zip(old, new, strict=True):
            if [h.rank for h in was] == [h.rank for h in now]:
                assert was == now


def test_a_single_survivor_shares_everything_with_who_comes() -> None:
    alone = even_layout(ranks=[3], num_layers=2, num_experts=4, replicas=1)
    after = grow(alone, newcomers=[4], generation=2, floor=ReplicationFloor(replicas=2))
    assert after.batch_shares == ((3, 0.5), (4, 0.5))
    for layer in after.experts:
        assert [[(h.rank, h.share) for h in hosts] for hosts in layer] == [[(3, 0.5), (4, 0.5)]] * 4


def test_a_slow_rank_keeps_its_smaller_part() -> None:
    layout = replace(
        even_layout(ranks=range(2), num_layers=1, num_experts=4, replicas=2), speeds=((0, 0.5),)
    )
    after = grow(layout, newcomers=[2], generation=2, floor=ReplicationFloor(replicas=2))
    assert dict(after.batch_shares) == pytest.approx({0: 0.2, 1: 0.4, 2: 0.4})
    assert load_of(after, 0)[0] < load_of(after, 0)[1]


@pytest.mark.parametrize(
    ("newcomers", "words"),
    [
        ([], r"ranks \[\] "),
        ([1, 5], r"\[1, 5\]"),
    ],
)
def test_who_can_not_join_is_refused(newcomers: list[int], words: str) -> None:
    layout = even_layout(ranks=range(2), num_layers=2, num_experts=2, replicas=2)
    with pytest.raises(ValueError, match=words):
        grow(layout, newcomers=newcomers, generation=2)


@given(come_back(), st.data())
def test_deaths_and_joins_at_once_leave_no_expert_behind(join: Join, data: st.DataObject) -> None:
    first = join.layout
    dead = data.draw(st.sets(st.sampled_from(first.ranks), max_size=len(first.ranks) - 1))
    lost = any({host.rank for host in hosts} <= dead for layer in first.experts for hosts in layer)
    staying = set(first.ranks) - dead | set(join.newcomers)
    if lost:
        with pytest.raises(LostStateError):
            resize(first, staying, generation=9, floor=join.floor)
        return
    after = resize(first, staying, generation=9, floor=join.floor)
    assert after.ranks == tuple(sorted(staying)) and after.generation == 9
    enough = min(join.hosts, len(staying))
    assert all(len(hosts) >= enough for layer in after.experts for hosts in layer)
    moves = diff_layouts(first, after, living=staying)
    assert all(move.source in set(first.ranks) - dead for move in moves)


@given(any_joins(), st.data())
def test_an_expert_that_lost_a_host_stands_as_wide_as_members_and_newcomers_allow(
    join: Join, data: st.DataObject
) -> None:
    """Where slots bind no one, on as many nodes as its floor asks for."""
    first, floor = join.layout, replace(join.floor, slots_per_rank=None)
    dead = data.draw(st.sets(st.sampled_from(first.ranks), max_size=len(first.ranks) - 1))
    staying = set(first.ranks) - dead | set(join.newcomers)
    after = resize(first, staying, generation=9, floor=floor, is_restored=True)
    enough = min(join.hosts, len(staying))
    wide = min(enough, len({join.node_of[rank] for rank in staying}))
    for old, nodes in zip(first.experts, on_nodes(after, join.node_of), strict=True):
        for hosts, count in zip(old, nodes, strict=True):
            assert count >= wide or not {host.rank for host in hosts} & dead


def test_a_death_and_a_join_at_once_leave_an_expert_on_three_nodes_where_there_are_three() -> None:
    """Two hosts on one node, the third dies; newcomers bring a second node, members the third."""
    node_of = {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}
    first = even_layout(ranks=range(4), num_layers=1, num_experts=1, replicas=1)
    hosts = tuple(ExpertReplica(rank, share) for rank, share in ((0, 0.5), (1, 0.25), (2, 0.25)))
    first = replace(first, experts=((hosts,),))
    after = resize(
        first, (0, 1, 3, 4), generation=2, floor=ReplicationFloor(replicas=3, domain_of=node_of)
    )
    assert len({node_of[host.rank] for host in after.experts[0][0]}) == 3


@given(come_back(), st.data())
def test_what_a_checkpoint_fills_needs_no_living_host(join: Join, data: st.DataObject) -> None:
    first = join.layout
    dead = data.draw(st.sets(st.sampled_from(first.ranks), max_size=len(first.ranks) - 1))
    staying = set(first.ranks) - dead | set(join.newcomers)
    after = resize(first, staying, generation=9, floor=join.floor, is_restored=True)
    assert after.ranks == tuple(sorted(staying)) and after.generation == 9
    assert set(after.blocks()) == set(first.blocks()), "all that was saved has a place"
    enough = min(join.hosts, len(staying))
    for layer in after.experts:
        for hosts in layer:
            assert len(hosts) >= enough and {host.rank for host in hosts} <= staying
            assert sum(host.share for host in hosts) == pytest.approx(1.0)
    two = min(2, enough, len({join.node_of[rank] for rank in staying}))
    assert all(nodes >= two for layer in on_nodes(after, join.node_of) for nodes in layer)


@given(come_back())
def test_without_newcomers_it_is_the_survivors_own_rule(join: Join) -> None:
    dead = join.layout.ranks[:1]
    staying = set(join.layout.ranks[1:])
    try:
        wanted = shrink(join.layout, dead=dead, generation=9, floor=join.floor)
    except LostStateError:
        assume(False)
    assert resize(join.layout, staying, generation=9, floor=join.floor) == wanted


@given(st.integers(2, 8), st.integers(2, 12), st.integers(2, 3), st.randoms(use_true_random=False))
def test_fixed_slots_are_never_exceeded_and_replicas_are_restored_as_far_as_they_fit(
    size: int, num_experts: int, replicas: int, chosen: Random
) -> None:
    layout = even_layout(
        ranks=range(size), num_layers=2, num_experts=num_experts, replicas=min(replicas, size)
    )
    held = max(len(layout.experts_on(r, layer)) for r in layout.ranks for layer in range(2))
    slots = held + chosen.randint(0, 2)
    while len(layout.ranks) > 1:
        living = set(layout.ranks) - {chosen.choice(layout.ranks)}
        floor = ReplicationFloor(
            replicas=min(replicas, len(living)), slots_per_rank=slots, are_slots_fixed=True
        )
        try:
            layout = resize(layout, living, generation=layout.generation + 1, floor=floor)
        except LostStateError:
            event("an expert is lost")
            return
        most = max(len(layout.experts_on(r, layer)) for r in layout.ranks for layer in range(2))
        fewest = min(len(on) for experts in layout.experts for on in experts)
        assert most <= slots
        event(f"fewer replicas than asked for: {fewest < floor.replicas}")
        if len(living) * (slots - 1) >= num_experts * floor.replicas:  # with room to spare
            assert fewest == floor.replicas
        for layer, experts in enumerate(layout.experts):
            free = {r for r in layout.ranks if len(layout.experts_on(r, layer)) < slots}
            for on in experts:
                assert abs(sum(replica.share for replica in on) - 1.0) < 1e-9
                # No slot is left that would bring an expert nearer to what is asked for.
                assert len(on) >= floor.replicas or free <= {replica.rank for replica in on}


@given(st.integers(2, 8), st.integers(2, 12), st.integers(2, 4), st.randoms(use_true_random=False))
def test_all_that_slots_can_hold_is_restored_though_replicas_are_in_the_way(
    size: int, num_experts: int, replicas: int, chosen: Random
) -> None:
    layout = even_layout(
        ranks=range(size), num_layers=2, num_experts=num_experts, replicas=min(replicas, size)
    )
    slots = max(len(layout.experts_on(r, layer)) for r in layout.ranks for layer in range(2))
    living = set(chosen.sample(layout.ranks, chosen.randint(1, size)))
    floor = ReplicationFloor(
        replicas=min(replicas, len(living)), slots_per_rank=slots, are_slots_fixed=True
    )
    if len(living) * slots < num_experts:
        event("too few slots")
        with pytest.raises(LostStateError):
            resize(layout, living, generation=2, floor=floor, is_restored=True)
        return
    found = resize(layout, living, generation=2, floor=floor, is_restored=True)
    held = [len(found.experts_on(r, layer)) for r in living for layer in range(2)]
    assert max(held) <= slots
    event(f"some experts were lost: {len(living) <= size - min(replicas, size)}")
