"""Tiny configurations of every family of transformers with the experts interface."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

DECORATOR = "@use_experts_implementation"
VOCABULARY, HIDDEN, LAYERS, EXPERTS = 96, 64, 4, 4

# The model type to build, where it is not the folder's name: the part that predicts tokens.
_TYPES = {
    "aria": "aria_text",
    "dots3_note": "dots3_note_text",
    "gemma4": "gemma4_text",
    "inkling": "inkling_text",
    "inkling2": "inkling2_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "qwen4_exp": "qwen4_exp_text",
}
# Fields of decoders, set where a family has them.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "attention_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "tie_word_embeddings": False,
    "output_router_logits": False,
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "rel_extent": 64,
    "block_size": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 8,
}
# Multi-head latent attention has as many key as query heads, and its own head sizes.
_LATENT = {
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_ocr2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots3_note_text",
    "glm4_moe_lite",
    "glm5_next",
    "glm_moe_dsa",
    "kimi_linear",
    "mistral4",
    "mistral_large4",
    "unlimited_ocr",
}
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"head_dim": 16, "layer_group_size": 2},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dots3_note_text": {
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        },
    },
    "gemma4_text": {
        "global_head_dim": 16,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "diffusion_gemma": {
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
    },
    "glm5_next": {"qk_rope_head_dim": 0, "qk_nope_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "muse_spark": {"moe_hidden_size": 32},
    "openai_privacy_filter": {"num_labels": VOCABULARY},
    "qwen4_exp_text": {
        "hc_lowrank": 16,
        "ngram_vocab_size_base": 128,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
_WHOLE: dict[str, dict[str, Any]] = {
    "muse_spark": {"out_hidden_size": 32, "projector_hidden_size": 32},
}
# Fields of encoders of images and sounds, which text does not use.
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "encoder_ffn_dim": 32,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "out_hidden_size": HIDDEN,
    "output_dim": HIDDEN,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "image_size": 32,
    "patch_size": 16,
    "mlp_dim": 32,
    "output_channels": 32,
    "downsample_channels": [32, 32],
    "global_attn_indexes": [0],
    "patch_sizes": [4],
    "hidden_sizes": [32],
    "depths": [1],
}


def families() -> dict[str, str]:
    """The model type to build of each modeling file with the experts interface, by its folder."""
    models = Path(transformers.__file__).parent / "models"
    files = sorted(models.glob("*/modeling_*.py"))
    folders = [file.parent.name for file in files if DECORATOR in file.read_text()]
    return {folder: _TYPES.get(folder, folder) for folder in folders}


def tiny_config(model_type: str, **own: Any) -> Any:
    """A configuration of a few layers, experts and heads; `own` fields go to the decoder."""
    whole = CONFIG_MAPPING[model_type]
    text = type(whole().get_text_config())
    values = _fields(text, _DECODER)
    if model_type in _LATENT:
        values.pop("head_dim", None)
        values |= _fields(text, {"num_key_value_heads": 8})
    values |= _OWN.get(model_type, {}) | own
    if text is whole:
        return whole(**values)
    usual = whole()
    encoders = {
        name: _encoder(getattr(usual, name)) for name in whole.sub_configs if name != "text_config"
    }
    return whole(text_config=values, **encoders, **_WHOLE.get(model_type, {}))


def _encoder(usual: Any) -> dict[str, Any]:
    """The fields of an encoder, and of the encoders it is made of."""
    inner = {name: _encoder(getattr(usual, name)) for name in usual.sub_configs}
    return {"model_type": usual.model_type} | _fields(type(usual), _ENCODER) | inner


def _fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {one.name for one in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
