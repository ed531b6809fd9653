"""`launch --join` takes the job's settings from the job: whoever gives them too is told so."""

import pytest
from click.testing import CliRunner

from pacekeeper.cli.launch import command
from pacekeeper.core.errors import ConfigError, ExitCode, UnreachableError


@pytest.mark.parametrize("option", ["--steps", "--seed", "--num-nodes", "--experts-per-checkpoint"])
def test_what_the_running_job_tells_is_not_taken_from_the_command_line(option: str) -> None:
    result = CliRunner().invoke(command, ["--join", "127.0.0.1:1", option, "5"])
    assert result.exit_code == ExitCode.USAGE
    assert f"{option} is the running job's: leave it out with --join" in result.output


def test_addresses_that_lead_to_no_job_are_named() -> None:
    result = CliRunner().invoke(command, ["--join", "127.0.0.1:1, 127.0.0.1:2"])
    assert isinstance(result.exception, UnreachableError)
    assert "no job is running at 127.0.0.1:1, 127.0.0.1:2" in str(result.exception)
    assert isinstance(CliRunner().invoke(command, ["--join", ","]).exception, ConfigError)
