"""`pacekeeper launch`: what it takes, and what it rejects in a sentence."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pacekeeper.cli.services.launch import command
from pacekeeper.core.errors import ConfigError, ExitCode

TABLE = '[engine]\nmodel = "m"\ndata = ["a.bin"]\n[agent]\nring_dir = "rings"\n'


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The nodes and ranks that would have been started."""
    pytest.importorskip("torch")
    from pacekeeper.trainer.elastic import restart_policy
    from pacekeeper.trainer.engine import rank_process

    found: list[Any] = []

    def supervise(spec: Any) -> ExitCode:
        found.append(spec)
        return ExitCode.OK

    for name in ("RANK", "WORLD_SIZE", "PACEKEEPER_JOB_SECRET", "PACEKEEPER_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(restart_policy, "supervise_with_restarts", supervise)
    monkeypatch.setattr(rank_process, "run_rank", lambda *given: found.append(given))
    yield found


def launch(folder: Path, *words: str, text: str = TABLE) -> Result:
    (folder / "job.toml").write_text(text)
    return CliRunner().invoke(command, ["--config", str(folder / "job.toml"), *words])


def test_settings_come_from_the_file_and_the_command_line(
    tmp_path: Path, launched: list[Any]
) -> None:
    words = "--job j --steps 3 --seed 4 --device cpu --ranks-per-node 3 --ring-dir other"
    assert launch(tmp_path, *words.split()).exit_code == 0
    (node,) = launched
    assert (node.config.job, node.config.steps, node.config.seed) == ("j", 3, 4)
    assert (node.config.device, node.ranks_per_node) == ("cpu", 3)
    assert (node.ring_dir, node.run_dir) == ("other", "runs/j")


def test_checkpoints_and_restarts_are_settings_of_the_engine(
    tmp_path: Path, launched: list[Any]
) -> None:
    words = "--checkpoint-dir d --checkpoint-every 7 --snapshot-every 3 --max-restarts 2"
    assert launch(tmp_path, *words.split(), "--resume", "never").exit_code == 0
    config = launched[0].config
    assert (config.checkpoint_dir, config.checkpoint_period_steps) == ("d", 7)
    assert (config.snapshot_period_steps, config.max_restarts) == (3, 2)
    assert config.resume == "never"


@pytest.mark.parametrize(
    "words",
    [
        ["--clock", "emulated"],
        ["--faults", "x"],
    ],
)
def test_options_that_do_not_go_are_rejected(
    tmp_path: Path, launched: list[Any], words: list[str]
) -> None:
    result = launch(tmp_path, *words)
    assert result.exit_code == ExitCode.USAGE
    assert words[0] in result.output and not launched


def test_without_a_model_or_a_file_the_error_names_what_is_missing(launched: list[Any]) -> None:
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.what.startswith("no --config: [engine] model")
    assert not launched


def test_a_device_is_emulated_where_it_is_asked_for(tmp_path: Path, launched: list[Any]) -> None:
    assert launch(tmp_path).exit_code == 0
    assert launch(tmp_path, "--emulate", "--faults", "f").exit_code == 0
    text = TABLE.replace("[agent]", "emulate = true\n[agent]")
    assert launch(tmp_path, "--faults", "f", text=text).exit_code == 0
    assert launch(tmp_path, "--device", "cpu", "--faults", "f").exit_code == 0
    real, asked, by_file, on_cpu = launched
    assert (real.config.emulate, real.faults_dir) == (False, "")
    assert (on_cpu.config.emulate, on_cpu.faults_dir) == (False, "f")
    assert (asked.config.emulate, asked.faults_dir) == (True, "f")
    assert by_file.config.emulate
    result = launch(tmp_path, "--emulate", "--device", "cuda")
    assert isinstance(result.exception, ConfigError) and "device" in str(result.exception)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\n[train]\n", "[train]"),
        ('[engine]\nmodel = "m"\n', "data"),
        ('[engine]\ndata = ["a"]\n', "model"),
        ("[engine]\nsteps = 0\n", "steps"),
        ("[engine\n", "TOML"),
    ],
)
def test_a_wrong_file_is_rejected(
    tmp_path: Path, launched: list[Any], text: str, named: str
) -> None:
    result = launch(tmp_path, text=text)
    assert isinstance(result.exception, ConfigError) and named in str(result.exception)
    assert not launched


