"""Jobs of `pacekeeper launch` that every machine can run: a tiny Qwen3-MoE, bytes as tokens."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, ByteEncoder, EncoderSpec
from pacekeeper.trainer.data.tokenizing.inputs import find_inputs
from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions, tokenize

NUM_BYTES = 1 << 16
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": ByteEncoder.vocab_size,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, **own: Any) -> Path:
    """Write the config.json of MODEL, with other values where given; return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | own))
    return folder


def write_text(folder: Path, size_bytes: int = NUM_BYTES) -> Path:
    """Write documents of random lower-case words; return the file."""
    chosen = random.Random(0)
    words = ("".join(chosen.choices("etaoinshr", k=5)) for _ in range(size_bytes // 6))
    path = folder / "text.txt"
    path.write_text("".join(word + chosen.choice("     \n") for word in words))
    return path


def tokenize_bytes(texts: Iterable[Path], file: Path) -> Path:
    """Write a token file of these documents, one token per byte; return it."""
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), overwrite=True)
    tokenize(find_inputs(list(texts)), file, options)
    return file


def byte_job(folder: Path, **own: Any) -> EngineConfig:
    """Settings of a job on the CPU; model and data are made in `folder`, unless they are there."""
    model, tokens = folder / "model", folder / "tokens.bin"
    if not model.exists():
        write_model(model)
    if not tokens.exists():
        tokenize_bytes([write_text(folder)], tokens)
    settings: dict[str, Any] = {
        "model": str(model),
        "data": (str(tokens),),
        "rows_per_step": 16,
        "row_tokens": 64,
        "rows_per_microbatch": 4,
        "decay": "constant",
        "device": "cpu",
        "tick_s": 0.05,
    }
    return EngineConfig(**settings | own)
