"""Paths of commands: the empty one is refused, and settings come from files and pipes."""

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pacekeeper.cli.common.lazy_group import command as main
from pacekeeper.cli.common.paths import PathType
from pacekeeper.cli.common.settings import MAX_BYTES, read_config_text
from pacekeeper.core.errors import ConfigError, ExitCode


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below)


def test_every_path_of_a_command_is_refused_if_empty() -> None:
    paths = [
        parameter.type
        for command in commands(main)
        for parameter in command.params
        if isinstance(parameter.type, click.Path) or getattr(parameter.type, "func", None) is Path
    ]
    assert len(paths) > 20 and {type(one) for one in paths} == {PathType}


def test_an_empty_path_is_not_the_current_directory() -> None:
    done = CliRunner().invoke(main, ["replay", ""])
    assert done.exit_code == ExitCode.USAGE and "expected a path, got ''" in done.output


def test_settings_without_end_are_refused() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: not a settings file"):
        read_config_text("/dev/zero")


def test_settings_come_through_a_pipe() -> None:
    """As `--config <(...)` gives it."""
    reader, writer = os.pipe()
    try:
        os.write(writer, b"[agent]\n")
        os.close(writer)
        assert read_config_text(f"/dev/fd/{reader}") == "[agent]\n"
    finally:
        os.close(reader)


def test_the_largest_settings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("#" * MAX_BYTES)
    assert len(read_config_text(str(path))) == MAX_BYTES
