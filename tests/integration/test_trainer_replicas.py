"""A job spread over ranks and expert replicas computes what one rank alone computes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout import Host, Layout, apportion, even_layout
from pacekeeper.trainer.data import Corpus
from pacekeeper.trainer.fabric import Collectives, LocalFabric
from pacekeeper.trainer.model import MoETransformer, document_mask
from pacekeeper.trainer.replica_sync import ReplicaSync
from pacekeeper.trainer.work import WorkMeter
from support.worlds import ThreadFabric, run_world

CONFIG = TrainConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    expert_hidden_size=48,
    num_experts=5,
    rows_per_step=9,
    row_tokens=128,
    dtype="float64",
)
CORPUS = Corpus.from_stdlib(CONFIG)


def skewed(layout: Layout) -> Layout:
    """The same ranks with very unequal shares, an expert on one rank, and one on all."""
    experts = []
    for layer, layer_experts in enumerate(layout.experts):
        hosts = list(layer_experts)
        hosts[0] = (Host(layout.ranks[layer % len(layout.ranks)], 1.0),)
        shares = apportion(100, [1 / len(layout.ranks)] * len(layout.ranks))
        hosts[1] = tuple(
            Host(rank, share / 100) for rank, share in zip(layout.ranks, shares, strict=True)
        )
        a, b = hosts[2]
        hosts[2] = (Host(a.rank, 0.85), Host(b.rank, 0.15))
        c, d = hosts[3]
        hosts[3] = (Host(c.rank, 0.0), Host(d.rank, 1.0))
        experts.append(tuple(hosts))
    batch = [(rank, 0.0 if i == 1 else 1.0 / (len(layout.ranks) - 1)) for i, rank in
             enumerate(layout.ranks)]  # fmt: skip
    return replace(layout, experts=tuple(experts), batch_shares=tuple(batch))


def train(fabric: Collectives, layout: Layout, config: TrainConfig, steps: int) -> MoETransformer:
    model = MoETransformer(config, layout, fabric.rank)
    model.set_layout(layout, fabric)
    sync = ReplicaSync(layout, fabric)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    counts = layout.rows_of(config.rows_per_step)
    first = sum(count for rank, count in counts.items() if rank < fabric.rank)
    rows = range(first, first + counts[fabric.rank])
    for step in range(steps):
        output = model(CORPUS.batch(step, rows), fabric, WorkMeter())
        loss = output.loss_sum / CORPUS.target_tokens(step)
        (loss + config.balance_loss * output.balance_sum / config.rows_per_step).backward()
        sync.synchronise(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def alone(config: TrainConfig, steps: int) -> MoETransformer:
    layout = even_layout(
        ranks=[0], num_layers=config.num_layers, num_experts=config.num_experts, replicas=1
    )
    return train(LocalFabric(), layout, config, steps)


def spread(
    config: TrainConfig, steps: int, shape: Callable[[Layout], Layout]
) -> tuple[Layout, dict[int, MoETransformer]]:
    layout = shape(
        even_layout(
            ranks=[0, 2, 3, 7],
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            replicas=2,
        )
    )

    def body(fabric: ThreadFabric) -> MoETransformer:
        return train(fabric, layout, config, steps)

    return layout, run_world(layout.ranks, body)


def assert_same(
    layout: Layout, models: dict[int, MoETransformer], reference: MoETransformer, tolerance: float
) -> None:
    for rank, model in models.items():
        for ours, theirs in zip(
            model.dense_parameters(), reference.dense_parameters(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        for layer, module in enumerate(model.layers()):
            assert module.bank.experts == layout.experts_on(rank, layer)
            for slot, expert in enumerate(module.bank.experts):
                whole = reference.layers()[layer].bank
                for name in ("w1", "w2"):
                    torch.testing.assert_close(
                        getattr(module.bank, name)[slot],
                        getattr(whole, name)[expert],
                        rtol=tolerance,
                        atol=tolerance,
                    )


@pytest.mark.parametrize("shape", [lambda layout: layout, skewed], ids=["even", "skewed"])
def test_replicated_training_equals_unreplicated_in_float64(
    shape: Callable[[Layout], Layout],
) -> None:
    layout, models = spread(CONFIG, 20, shape)
    assert_same(layout, models, alone(CONFIG, 20), 1e-9)


def test_in_float32_it_stays_within_rounding() -> None:
    config = replace(CONFIG, dtype="float32")
    layout, models = spread(config, 5, skewed)
    # Adam divides by the root of tiny second moments: rounding of gradients shows up here.
    assert_same(layout, models, alone(config, 5), 2e-4)


def test_holders_of_an_expert_stay_bit_equal() -> None:
    layout, models = spread(replace(CONFIG, dtype="float32"), 8, skewed)
    for layer, experts in enumerate(layout.experts):
        for expert, hosts in enumerate(experts):
            copies = []
            for host in hosts:
                bank = models[host.rank].layers()[layer].bank
                copies.append(bank.w1[bank.experts.index(expert)])
            assert all(torch.equal(copies[0], copy) for copy in copies[1:])


def test_the_loss_falls() -> None:
    before, after = alone(CONFIG, 0), alone(CONFIG, 30)
    layout = even_layout(ranks=[0], num_layers=2, num_experts=5, replicas=1)

    def loss(model: MoETransformer) -> float:
        fabric = LocalFabric()
        model.set_layout(layout, fabric)
        with torch.no_grad():
            output = model(CORPUS.batch(50, range(9)), fabric, WorkMeter())
        return float(output.loss_sum) / CORPUS.target_tokens(50)

    assert loss(after) < loss(before) - 1.0


def test_a_document_never_sees_another() -> None:
    model = alone(CONFIG, 0)
    batch = CORPUS.batch(0, range(9))
    row = next(i for i in range(9) if int(batch.documents[i].max()) >= 1)
    changed = batch.tokens.clone()
    first = batch.documents[row] == 0
    changed[row, first] = (changed[row, first] + 1) % 256
    seen = []
    for tokens in (batch.tokens, changed):
        x = torch.nn.functional.embedding(tokens, model.embedding)
        mask = document_mask(batch.documents)
        seen.append(model.attention[0](x, mask))
    assert torch.equal(seen[0][row, ~first], seen[1][row, ~first])
    assert not torch.equal(seen[0][row, first], seen[1][row, first])
