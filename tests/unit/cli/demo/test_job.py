"""The demo's job: settings as the options and the file ask, and all that they name is there."""

import json
import sysconfig
from pathlib import Path

import pytest

from pacekeeper.cli.common.settings import load_settings
from pacekeeper.cli.demo.job import demo_config, write_job, write_settings
from pacekeeper.cli.demo.run_dir import claim_run_dir
from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.trainer.data.token_stream import open_tokens


def config_of(run_dir: Path, text: str | None = None, clock: str = "emulated") -> EngineConfig:
    """The settings, with a file of this content."""
    file = run_dir.with_suffix(".toml")
    if text is not None:
        file.write_text(text)
    given = None if text is None else str(file)
    return demo_config(run_dir, steps=90, seed=7, clock=clock, config_file=given)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, Path, str]:
    """(settings, run directory, command) of a job that was written."""
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    config = config_of(run_dir)
    with claim_run_dir(run_dir):
        return config, run_dir, write_job(run_dir, config)


def test_the_job_reads_what_was_written_for_it(written: tuple[EngineConfig, Path, str]) -> None:
    config, _, command = written
    tiny = json.loads((Path(config.model) / "config.json").read_text())
    large = json.loads((Path(config.emulated_model) / "config.json").read_text())
    assert tiny["model_type"] == large["model_type"] == "qwen3_moe"
    assert tiny["num_hidden_layers"] == large["num_hidden_layers"]
    assert tiny["hidden_size"] < large["hidden_size"]
    (data,) = config.data
    stream = open_tokens([data], vocab_size=tiny["vocab_size"])
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert stream.num_tokens == sum(
        path.stat().st_size + 1 for path in sources if path.stat().st_size
    )
    assert data in command and "--tokenizer bytes" in command


def test_a_launcher_reads_the_settings_that_were_meant(
    written: tuple[EngineConfig, Path, str],
) -> None:
    config, run_dir, _ = written
    path = write_settings(run_dir, config)
    assert load_settings(EngineConfig, str(path), emulate=True) == config
    assert not load_settings(EngineConfig, str(path)).emulate


@pytest.mark.parametrize("clock", ["emulated", "cpu"])
def test_options_win_over_the_file_and_the_file_over_the_demo(tmp_path: Path, clock: str) -> None:
    text = '[engine]\njob = "x"\nsteps = 5\nseed = 1\nrow_tokens = 48\nemulated_step_s = 0.2\n'
    config = config_of(tmp_path / "run", text, clock)
    assert (config.job, config.steps, config.seed) == ("demo", 90, 7)
    assert (config.row_tokens, config.emulated_step_s) == (48, 0.2)
    assert config.emulate == (clock == "emulated")
    assert config.rows_per_step == config_of(tmp_path / "run").rows_per_step


def test_a_model_of_the_file_has_its_own_kernels_and_text_of_the_file_is_not_made(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "run", '[engine]\nmodel = "m"\ndata = ["a.bin"]\n')
    assert (config.model, config.emulated_model, config.data) == ("m", "", ("a.bin",))
    with claim_run_dir(tmp_path / "run") as folder:
        assert write_job(folder, config) == ""
        assert list((folder / "job").iterdir()) == []


def test_a_value_that_does_not_fit_the_demo_is_rejected_with_the_name_of_the_file(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml.*warmup_steps"):
        config_of(tmp_path / "run", "[engine]\nwarmup_steps = 95\n")


def test_a_python_without_sources_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with claim_run_dir(tmp_path / "run") as folder, pytest.raises(HostError):
        write_job(folder, config_of(tmp_path / "run"))
