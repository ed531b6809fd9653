"""Where a model's layers, experts and blocks are, by family; what is refused."""

from typing import Any

import pytest
import torch

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.model.skeleton import build_skeleton
from support.tiny_models import tiny_config


def test_nothing_is_allocated() -> None:
    skeleton = build_skeleton(
        tiny_config("qwen3_moe", num_experts=512, hidden_size=4096, moe_intermediate_size=4096)
    )
    assert all(one.is_meta for one in skeleton.module.parameters())
    assert skeleton.num_experts == 512
    stacked = skeleton.specs["model.layers.1.mlp.experts.down_proj"]
    assert stacked.shape == (512, 4096, 4096)


@pytest.mark.parametrize(
    ("family", "moe_layers", "parameters"),
    [
        ("qwen3_moe", [0, 1], {"gate_up_proj", "down_proj"}),
        ("deepseek_v3", [1], {"gate_up_proj", "down_proj"}),
        (
            "gpt_oss",
            [0, 1],
            {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"},
        ),
        ("llama", [], set()),
    ],
)
def test_experts_are_found_by_layer(
    family: str, moe_layers: list[int], parameters: set[str]
) -> None:
    skeleton = build_skeleton(tiny_config(family))
    assert skeleton.layers == "model.layers"
    assert skeleton.num_layers == 2
    found = [one for one in skeleton.experts if one is not None]
    assert [one.layer for one in found] == moe_layers
    for one in found:
        assert one.num_experts == 4
        assert set(one.parameters) == parameters
        for name in one.tensors:
            assert skeleton.specs[name].shape[0] == 4
            part = skeleton.blocks[Block(BlockKind.EXPERT, one.layer, 3)][name]
            assert part.shape == skeleton.specs[name].shape[1:]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama"])
def test_blocks_are_those_of_a_layout_with_one_virtual_shard(family: str) -> None:
    skeleton = build_skeleton(tiny_config(family))
    layout = even_layout(ranks=[0, 1], num_layers=2, num_experts=skeleton.num_experts, replicas=1)
    assert set(skeleton.blocks) == set(layout.blocks())


def test_parameters_of_modules_within_experts_are_dense() -> None:
    """muse_spark shares one norm among all experts of a layer: no expert's slice."""
    config: dict[str, Any] = {
        "model_type": "muse_spark",
        "text_config": {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_hidden_size": 32,
        },
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        "audio_config": {
            "num_hidden_layers": 1,
            "patch_sizes": [4],
            "hidden_sizes": [32],
            "depths": [1],
            "out_hidden_size": 64,
        },
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
    }
    skeleton = build_skeleton(config)
    assert skeleton.layers == "model.language_model.layers"
    experts = skeleton.experts[1]
    assert experts is not None
    norm = f"{experts.name}.post_expert_norm.weight"
    assert norm in skeleton.blocks[Block(BlockKind.NORM_ROUTER, 1)]
    encoders = [name for name in skeleton.specs if "vision" in name or "audio" in name]
    assert encoders
    assert set(encoders) <= set(skeleton.blocks[Block(BlockKind.EMBEDDING)])


def test_the_data_type_is_that_asked_for() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        skeleton = build_skeleton(tiny_config("mixtral"), dtype)
        assert {spec.dtype for spec in skeleton.specs.values()} == {dtype}


def test_heads_need_not_divide_the_hidden_size() -> None:
    """GLM-4.5 has 96 heads of 128 for a hidden size of 5120."""
    build_skeleton(tiny_config("glm4_moe", num_attention_heads=12, num_key_value_heads=4))


def test_a_model_of_several_texts_is_refused() -> None:
    with pytest.raises(ConfigError):
        build_skeleton({"model_type": "musicgen"})


@pytest.mark.parametrize(
    "own",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 3},
        {"num_experts_per_tok": 5},
        {"hidden_act": "of_nobody"},
    ],
    ids=["heads", "experts", "activation"],
)
def test_sizes_that_do_not_fit_are_refused(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        build_skeleton(tiny_config("mixtral", **own))
    assert refused.value.remedy
