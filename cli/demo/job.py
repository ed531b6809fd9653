"""The job of the demo: a tiny Qwen3-MoE, its text, and the settings that `pacekeeper launch` reads.

The model is small enough for a laptop; the emulated device takes the times of kernels of a model of
usual size. The text is the sources of Python's standard library, one token per byte. All of it is
written below the run directory, and nothing is downloaded.
"""

import json
import sysconfig
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pacekeeper.cli.common.settings import load_settings, read_config_text
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.config.loader import override
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.data.tokenizing.encoders import BYTES, ByteEncoder, EncoderSpec
from pacekeeper.trainer.data.tokenizing.inputs import find_inputs
from pacekeeper.trainer.data.tokenizing.tokenize import TokenizeOptions, tokenize

JOB = "demo"
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": ByteEncoder.vocab_size,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
# Widths of Qwen3-30B-A3B; of its 48 layers 4, and of its vocabulary as small a part.
SHAPES = MODEL | {
    "vocab_size": 151_936 * 4 // 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
}
_FOLDER = "job"
_SETTINGS: dict[str, Any] = {
    "rows_per_step": 64,
    "row_tokens": 32,
    "rows_per_microbatch": 64,  # a rank's part of the batch at once: more work, no more kernels
    "learning_rate": 3e-3,
    "warmup_steps": 20,
    "balance_weight": 0.01,
    "replicas": 2,
}
_EMULATED: dict[str, Any] = {"emulate": True, "emulated_step_s": 0.7, "emulated_row_tokens": 1024}


def demo_config(
    run_dir: Path, *, steps: int, seed: int, clock: str, config_file: str | None
) -> EngineConfig:
    """Return the settings of the demo's job.

    Args:
        run_dir: Where `write_job` will write model and text.
        steps: Number of training steps.
        seed: Of weights, order of the text, and noise of the emulated device.
        clock: "emulated" or "cpu".
        config_file: TOML file whose table `[engine]` replaces settings, or None.

    Raises:
        ConfigError: The file or a value is invalid.
    """
    folder = run_dir / _FOLDER
    own = _SETTINGS | {"model": str(folder / "model"), "data": (str(folder / "text.bin"),)}
    if clock == "emulated":
        own |= _EMULATED | {"emulated_model": str(folder / "shapes")}
    given = {} if config_file is None else _given(config_file)
    if "model" in given and "emulated_model" in own:
        del own["emulated_model"]  # of another family, maybe
    fixed = {"job": JOB, "steps": steps, "seed": seed, "emulate": clock == "emulated"}
    fixed |= {"device": "cpu"}
    where = "command line" if config_file is None else f"{config_file}: [engine]"
    return override(EngineConfig(), where=where, **own | given | fixed)


def _given(config_file: str) -> dict[str, Any]:
    """Return the keys of a file's table `[engine]`, once it is known to be valid."""
    valid = load_settings(EngineConfig, config_file)
    table = tomllib.loads(read_config_text(config_file)).get("engine", {})
    return {name: getattr(valid, name) for name in table}


def write_job(run_dir: Path, config: EngineConfig) -> str:
    """Write model, kernel shapes and text, as far as the settings name them below `run_dir`.

    Returns:
        The command that makes the same token file; "": the text is not the demo's own.

    Raises:
        HostError: This Python has no sources of its standard library.
        OSError: A file cannot be written.
    """
    folder = run_dir / _FOLDER
    for name, content in (("model", MODEL), ("shapes", SHAPES)):
        if str(folder / name) in (config.model, config.emulated_model):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    out = folder / "text.bin"
    if config.data != (str(out),):
        return ""
    library = Path(sysconfig.get_path("stdlib"))
    sources = sorted(library.glob("*.py"))
    if not sources:
        raise HostError(
            f"no sources of Python's standard library in {library}: there is no text to train on",
            remedy="name token files of your own with `data` in [engine] of --config",
        )
    options = TokenizeOptions(encoder=EncoderSpec(BYTES), overwrite=True)
    tokenize(find_inputs(sources), out, options)
    return f"pacekeeper data tokenize {library}/*.py --tokenizer {BYTES} --out {out}"


def write_settings(run_dir: Path, config: EngineConfig) -> Path:
    """Write the TOML file for `pacekeeper launch`; whether to emulate is left to its options."""
    path, default = run_dir / _FOLDER / "job.toml", asdict(EngineConfig())
    values = asdict(replace(config, emulate=False))
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
        if value != default[name]
    ]
    path.write_text("\n".join(["[engine]", *lines]) + "\n")
    return path
