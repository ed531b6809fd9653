"""A wrong setting is refused with file, key and what was expected; a right one is taken."""

import pytest

from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.loader import override, read_config
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import ConfigError, ExitCode


def test_an_empty_file_gives_the_defaults() -> None:
    assert read_config(ControllerConfig, "", file="f") == ControllerConfig()


def test_values_and_nested_tables_are_taken() -> None:
    text = "[controller]\nlisten='h:1'\n[detector]\nwarmup_steps=20\n[policy]\nmin_gain=1\n"
    config = read_config(ControllerConfig, text, file="f")
    assert (config.listen, config.detector.warmup_steps, config.policy.min_gain) == ("h:1", 20, 1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\nrign_dir='x'", r"f.toml: \[agent\] rign_dir: unknown key.*ring_dir"),
        (
            "[agent]\nspool_batches='many'",
            r"f.toml: \[agent\] spool_batches: expected int, got str",
        ),
        ("[agent]\nspool_batches=true", "expected int, got bool"),
        ("[agent]\npoll_interval_s='1'", "expected float, got str"),
        ("[agent]\nspool_batches=0", "spool_batches: expected at least 1, got 0"),
        ("[agnet]\n", r"f.toml: unknown table \[agnet\]; expected one of \[agent\]"),
        ("agent = 3", "agent: expected a table, got int"),
        ("[agent", "f.toml: not valid TOML"),
        pytest.param("x = " + "9" * 5000, "f.toml: not valid TOML", id="endless number"),
        ("[detector]\nrecover_slowdown=1.5", "at most min_slowdown"),
        ("[policy]\nload_ema=1.5", "load_ema: expected at most 1, got 1.5"),
        ("[train]\nrow_tokens=0", "row_tokens: expected at least 16, got 0"),
        ("[train]\nhidden_size=0", "hidden_size: expected at least 1, got 0"),
        ("[policy]\nmode='maybe'", "expected one of 'act', 'observe', 'approve', got 'maybe'"),
        (
            "[train]\nclock='sundial'",
            "expected 'auto', 'device', 'cpu' or 'emulated', got 'sundial'",
        ),
        ("[train]\nhidden_size=63", "multiple of 4 x num_heads"),
        ("[train]\nnum_stages=5", "num_stages: expected at most num_layers = 4, got 5"),
        ("[train]\ntensor_size=8", "tensor_size: expected at most num_heads = 4, got 8"),
        ("[train]\nschedule='gpipe'", "schedule: expected '1f1b' or 'zero_bubble', got 'gpipe'"),
        ("[train]\nexperts_per_token=9", "at most num_experts = 8, got 9"),
        ("[controller]\ndetector=3", "detector: unknown key"),
    ],
)
def test_a_complaint_names_file_key_and_expectation(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(AgentConfig, text, file="f.toml")
    assert caught.value.exit_code is ExitCode.CONFIG


def test_the_command_line_overrides_and_complains_in_its_own_name() -> None:
    assert override(TrainConfig(), steps=7, seed=None).steps == 7
    with pytest.raises(ConfigError, match="command line steps: expected at least 1"):
        override(TrainConfig(), steps=0)
