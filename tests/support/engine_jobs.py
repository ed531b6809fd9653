"""Small jobs of `pacekeeper launch` with a table `[engine]`: a model, tokens, settings."""

import json
import os
import runpy
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from random import Random
from typing import Any

from pacekeeper.core.config.engine import EngineConfig
from support.tiny_models import tiny_config
from support.token_files import write_tokens
from support.tree import ROOT

VOCABULARY, END = 96, 95


def write_model(folder: Path, family: str = "qwen3_moe", **own: Any) -> Path:
    """A folder with the config.json of a tiny model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **own)))
    return folder


def write_data(path: Path, num_tokens: int = 4_000, **changes: Any) -> Path:
    """A token file of documents that count upwards: a model learns them in a few steps."""
    chosen, tokens = Random(0), list[int]()
    while len(tokens) < num_tokens:
        first = chosen.randrange(3, 90)
        tokens += [(first + i) % 90 for i in range(chosen.randrange(5, 40))] + [END]
    return write_tokens(
        path, tokens, **{"vocab_size": VOCABULARY, "end_of_document": END} | changes
    )


def small_job(folder: Path, **own: Any) -> EngineConfig:
    """Settings of a job on the CPU, with its model and data in a folder."""
    settings: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": (str(folder / "tokens.bin"),),
        "steps": 6,
        "rows_per_step": 8,
        "row_tokens": 24,
        "rows_per_microbatch": 2,
        "learning_rate": 0.01,
        "device": "cpu",
    }
    if not (folder / "model").exists():
        write_model(folder / "model")
    if not (folder / "tokens.bin").exists():
        write_data(folder / "tokens.bin")
    return EngineConfig(**settings | own)


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a step log; none while there is no log."""
    path = run_dir / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_example(environment: Mapping[str, str], words: Sequence[str], output: str) -> None:
    """In a process of its own: examples/train_engine.py, what it prints in a file."""
    os.environ.update(environment)
    with Path(output).open("w") as file, redirect_stdout(file):
        runpy.run_path(str(ROOT / "examples" / "train_engine.py"))["main"](*words)
