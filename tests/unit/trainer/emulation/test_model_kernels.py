"""The kernels of a model follow from the shapes of its parameters, or of a larger one's."""

import pytest

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.kernel_laws.kernels import (
    Attention,
    GroupedProduct,
    Product,
    Stream,
    StreamKind,
)
from pacekeeper.trainer.emulation.model_kernels import Portion, model_kernels
from pacekeeper.trainer.model.skeleton import Skeleton, build_skeleton
from support.engines import BUILDING
from support.tiny_models import tiny_config


def skeleton(family: str = "qwen3_moe", **own: object) -> Skeleton:
    with BUILDING:
        return build_skeleton(tiny_config(family, **own))


def test_kernels_of_a_small_model() -> None:
    tiny = skeleton()
    kernels = model_kernels(tiny, tiny)
    layer = "model.layers.1"
    of = kernels.modules
    assert of["lm_head"].forward((10,))[0] == Product(10, 64, 96)
    assert of[f"{layer}.self_attn.q_proj"].forward((4, 6)) == [Product(10, 64, 128)]
    assert Attention((4, 6), 8, 16) in of[f"{layer}.self_attn"].forward((4, 6))
    assert of[f"{layer}.mlp.gate"].forward((10,)) == [Product(10, 64, 4)]
    assert of[f"{layer}.input_layernorm"].forward((10,)) == [
        Stream(StreamKind.NORM, 10 * 2 * 64 * 2)
    ]
    # Each of the 8 heads has its norm.
    assert of[f"{layer}.self_attn.q_norm"].forward((10,)) == [
        Stream(StreamKind.NORM, 10 * 2 * 128 * 2)
    ]
    # Both branches are added to the residual.
    added = Stream(StreamKind.ADD, 10 * 3 * 64 * 2)
    assert of[f"{layer}.mlp"].forward((10,)) == [added]
    assert added in of[f"{layer}.self_attn"].forward((10,))
    assert not any(name.startswith(f"{layer}.mlp.experts") for name in of)
    experts = kernels.experts[f"{layer}.mlp.experts"]
    assert [k for k in experts.forward([3, 0, 5, 0]) if isinstance(k, GroupedProduct)] == [
        GroupedProduct((3, 5), 64, 2 * 32),
        GroupedProduct((3, 5), 32, 64),
    ]
    assert experts.forward([0, 0, 0, 0]) == []
    assert list(kernels.forward((10,), [1, 2])) != list(kernels.forward((10,), [2, 1]))


def test_a_larger_model_of_the_family_gives_the_shapes() -> None:
    large = skeleton(hidden_size=256, head_dim=64, moe_intermediate_size=512, num_hidden_layers=3)
    kernels = model_kernels(skeleton(), large)
    assert "model.layers.2" not in kernels.modules
    q = kernels.modules["model.layers.0.self_attn.q_proj"].forward((7,))
    assert q == [Product(7, 256, 8 * 64)]
    (_, up, down, *_) = kernels.experts["model.layers.0.mlp.experts"].forward([9])
    assert (up, down) == (GroupedProduct((9,), 256, 1024), GroupedProduct((9,), 512, 256))


def test_a_tensor_group_divides_outputs_of_the_first_products_and_inputs_of_the_last() -> None:
    with BUILDING:
        divided = build_skeleton(tiny_config("qwen3_moe"), num_attention_shards=2)
    of = model_kernels(divided, skeleton()).modules
    half = Portion(shards=0.5)
    q, o = (of[f"model.layers.0.self_attn.{name}_proj"].forward((7,), half) for name in "qo")
    assert (q, o) == ([Product(7, 64, 64)], [Product(7, 64, 64)])
    assert of["model.layers.0.self_attn.o_proj"].forward((7,)) == [Product(7, 128, 64)]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "glm4_moe"])
def test_each_family_has_products_attention_and_experts(family: str) -> None:
    tiny = skeleton(family)
    kernels = list(model_kernels(tiny, tiny).forward((12,), [6, 6]))
    assert sum(isinstance(k, Attention) for k in kernels) == tiny.num_layers
    layers = sum(one is not None for one in tiny.experts)
    assert sum(isinstance(k, GroupedProduct) for k in kernels) == 2 * layers
    widths = [k.inputs for k in kernels if isinstance(k, GroupedProduct)]
    assert widths[::2] == [64] * layers, "the first matrix reads hidden states"
    named = dict(tiny.module.named_parameters())
    in_experts = {id(p) for one in tiny.experts if one for p in one.module.parameters()}
    matrices = [p for p in named.values() if p.ndim == 2 and id(p) not in in_experts]
    # All but the embedding are products of the forward pass.
    assert sum(isinstance(k, Product) for k in kernels) == len(matrices) - 1


def test_windows_of_attention_are_those_of_the_layers() -> None:
    tiny = skeleton("gpt_oss", sliding_window=5)
    found = [k for k in model_kernels(tiny, tiny).forward((12,), [6]) if isinstance(k, Attention)]
    assert [one.window for one in found] == [5, 0]


def test_a_model_of_another_structure_is_refused() -> None:
    with pytest.raises(ConfigError):
        model_kernels(skeleton(), skeleton(num_hidden_layers=1))
    with pytest.raises(ConfigError):
        model_kernels(skeleton(), skeleton("deepseek_v3"))
    with pytest.raises(ConfigError):
        model_kernels(skeleton(), skeleton("llama"))
