"""Wishes on the dispatcher: nothing is dropped, loads follow speeds, and the way back is exact."""

import random
from dataclasses import replace

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ReplicaSet
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.parallel.token_dispatcher import DispatchPlan, combine, dispatch
from support.examples import examples
from support.worlds import ThreadFabric, ThreadWorld, run_world

RANKS = (1, 2, 5, 9)
NODES = {1: "a", 2: "a", 5: "b", 9: "b"}
HIDDEN = 3


@st.composite
def expert_hosts(draw: st.DrawFn) -> ReplicaSet:
    """Some of the ranks."""
    on = sorted(draw(st.sets(st.sampled_from(RANKS), min_size=1)))
    return tuple(ExpertReplica(rank, 1.0 / len(on)) for rank in on)


layers = st.lists(expert_hosts(), min_size=1, max_size=5).map(tuple)
speeds = st.dictionaries(st.sampled_from(RANKS), st.floats(0.2, 1.0))


def layout_of(hosts: tuple[ReplicaSet, ...], at: dict[int, float] | None = None) -> Layout:
    base = even_layout(ranks=RANKS, num_layers=1, num_experts=1, replicas=1)
    return replace(base, experts=(hosts,), speeds=tuple(sorted((at or {}).items())))


def routes_of(layout: Layout, rank: int) -> DispatchPlan:
    return DispatchPlan.of(layout, 0, ThreadFabric(ThreadWorld(RANKS), rank), NODES)


def loads(
    hosts: tuple[ReplicaSet, ...], at: dict[int, float], counts_WE: torch.Tensor
) -> list[int]:
    """Rows that each rank gets."""
    layout = layout_of(hosts, at)
    return [int(routes_of(layout, rank).split(counts_WE).received_WQ.sum()) for rank in RANKS]


def test_experts_that_live_everywhere_are_computed_in_proportion_to_speed() -> None:
    everywhere = tuple(ExpertReplica(rank, 0.25) for rank in RANKS)
    counts_WE = torch.tensor([[700, 0], [0, 0], [0, 100], [0, 0]])
    assert loads((everywhere, everywhere), {}, counts_WE) == [200, 200, 200, 200]
    counts_WE[0, 0] -= 100
    assert loads((everywhere, everywhere), {5: 0.5}, counts_WE) == [200, 200, 100, 200]


@given(layers, speeds, st.data())
def test_senders_and_receivers_agree_on_every_row(
    hosts: tuple[ReplicaSet, ...], at: dict[int, float], data: st.DataObject
) -> None:
    row = st.lists(st.integers(0, 50), min_size=len(hosts), max_size=len(hosts))
    counts_WE = torch.tensor([data.draw(row) for _ in RANKS])
    layout = layout_of(hosts, at)
    routes = [routes_of(layout, rank) for rank in RANKS]
    ways = [each.split(counts_WE) for each in routes]
    for position, (own, way) in enumerate(zip(routes, ways, strict=True)):
        mine = own.pairs.host_P == position
        assert [e for e, on in enumerate(hosts) if RANKS[position] in {h.rank for h in on}] == (
            own.held_E
        )
        for sender, other in enumerate(ways):
            assert (other.sent_P[mine] == way.received_WQ[sender]).all()


@settings(max_examples=examples(40), deadline=None)
@given(
    layers,
    speeds,
    st.integers(1, 3),
    st.lists(st.integers(0, 12), min_size=4, max_size=4),
    st.integers(),
)
@example(
    ((ExpertReplica(9, 1.0),),), {}, 1, [5, 0, 3, 0], 0
)  # everything on one rank that has no tokens
@example(((ExpertReplica(1, 1.0),),), {}, 1, [0, 0, 0, 0], 0)  # nobody has tokens
def test_rows_reach_their_experts_and_come_home_weighted_gradients_too(
    hosts: tuple[ReplicaSet, ...],
    at: dict[int, float],
    chosen: int,
    num_tokens: list[int],
    seed: int,
) -> None:
    """An expert here multiplies by (its number + 2) and adds it: who answered can be told."""
    num_experts = len(hosts)
    chosen = min(chosen, num_experts)
    layout = layout_of(hosts, at)

    def body(fabric: ThreadFabric) -> None:
        generator = torch.Generator().manual_seed(
            random.Random(f"{seed}{fabric.rank}").getrandbits(60)
        )
        count = num_tokens[RANKS.index(fabric.rank)]
        values = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
        tokens_TD = values.clone().requires_grad_()
        scores_TE = torch.rand(count, num_experts, generator=generator)
        experts_TK = scores_TE.topk(chosen, dim=-1).indices
        weights_TK = torch.rand(count, chosen, generator=generator, dtype=torch.float64)
        weights_TK.requires_grad_()
        work = WorkPass(WorkMeter())
        routes = DispatchPlan.of(layout, 0, fabric, NODES)
        arrived = dispatch(tokens_TD, experts_TK, routes, num_experts, fabric, work)
        here = [any(h.rank == fabric.rank for h in expert) for expert in hosts]
        assert all(int(n) == 0 or on for n, on in zip(arrived.counts_E, here, strict=True))
        number_R = torch.arange(num_experts).repeat_interleave(arrived.counts_E)[:, None]
        answers_RD = arrived.rows_RD * (number_R + 2) + number_R
        mixed_TD = combine(answers_RD, arrived, weights_TK, fabric, work)
        expected_TKD = values[:, None] * (experts_TK + 2)[..., None] + experts_TK[..., None]
        torch.testing.assert_close(mixed_TD, (expected_TKD * weights_TK[..., None]).sum(1))
        mixed_TD.sum().backward()
        slope_TK = weights_TK * (experts_TK + 2)
        torch.testing.assert_close(tokens_TD.grad, slope_TK.sum(1)[:, None].expand_as(values))
        torch.testing.assert_close(weights_TK.grad, expected_TKD.sum(-1))
        # Counts, rows and answers forward, answers and rows backward - on every rank alike.
        assert fabric.num_collectives == 5

    run_world(RANKS, body)
