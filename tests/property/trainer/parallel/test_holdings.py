"""Whatever layers, shards and experts a rank comes to hold, each keeps its bits and its state."""

from functools import cache
from random import Random

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import read_block
from pacekeeper.trainer.model.blocks import BlockStore, Holding
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.block_states import TrainedBlocks
from support.engine_saves import State
from support.examples import examples
from support.tiny_models import tiny_config

LAYERS, SHARDS, EXPERTS = 3, 4, 4
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3")


@cache
def trained(family: str) -> tuple[TrainedBlocks, State]:
    """All of a model in shards, with state whose every value differs; and a copy of it."""
    skeleton = build_skeleton(
        tiny_config(family, num_hidden_layers=LAYERS),
        num_attention_shards=SHARDS,
        num_mlp_shards=SHARDS,
    )
    store = BlockStore(skeleton, num_slots=EXPERTS)
    every = {expert: expert for expert in range(EXPERTS)}
    held = [every if one else {} for one in skeleton.experts]
    store.materialize(held, SeededInitialization(skeleton, 7))
    named = dict(skeleton.module.named_parameters())
    groups = [
        {"params": [p for p in named.values() if (p.ndim == 1) == is_vector], "weight_decay": decay}
        for is_vector, decay in ((True, 0.0), (False, 0.1))
    ]
    optimizer = torch.optim.AdamW(groups)
    generator = torch.Generator().manual_seed(1)
    for parameter in named.values():
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    blocks = TrainedBlocks(store, [optimizer])
    blocks.num_updates = 1
    return blocks, {
        block: {name: tensor.clone() for name, tensor in read_block(blocks, block).items()}
        for block in skeleton.blocks
    }


@st.composite
def ranges(draw: st.DrawFn, end: int, least: int = 0) -> range:
    first = draw(st.integers(0, end - least))
    return range(first, draw(st.integers(first + least, end)))


holdings = st.builds(
    Holding,
    layers=ranges(LAYERS, 1),
    attention=ranges(SHARDS, 1),
    mlp=ranges(SHARDS),
    has_embedding=st.booleans(),
    has_head=st.booleans(),
)
owned = st.one_of(st.none(), st.integers(0, 999))  # the seed that draws what has state
EVERYWHERE = (BlockKind.EXPERT, BlockKind.NORM_ROUTER)
placed = st.sets(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)))


@settings(max_examples=examples(40), deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    changes=st.lists(st.tuples(holdings, placed, owned), min_size=1, max_size=4),
)
def test_blocks_keep_their_bits_through_any_changes_of_what_is_held_and_owned(
    family: str, changes: list[tuple[Holding, set[tuple[int, int]], int | None]]
) -> None:
    blocks, state = trained(family)
    store, (optimizer,) = blocks.store, blocks._optimizers
    skeleton = store.skeleton
    specs = {block: blocks.specs(block) for block in skeleton.blocks}
    decays = decay_by_name(blocks, optimizer)
    before = Holding.everything(skeleton)
    held = dict.fromkeys(skeleton.blocks, True)
    every = (before, {(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)}, None)
    for holding, experts, seed in [*changes, every]:
        chosen = Random(seed)
        kinds = [
            name
            for name, old, new in (
                ("layers", before.layers, holding.layers),
                ("runs", (before.attention, before.mlp), (holding.attention, holding.mlp)),
            )
            if old != new
        ]
        event(f"a change of {' and '.join(kinds) or 'experts alone'}")
        wanted = [
            block
            for block in skeleton.blocks
            if holding.has(block)
            and (block.kind is not BlockKind.EXPERT or (block.layer, block.index) in experts)
        ]
        has_state = {
            block: seed is None or block.kind in EVERYWHERE or chosen.random() < 0.5
            for block in wanted
        }
        event(f"owned: {not all(has_state.values())}")
        fresh: dict[Block, dict[str, torch.Tensor]] = {}
        for block, has in has_state.items():
            weights = skeleton.blocks[block].keys()
            lacks = {True} if block not in held else set[bool]()
            lacks |= {False} if has and not held.get(block, False) else set[bool]()
            tensors = {n: t for n, t in state[block].items() if (n in weights) in lacks}
            fresh |= {block: tensors} if tensors else {}
        blocks.load(has_state, fresh, 1)
        assert list(store.blocks()) == wanted
        for block, has in has_state.items():
            found, weights = read_block(blocks, block), skeleton.blocks[block].keys()
            assert found.keys() == (state[block].keys() if has else weights)
            assert all(torch.equal(t, state[block][name]) for name, t in found.items()), block
        assert {block: blocks.specs(block) for block in skeleton.blocks} == specs
        assert decay_by_name(blocks, optimizer) == decays
        updated = {one.tensor for one in blocks._updated.values() if one.shards}
        assert set(optimizer.state) <= {tensor for tensor in updated if not tensor.is_meta}
        assert all(one.device.type == "cpu" for one in held_tensors(store, wanted))
        before, held = holding, has_state


def decay_by_name(blocks: TrainedBlocks, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {id(blocks._updated_of(name).tensor): name for name in blocks._owners_by_name()}
    return {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}


def held_tensors(store: BlockStore, blocks: list[Block]) -> list[torch.Tensor]:
    return [part.tensor for block in blocks for part in store.parts(block).values()]
