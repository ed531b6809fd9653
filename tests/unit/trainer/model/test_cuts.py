"""Virtual shards: which tensors are cut and how, and what a rank holds of them."""

from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.blocks import BlockStore, Holding
from pacekeeper.trainer.model.cuts import Cut
from pacekeeper.trainer.model.initialization import SeededInitialization
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from support.tiny_models import tiny_config

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "minimax_m2")
EVERY = [{e: e for e in range(4)}] * 2


def divided(family: str, attention: int = 4, mlp: int = 4, **own: Any) -> Skeleton:
    return build_skeleton(
        tiny_config(family, **own), num_attention_shards=attention, num_mlp_shards=mlp
    )


def stored(skeleton: Skeleton, holding: Holding | None = None) -> BlockStore:
    held = [
        slots if one and (holding is None or layer in holding.layers) else {}
        for layer, (one, slots) in enumerate(zip(skeleton.experts, EVERY, strict=True))
    ]
    store = BlockStore(skeleton, num_slots=4)
    store.materialize(held, SeededInitialization(skeleton, 7), holding)
    return store


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shards_of_a_model_are_the_model(family: str) -> None:
    whole = stored(build_skeleton(tiny_config(family)))
    for attention, mlp in ((4, 2), (1, 4), (2, 1)):
        parted = stored(divided(family, attention, mlp))
        for name, value in whole.skeleton.module.state_dict().items():
            assert torch.equal(value, parted.tensor(name)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ends", [(3, 4), (1, 2, 4), (2, 2, 4)])
def test_any_runs_together_are_the_whole_tensors(family: str, ends: tuple[int, ...]) -> None:
    whole = stored(build_skeleton(tiny_config(family)))
    found = {name: torch.zeros_like(whole.tensor(name)) for name in divided(family).cuts}
    for first, end in zip((0, *ends), ends, strict=False):
        skeleton = divided(family)
        every = Holding.everything(skeleton)
        run = range(first, end)
        store = stored(skeleton, Holding(layers=every.layers, attention=run, mlp=run))
        for name, cut in skeleton.cuts.items():
            value = store.tensor(name)
            shape = whole.tensor(name).shape
            assert tuple(value.shape) == cut.run_shape(shape, end - first)
            for shard in run:
                piece = cut.piece(found[name], shard, 4)
                piece.copy_(cut.piece(value, shard - first, end - first))
    for name, value in found.items():
        assert torch.equal(value, whole.tensor(name)), name


def test_parts_of_a_packed_tensor_are_divided_by_themselves() -> None:
    cut = Cut(BlockKind.DENSE_MLP, 0, 2, parts=2)
    packed = torch.arange(8)
    assert cut.piece(packed, 1, 2).tolist() == [[2, 3], [6, 7]]
    assert cut.run(packed, 0, 1, 2).flatten().tolist() == [0, 1, 4, 5]
    assert cut.piece_shape((8, 3)) == (2, 2, 3)
    columns = Cut(BlockKind.DENSE_MLP, 1, 4)
    assert columns.piece(torch.arange(8).view(2, 4), 2, 4).tolist() == [[2], [6]]


def test_what_is_not_cut_is_with_the_norms_and_experts_keep_theirs() -> None:
    skeleton = divided("deepseek_v3")
    assert skeleton.shared_mlp_layers == (1,)
    norms = skeleton.blocks[Block(BlockKind.NORM_ROUTER, 1)]
    assert {"kv_a_layernorm", "q_a_proj", "gate"} <= {name.split(".")[-2] for name in norms}
    shard = skeleton.blocks[Block(BlockKind.ATTENTION, 1, 3)]
    assert {name.split(".")[-2]: spec.shape for name, spec in shard.items()} == {
        "q_b_proj": (32, 32),
        "kv_b_proj": (48, 16),
        "o_proj": (64, 32),
    }
    assert len(skeleton.blocks[Block(BlockKind.EXPERT, 1, 0)]) == 2
    whole = build_skeleton(tiny_config("deepseek_v3"))
    assert whole.cuts == {} and whole.shared_mlp_layers == ()
    assert not any(region.is_cut for region in whole.regions)


def test_regions_say_what_computing_with_a_run_needs() -> None:
    regions = {region.name: region for region in divided("gpt_oss").regions}
    attention = regions["model.layers.1.self_attn"]
    assert attention.row_biases == ("o_proj",)
    assert attention.whole == ("model.layers.1.self_attn.o_proj.bias",)
    (mixer, *_) = (one for one in divided("qwen3_next").regions if "linear_attn" in one.name)
    assert not mixer.is_cut and mixer.kind is BlockKind.ATTENTION
    latent = next(one for one in divided("deepseek_v3").regions)
    latent.apply_run(range(1, 4))
    module: Any = latent.module
    assert (module.num_heads, module.o_proj.in_features, module.kv_b_proj.out_features) == (
        6,
        96,
        144,
    )
    latent.apply_run(range(4))
    assert (module.num_heads, module.o_proj.in_features) == (8, 128)


def test_a_norm_over_all_heads_adds_up_over_the_group() -> None:
    whole, half = (stored(divided("minimax_m2")) for _ in range(2))
    (norm,) = (n for n, size in whole.skeleton.regions[0].wide_norms.items() if size == 128)
    hidden = torch.randn(2, 3, 128)
    expected = norm(hidden)
    half.rehold(Holding(layers=range(2), attention=range(1, 4), mlp=range(4)))
    (own,) = (n for n, size in half.skeleton.regions[0].wide_norms.items() if size == 128)
    others = hidden[..., :32].pow(2).sum(-1, keepdim=True)
    vars(own)["sum_over_group"] = lambda squares: squares + others
    assert torch.allclose(own(hidden[..., 32:]), expected[..., 32:], rtol=1e-6)
    half.rehold(Holding.everything(half.skeleton))
    assert "forward" not in vars(own)


@pytest.mark.parametrize(("attention", "mlp"), [(8, 1), (3, 1), (1, 7), (0, 1)])
def test_shards_that_do_not_divide_heads_or_columns_are_refused(attention: int, mlp: int) -> None:
    with pytest.raises(ConfigError):
        divided("glm4_moe", attention, mlp)


def test_layers_that_are_not_held_take_no_memory_and_return_their_input() -> None:
    skeleton = divided("deepseek_v3")
    store = stored(skeleton)
    module: Any = skeleton.module
    holding = Holding(layers=range(1), attention=range(4), mlp=range(4), has_embedding=True)
    replaced = store.rehold(holding)
    assert {block.layer for block in store.blocks()} == {0}
    assert all(tensor.is_meta == (name not in kept(store)) for name, tensor in tensors(store))
    assert all(one.new is store.tensor(name) and one.new.is_meta for name, one in replaced.items())
    hidden = torch.rand(1, 3, 64)
    assert module.model.layers[1](hidden_states=hidden) is hidden
    assert module.lm_head(hidden) is hidden
    assert module.model.norm(hidden) is hidden
    tokens = torch.tensor([[3, 4, 5]])
    logits = module(input_ids=tokens, use_cache=False).logits
    assert logits.shape == (1, 3, 64)  # hidden states, as there is no head
    store.rehold(Holding.everything(skeleton))
    for block in [one for one in store.blocks() if one.kind is not BlockKind.EXPERT]:
        store.write(block, SeededInitialization(skeleton, 7).tensors(block))
    assert module.lm_head(hidden).shape == (1, 3, 96)
    assert not store.slots[1]


def kept(store: BlockStore) -> set[str]:
    return {name for block in store.blocks() for name in store.skeleton.blocks[block]}


def tensors(store: BlockStore) -> list[tuple[str, torch.Tensor]]:
    return [(name, store.tensor(name)) for name in store.skeleton.specs]
