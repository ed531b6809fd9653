"""What the command `agent` makes of its flags, the environment and the file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pacekeeper.cli.services import agent
from pacekeeper.core.config.agent import AgentConfig
from pacekeeper.core.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "environment", "rack"),
    [
        ([], {}, "of the file"),
        ([], {"PACEKEEPER_RACK": "of the environment"}, "of the environment"),
        ([], {"PACEKEEPER_RACK": ""}, "of the file"),
        (["--rack", "of the flag"], {"PACEKEEPER_RACK": "x"}, "of the flag"),
    ],
)
def test_a_rack_is_told_by_flag_environment_or_file(
    arguments: list[str],
    environment: dict[str, str],
    rack: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, seen = tmp_path / "a.toml", list[AgentConfig]()
    file.write_text('[agent]\nrack = "of the file"\n')

    async def started(make: type, config: AgentConfig) -> None:
        seen.append(config)

    monkeypatch.delenv("PACEKEEPER_RACK", raising=False)
    monkeypatch.setattr(agent, "_run", started)
    done = CliRunner().invoke(
        agent.command, ["--config", str(file), *arguments], env=environment, catch_exceptions=False
    )
    assert (done.exit_code, [config.rack for config in seen]) == (0, [rack])


def test_a_rack_is_named_as_a_node_is() -> None:
    with pytest.raises(ConfigError, match="rack"):
        CliRunner().invoke(agent.command, ["--rack", "a\tb"], catch_exceptions=False)
