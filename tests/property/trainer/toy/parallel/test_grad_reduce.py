"""Wishes on gradient sync: the plain sum over all holders, bit-equal, in two all-to-alls."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync
from support.examples import examples
from support.training import RANKS, random_layout
from support.worlds import ThreadFabric, run_world

CONFIG = TrainConfig(
    num_layers=2, hidden_size=8, num_heads=2, expert_hidden_size=12, num_experts=3, row_tokens=16
)


def expert_gradients(model: MoETransformer) -> dict[tuple[int, int], Tensor]:
    """(layer, expert) -> both matrices' gradients as one row."""
    found = {}
    for layer, module in enumerate(model.layers()):
        for slot, expert in enumerate(module.bank.held):
            parts = [p.grad for p in (module.bank.w1, module.bank.w2)]
            assert all(part is not None for part in parts), "a missing gradient became zero"
            found[layer, expert] = torch.cat([p[slot].flatten() for p in parts if p is not None])
    return found


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 10_000), st.sets(st.sampled_from(RANKS)))
def test_every_holder_gets_the_sum_in_rank_order(seed: int, without: set[int]) -> None:
    """Ranks in `without` computed nothing: their gradients are missing and count as zero."""
    layout = random_layout(seed, config=CONFIG)
    before: dict[int, tuple[list[Tensor], dict[tuple[int, int], Tensor]]] = {}

    def body(fabric: ThreadFabric) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
        model = MoETransformer(CONFIG, layout, fabric.rank)
        generator = torch.Generator().manual_seed(seed * 16 + fabric.rank)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if fabric.rank in without else noise
        if fabric.rank not in without:
            dense = [p.grad.clone() for p in model.dense_parameters() if p.grad is not None]
            before[fabric.rank] = dense, expert_gradients(model)
        ReplicaSync(layout, fabric).synchronise(model)
        assert fabric.num_collectives == 2
        after = [p.grad for p in model.dense_parameters() if p.grad is not None]
        return after, expert_gradients(model)

    after = run_world(RANKS, body)
    giving = [rank for rank in RANKS if rank in before]
    for rank, (dense, experts) in after.items():
        for i, gradient in enumerate(dense):
            assert torch.equal(gradient, in_order([before[r][0][i] for r in giving], gradient))
        assert set(experts) == {
            (layer, e) for layer in range(2) for e in layout.experts_on(rank, layer)
        }
        for (layer, expert), gradient in experts.items():
            hosts = [host.rank for host in layout.experts[layer][expert] if host.rank in before]
            parts = [before[r][1][layer, expert] for r in hosts]
            assert torch.equal(gradient, in_order(parts, gradient))


def in_order(parts: list[Tensor], like: Tensor) -> Tensor:
    """The sum from left to right: floating-point addition depends on the order."""
    total = torch.zeros_like(like)
    for part in parts:
        total = total + part
    return total
