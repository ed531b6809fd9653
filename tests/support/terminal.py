"""Runs commands as a person in a terminal sees them, for the snapshots of their texts."""

import json
import re
import shlex
from collections.abc import Sequence

import click
from click.testing import CliRunner

from pacekeeper.cli.common.lazy_group import command as main

COLUMNS = 80


class Terminal:
    """Runs commands in this process in a folder of its own and keeps what they print."""

    def __init__(self) -> None:
        self.text = ""
        self._masks: list[tuple[str, str]] = [(r"[ \t]+$", "")]

    def mask(self, pattern: str, word: str) -> None:
        """From now on `word` stands for what matches: a time, a port, a secret."""
        self._masks.append((pattern, word))

    def run(self, *arguments: str, code: int = 0) -> str:
        """One command with its output and its exit code; the output."""
        done = CliRunner().invoke(
            main,
            arguments,
            prog_name="pacekeeper",
            terminal_width=COLUMNS,
            max_content_width=COLUMNS,
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output
        self.show(f"$ pacekeeper {shlex.join(arguments)}", done.output)
        if code:
            self.text += f"[exit code {code}]\n"
            check_options(done.output.splitlines()[-1], arguments)
        return done.output

    def show(self, title: str, output: str) -> None:
        """Something that was drawn, under a title."""
        output = output.rstrip("\n")
        for pattern, word in self._masks:
            title = re.sub(pattern, word, title, flags=re.MULTILINE)
            output = re.sub(pattern, word, output, flags=re.MULTILINE)
        self.text += ("\n" if self.text else "") + f"{title}\n{output}\n"

    def run_without(self, *arguments: str) -> None:
        """One command; `REASON` stands for what the planner or the predictor says."""
        done = CliRunner().invoke(main, [*arguments, "--json"])
        found = json.loads(done.output)
        for one in (found, *found.get("findings", ())):
            if "reason" in one:
                self.mask(re.escape(one["reason"]) + "(; .*)?", "REASON")
        self.run(*arguments)

    def run_help(self, *words: str) -> None:
        """The help of a command and of all below it."""
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        self.run(*words, "--help")
        if isinstance(command, click.Group) and words:
            for below in command.list_commands(click.Context(command)):
                self.run_help(*words, below)


def check_options(error: str, arguments: Sequence[str]) -> None:
    """An error names no option that the command lacks, except of a command in `backquotes`."""
    command: click.Command = main
    for word in arguments:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word) or command
    known = {name for one in command.get_params(click.Context(command)) for name in one.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub("`[^`]*`", "", error)))
    assert named <= known, error
