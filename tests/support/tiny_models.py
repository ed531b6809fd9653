"""Tiny models of transformers' families, for tests: configurations, whole stores, references."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "head_dim": 16, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64},
    "deepseek_v3": {
        **_MLA,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmoe": {"num_experts": 4, "intermediate_size": 32},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    },
    "minimax_m2": {"num_local_experts": 4, "head_dim": 16, "intermediate_size": 32},
    "afmoe": {
        "num_experts": 4,
        "head_dim": 16,
        "num_dense_layers": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
    },
    "qwen3_next": {
        "num_experts": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama": {"intermediate_size": 64},
}


def tiny_config(family: str, **own: Any) -> dict[str, Any]:
    """The content of a config.json of a tiny model of `family`, with values of the test's own."""
    return {"model_type": family, **_COMMON, **_OWN[family], **own}


def run_by_slot(
    module: torch.nn.Module,
    rows: torch.Tensor,
    slots: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute rows [R, H] in any order by the experts in `slots` [R]; products in `dtype`."""
    from pacekeeper.trainer.model import library

    num_slots = len(next(module.parameters(recurse=False)))
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=num_slots)
    out = library.run_grouped_experts(module, rows[order].to(dtype or rows.dtype), counts)
    return torch.empty_like(out).index_copy(0, order, out).to(rows.dtype)


def local_experts(
    module: torch.nn.Module, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """An experts function of one process: each expert lies in the slot of its number."""
    num_rows, top_k = index.shape
    out = run_by_slot(module, hidden.repeat_interleave(top_k, 0), index.reshape(-1))
    weighted = out * weights.reshape(-1, 1)
    return weighted.view(num_rows, top_k, -1).sum(1).to(hidden.dtype)


def whole_store(family: str, dtype: torch.dtype = torch.float32, **own: Any) -> Any:
    """The `BlockStore` of one process that holds a whole model, matrices drawn wide."""
    from pacekeeper.trainer.model.blocks import BlockStore
    from pacekeeper.trainer.model.initialization import SeededInitialization
    from pacekeeper.trainer.model.skeleton import build_skeleton

    skeleton = build_skeleton(tiny_config(family, **own), dtype)
    store = BlockStore(skeleton, num_slots=skeleton.num_experts)
    held = [{e: e for e in range(one.num_experts)} if one else {} for one in skeleton.experts]
    store.materialize(held, SeededInitialization(skeleton, 11))
    generator = torch.Generator().manual_seed(0)
    for parameter in skeleton.module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter.data, std=0.15, generator=generator)
    return store


class _Float64(ModuleType):
    """torch, as a modeling file sees it whose casts to float32 shall cast to float64."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64(model: torch.nn.Module) -> Iterator[None]:
    """Let the modeling files of a model compute in float64 where they insist on float32."""

    files = {sys.modules[type(one).__module__] for one in model.modules()}
    files = {
        one for one in files if one.__name__.startswith("transformers.") and hasattr(one, "torch")
    }
    single = torch.Tensor.float
    try:
        setattr(torch.Tensor, "float", torch.Tensor.double)  # noqa: B010
        for one in files:
            vars(one)["torch"] = _Float64("torch")
        yield
    finally:
        setattr(torch.Tensor, "float", single)  # noqa: B010
        for one in files:
            vars(one)["torch"] = torch
