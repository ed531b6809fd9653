"""Whatever a rank comes to hold, each expert keeps its bits, wherever its slot is."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import read_block
from pacekeeper.trainer.parallel.block_states import TrainedBlocks
from support.engine_saves import State
from support.examples import examples
from support.tiny_models import whole_store

EXPERTS = [Block(BlockKind.EXPERT, layer, expert) for layer in range(2) for expert in range(4)]


@cache
def trained() -> tuple[TrainedBlocks, State]:
    """All of a model, with state whose every value differs; and a copy of it."""
    store = whole_store("qwen3_moe")
    optimizer = torch.optim.AdamW(store.skeleton.module.parameters())
    generator = torch.Generator().manual_seed(1)
    for parameter in store.skeleton.module.parameters():
        parameter.grad = torch.rand(parameter.shape, generator=generator)
    optimizer.step()
    blocks = TrainedBlocks(store, [optimizer])
    blocks.num_updates = 1
    return blocks, {
        block: {name: tensor.clone() for name, tensor in read_block(blocks, block).items()}
        for block in store.skeleton.blocks
    }


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(st.sets(st.sampled_from(EXPERTS)), min_size=1, max_size=6))
def test_experts_keep_their_bits_through_any_changes_of_what_is_held(
    changes: list[set[Block]],
) -> None:
    blocks, state = trained()
    dense = [b for b in blocks.store.skeleton.blocks if b.kind is not BlockKind.EXPERT]
    held = set(EXPERTS)
    for wanted in changes:
        fresh = {block: state[block] for block in wanted - held}
        blocks.load(dict.fromkeys([*dense, *sorted(wanted)], True), fresh, 1)
        held = wanted
        for block in [*dense, *sorted(held)]:
            found = read_block(blocks, block)
            assert found.keys() == state[block].keys()
            assert all(torch.equal(found[name], t) for name, t in state[block].items()), block
        for layer in range(2):
            slots = blocks.store.slots[layer]
            assert sorted(slots) == [b.index for b in sorted(held) if b.layer == layer]
            for parameter in blocks.store.stacked(layer).values():
                free = [row for row in range(len(parameter)) if row not in slots.values()]
                kept = blocks._optimizers[0].state[parameter]
                for tensor in (parameter.detach(), kept["exp_avg"], kept["exp_avg_sq"]):
                    assert not tensor[free].any()
    every = dict.fromkeys([*dense, *EXPERTS], True)
    blocks.load(every, {b: state[b] for b in EXPERTS if b not in held}, 1)
