"""Tensors of a new model depend on the seed and their names only."""

import pytest
import torch
import transformers

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model import library
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import build_skeleton
from support.tiny_models import tiny_config


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_block_is_the_same_on_any_rank_and_in_any_slot(family: str) -> None:
    first, second = (
        BlockStore(build_skeleton(tiny_config(family)), num_slots=slots) for slots in (2, 4)
    )
    moe = [one is not None for one in first.skeleton.experts]
    first.materialize(
        [{0: 1, 3: 0} if one else {} for one in moe], SeededInitialization(first.skeleton, 5)
    )
    torch.manual_seed(99)  # what else was drawn does not count
    second.materialize(
        [{3: 2, 1: 0} if one else {} for one in moe], SeededInitialization(second.skeleton, 5)
    )
    common = set(first.blocks()) & set(second.blocks())
    assert {block.index for block in common if block.kind is BlockKind.EXPERT} == {3}
    for block in common:
        others = second.read(block)
        for name, value in first.read(block).items():
            assert torch.equal(value, others[name]), name


def test_seeds_names_and_experts_draw_different_tensors() -> None:
    skeleton = build_skeleton(tiny_config("qwen3_moe"))
    source, other = SeededInitialization(skeleton, 5), SeededInitialization(skeleton, 6)
    block = Block(BlockKind.EXPERT, 0, 1)
    name = next(iter(skeleton.blocks[block]))
    mine = source.tensors(block)[name]
    assert not torch.equal(mine, other.tensors(block)[name])
    assert not torch.equal(mine, source.tensors(Block(BlockKind.EXPERT, 0, 2))[name])
    there = source.tensors(Block(BlockKind.EXPERT, 1, 1))
    assert not torch.equal(mine, next(iter(there.values())))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_the_library_draws_alike(family: str) -> None:
    """Deviation, mean and constants of each tensor as in a model of the library; buffers equal."""
    torch.manual_seed(0)
    config = library.load_config(tiny_config(family))
    reference = transformers.AutoModelForCausalLM.from_config(config)
    store = BlockStore(build_skeleton(config), num_slots=4)
    store.materialize(
        [{e: e for e in range(4)} if one else {} for one in store.skeleton.experts],
        SeededInitialization(store.skeleton, 5),
    )
    module = store.skeleton.module
    for name, parameter in reference.named_parameters():
        ours, theirs = module.get_parameter(name).detach(), parameter.detach()
        spread = float(theirs.std()) / theirs.numel() ** 0.5
        if spread == 0:
            assert torch.equal(ours, theirs), name
        elif theirs.numel() >= 64:
            assert abs(float(ours.std() / theirs.std()) - 1) < 4 / theirs.numel() ** 0.5, name
            assert abs(float(ours.mean() - theirs.mean())) < 6 * spread, name
    buffers = dict(module.named_buffers())
    assert buffers
    for name, theirs in reference.named_buffers():
        assert torch.equal(buffers[name], theirs), name


def test_global_randomness_is_not_touched() -> None:
    skeleton = build_skeleton(tiny_config("qwen3_moe"))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    SeededInitialization(skeleton, 5).tensors(Block(BlockKind.HEAD))
    assert torch.equal(torch.rand(3), expected)