def test_started_by_torchrun_it_is_that_rank(
    tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch(tmp_path).exit_code == 0
    ((config, ring_dir, _, _, environment),) = launched
    assert (config.model, ring_dir, environment["RANK"]) == ("m", "rings", "1")
    assert launch(tmp_path, "--ranks-per-node", "2").exit_code == ExitCode.USAGE


class TestTheSecretOfAJob:
    """`--secret-file`, the environment, a random one, or none on request."""

    MULTI = ("--num-nodes", "2")

    def test_a_job_of_one_node_has_a_random_one(self, tmp_path: Path, launched: list[Any]) -> None:
        for _ in range(2):
            assert launch(tmp_path).exit_code == 0
        one, other = (node.key for node in launched)
        assert one.is_secret and one != other

    def test_a_job_of_several_nodes_does_not_start_without(
        self, tmp_path: Path, launched: list[Any]
    ) -> None:
        error = launch(tmp_path, *self.MULTI).exception
        assert isinstance(error, ConfigError)
        assert "--secret-file" in error.remedy and "openssl" in error.remedy
        joining = CliRunner().invoke(command, ["--join", "127.0.0.1:1"]).exception
        assert isinstance(joining, ConfigError) and "a node that joins" in joining.what
        assert not launched

    def test_it_is_read_from_a_file_or_the_environment(
        self, tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "secret"
        file.write_text("0123456789abcdef0123\n")
        file.chmod(0o600)
        assert launch(tmp_path, *self.MULTI, "--secret-file", str(file)).exit_code == 0
        monkeypatch.setenv("PACEKEEPER_JOB_SECRET", "0123456789abcdef0123")
        assert launch(tmp_path, *self.MULTI).exit_code == 0
        monkeypatch.setenv("PACEKEEPER_JOB_SECRET_FILE", str(file))
        monkeypatch.setenv("PACEKEEPER_JOB_SECRET", "another secret, which is not used")
        assert launch(tmp_path, *self.MULTI).exit_code == 0
        assert {node.key.secret for node in launched} == {b"0123456789abcdef0123"}

    @pytest.mark.parametrize(
        ("text", "mode", "reason"),
        [
            ("0123456789abcdef", 0o640, "other than its owner"),
            ("0123456789abcdef", 0o604, "other than its owner"),
            ("0123456789abcde\n", 0o600, "at least 16 bytes, got 15"),
            ("", 0o600, "got 0"),
            ("x" * 5000, 0o600, "at most 4096 bytes"),
            (None, 0o600, "No such file"),
        ],
    )
    def test_an_unsafe_one_is_not_used(
        self, tmp_path: Path, launched: list[Any], text: str | None, mode: int, reason: str
    ) -> None:
        file = tmp_path / "secret"
        if text is not None:
            file.write_text(text)
            file.chmod(mode)
        error = launch(tmp_path, "--secret-file", str(file)).exception
        assert isinstance(error, ConfigError) and reason in error.what
        assert str(file) in error.what and not launched

    def test_none_is_used_on_request_only(self, tmp_path: Path, launched: list[Any]) -> None:
        assert launch(tmp_path, *self.MULTI, "--insecure-rendezvous").exit_code == 0
        assert not launched[0].key.is_secret
        error = launch(tmp_path, "--insecure-rendezvous", "--secret-file", "x").exception
        assert isinstance(error, ConfigError) and "--insecure-rendezvous" in error.what

    def test_torchrun_has_a_store_of_its_own(
        self, tmp_path: Path, launched: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        result = launch(tmp_path, "--secret-file", "x")
        assert result.exit_code == ExitCode.USAGE and "torchrun" in result.output
