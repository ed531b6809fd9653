"""Layouts on nodes of unequal size, and a dumb search for what could be mended in them."""

from dataclasses import replace

from hypothesis import strategies as st

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout

NodeOf = dict[int, str]
SpreadCase = tuple[Layout, NodeOf, int]
"""Layout of one layer, the node of each rank, slots per rank."""


@st.composite
def hosted(draw: st.DrawFn) -> SpreadCase:
    """Any hosts on two to eight ranks of one to four nodes, and slots that hold them or more."""
    num_ranks, num_experts = draw(st.integers(2, 8)), draw(st.integers(1, 10))
    node_of = {rank: draw(st.sampled_from("abcd")) for rank in range(num_ranks)}
    base = even_layout(
        ranks=range(num_ranks), num_layers=1, num_experts=num_experts, replicas=1, generation=5
    )
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=3).map(sorted)
    hosts = draw(st.lists(ranks, min_size=num_experts, max_size=num_experts))
    layer = tuple(tuple(ExpertReplica(rank, 1.0 / len(on)) for rank in on) for on in hosts)
    layout = replace(base, experts=(layer,))
    fullest = max(len(layout.experts_on(rank, 0)) for rank in layout.ranks)
    return layout, node_of, draw(st.integers(max(1, fullest - 1), fullest + 2))


@st.composite
def full(draw: st.DrawFn) -> SpreadCase:
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
