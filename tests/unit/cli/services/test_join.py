"""`launch --join` takes the job's settings from the job: whoever gives them too is told so."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.services.launch import command
from pacekeeper.core.errors import ConfigError, ExitCode, UnreachableError
from pacekeeper.trainer.elastic import restart_policy
from pacekeeper.trainer.elastic.launch_spec import NodeSpec


@pytest.mark.parametrize("option", ["--steps", "--num-nodes", "--window-steps", "--snapshot-every"])
def test_what_the_running_job_tells_is_not_taken_from_the_command_line(option: str) -> None:
    result = CliRunner().invoke(command, ["--join", "127.0.0.1:1", option, "5"])
    assert result.exit_code == ExitCode.USAGE
    assert option in result.output


def test_addresses_that_lead_to_no_job_are_named() -> None:
    result = CliRunner().invoke(
        command, ["--insecure-rendezvous", "--join", "127.0.0.1:1, 127.0.0.1:2"]
    )
    assert isinstance(result.exception, UnreachableError)
    assert "127.0.0.1:1, 127.0.0.1:2" in str(result.exception)
    assert isinstance(CliRunner().invoke(command, ["--join", ","]).exception, ConfigError)


def test_what_shapes_checkpoints_and_snapshots_reaches_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line's words for settings, beside those of a file."""
    launched: list[NodeSpec] = []

    def take(spec: NodeSpec) -> ExitCode:
        launched.append(spec)
        return ExitCode.OK

    monkeypatch.setattr(restart_policy, "supervise_with_restarts", take)
    file = tmp_path / "job.toml"
    file.write_text(
        '[engine]\nmodel = "m"\ndata = ["a"]\nsnapshot_period_steps = 7\nmax_restarts = 3\n'
    )
    given = ["--checkpoint-every", "5", "--window-steps", "4", "--snapshot-every", "2"]
    for words in (given, given[:4]):
        result = CliRunner().invoke(command, ["--config", str(file), "--job", "it", *words])
        assert result.exit_code == 0, result.output
    first, second = (spec.config for spec in launched)
    assert (first.checkpoint_period_steps, first.checkpoint_window_steps) == (5, 4)
    assert (first.snapshot_period_steps, second.snapshot_period_steps) == (2, 7)
    assert (first.job, first.max_restarts) == ("it", 3)
