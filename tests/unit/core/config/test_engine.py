"""Settings of the engine that contradict each other are rejected, with the key."""

import pytest

from pacekeeper.core.config.engine import PATHS, EngineConfig
from pacekeeper.core.config.loader import override, read_config
from pacekeeper.core.errors import ConfigError


def test_a_table_is_read() -> None:
    text = '[engine]\nmodel = "m"\ndata = ["a.bin", "b.bin"]\nsteps = 5\nprecision = "bfloat16"\n'
    config = read_config(EngineConfig, text, file="f")
    assert (config.model, config.data, config.precision) == ("m", ("a.bin", "b.bin"), "bfloat16")
    assert override(config, steps=7, device="cpu").steps == 7
    assert set(PATHS) < set(EngineConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("rows_per_microbatch = 33", "rows_per_microbatch"),
        ("warmup_steps = 201", "warmup_steps"),
        ('evaluation_fraction = 0.1\nevaluation_data = ["a"]', "evaluation_fraction"),
        ("evaluation_fraction = 0.6", "evaluation_fraction"),
        ("row_tokens = 1", "row_tokens"),
        ("beta2 = 1.0", "beta2"),
        ("learning_rate = 0.0", "learning_rate"),
        ("final_ratio = 1.5", "final_ratio"),
        ('precision = "float16"', "precision"),
        ('data = "a.bin"', "data"),
        ("data = [3]", "data"),
        ('decay = "step"', "decay"),
        ("replicas = 0", "replicas"),
        ('emulate = true\ndevice = "cuda"', "device"),
        ("emulated_step_s = 0.0", "emulated_step_s"),
    ],
)
def test_a_wrong_value_is_rejected_with_its_key(line: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"f: \[engine\] {key}: "):
        read_config(EngineConfig, f"[engine]\n{line}\n", file="f")
