"""The budget has the bytes of state that training allocates; its estimate is within a factor."""

from dataclasses import replace

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.memory_budget import (
    ESTIMATE_FACTOR,
    MemoryBudget,
    MicroBatchShape,
    budget_table,
    memory_budget,
    require_memory,
)
from pacekeeper.trainer.engine.micro_batches import cross_entropy
from pacekeeper.trainer.model.blocks import BlockStore, Holding
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import adamw, engine_of, micro_batches, rows_of
from support.rank_threads import ThreadGroup, run_ranks
from support.tiny_models import tiny_config

SHAPE = MicroBatchShape(rows=7, row_tokens=10)


def size(tensors: object) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama"])
def test_bytes_of_state_are_exact(family: str) -> None:
    probe = build_skeleton(tiny_config(family))
    counts = [one.num_experts if one else 0 for one in probe.experts]

    def work(group: ThreadGroup) -> None:
        engine = engine_of(
            family,
            group,
            dtype=torch.float32,
            layout=start_layout(counts, group.ranks, replicas=2),
            num_slots=4,
        )
        optimizer = adamw(engine)
        held = sum(map(len, engine.store.slots))
        budget = memory_budget(probe, SHAPE, num_slots=4, used_slots=held, num_ranks=2)
        own = engine.rows(7)
        engine.step(micro_batches(rows_of(0)[own.start : own.stop]))
        experts = size(engine.expert_parameters())
        assert budget.used_slots + budget.free_slots == experts
        assert budget.used_slots * 4 * len(experts_layers(engine)) == experts * held
        tensors = [*engine.model.parameters(), *engine.model.buffers()]
        assert budget.dense_weights == size(tensors) - experts
        assert budget.gradients == size(engine.parameters())
        states = [t for state in optimizer.state.values() for t in state.values()]
        assert budget.optimizer == size(states)
        assert budget.in_flight == size(engine.dense_parameters())

    run_ranks(2, work)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_rank_is_charged_for_what_it_holds(family: str) -> None:
    skeleton = build_skeleton(tiny_config(family), num_attention_shards=4, num_mlp_shards=4)
    whole = memory_budget(skeleton, SHAPE, num_slots=3, used_slots=2, num_ranks=4)
    parts = [
        Holding(
            layers=range(layer, layer + 1),
            attention=attention,
            mlp=mlp,
            has_embedding=not layer,
            has_head=bool(layer),
        )
        for layer in range(2)
        for attention, mlp in ((range(3), range(2)), (range(3, 4), range(2, 4)))
    ]
    budgets = [
        memory_budget(skeleton, SHAPE, num_slots=3, used_slots=2, num_ranks=4, holding=holding)
        for holding in parts
    ]
    for holding, budget in zip(parts, budgets, strict=True):
        held = [
            {0: 0, 3: 1} if one and n in holding.layers else {}
            for n, one in enumerate(skeleton.experts)
        ]
        store = BlockStore(
            build_skeleton(tiny_config(family), num_attention_shards=4, num_mlp_shards=4),
            num_slots=3,
        )
        store.materialize(held, SeededInitialization(store.skeleton, 1), holding)
        module = store.skeleton.module
        real = [one for one in (*module.parameters(), *module.buffers()) if not one.is_meta]
        weights = budget.dense_weights + budget.used_slots + budget.free_slots
        assert weights == size(real)
        assert budget.used_slots > 0 or not any(held)
        assert budget.activations < whole.activations
    assert max(one.total for one in budgets) < whole.total
    first = memory_budget(
        skeleton,
        replace(SHAPE, num_in_flight=2),
        num_slots=3,
        used_slots=2,
        num_ranks=4,
        holding=parts[0],
    )
    assert first.activations == 2 * budgets[0].activations  # no logits on the first stage


def experts_layers(engine: Engine) -> list[int]:
    return [one.layer for one in engine.skeleton.experts if one is not None]


def kept_bytes(family: str, compute_dtype: torch.dtype | None, checkpoint: bool) -> tuple[int, int]:
    """Bytes that autograd keeps between the passes, and the estimate."""
    config = tiny_config(family, hidden_size=128, vocab_size=512)
    engine = Engine.from_config(
        config, compute_dtype=compute_dtype, checkpoint_activations=checkpoint
    )
    shape = MicroBatchShape(
        rows=4, row_tokens=32, compute_dtype=compute_dtype, checkpoint_activations=checkpoint
    )
    own = {t.untyped_storage().data_ptr() for t in engine.model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(0, 90, (4, 33))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        passes = engine._passes
        kept_loss = passes.evaluate(*passes.agree(0, [batch]), cross_entropy)
    total = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)
    slots = engine.store.num_slots
    budget = memory_budget(engine.skeleton, shape, num_slots=slots, used_slots=0, num_ranks=1)
    assert kept_loss.requires_grad
    return total, budget.activations


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama"])
def test_the_estimate_of_activations_is_within_its_factor(
    family: str, compute_dtype: torch.dtype | None
) -> None:
    plain, estimate = kept_bytes(family, compute_dtype, False)
    assert plain / ESTIMATE_FACTOR < estimate < plain * ESTIMATE_FACTOR
    kept, repeated = kept_bytes(family, compute_dtype, True)
    # What is kept, and one of two layers that is repeated in the backward pass.
    peak = kept + (plain - kept) / 2
    assert peak / ESTIMATE_FACTOR < repeated < peak * ESTIMATE_FACTOR


BUDGET = MemoryBudget(
    dense_weights=10,
    used_slots=5,
    free_slots=5,
    gradients=20,
    optimizer=40,
    activations=60,
    in_flight=10,
)


def test_only_what_cannot_fit_is_rejected() -> None:
    assert (BUDGET.state, BUDGET.total, BUDGET.least) == (80, 140, 110)
    assert replace(BUDGET, in_flight=70).total == 150
    require_memory(BUDGET, available=110, where="rank 0")
    require_memory(BUDGET, available=None, where="rank 0")
    with pytest.raises(ConfigError, match="rank 3 on cuda:1"):
        require_memory(BUDGET, available=109, where="rank 3 on cuda:1")


def test_the_table_has_every_part() -> None:
    scaled = replace(BUDGET, activations=3 << 30)
    lines = budget_table(scaled, rank=2, available=8 << 30).splitlines()
    assert lines[0].endswith("GiB") and lines[-1].split()[-1] == "8.00"
    assert [line.split()[-1] for line in lines if "activations" in line] == ["3.00"]
    assert len(lines) == 10
