"""`pacekeeper top` on a terminal of its own, against a real controller, and away from one."""

import os
import pty
import select
import struct
import subprocess
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.telemetry.node_report import JobReport
from support.commands import FRESH
from support.controllers import (
    PATIENCE_S,
    ControllerProcess,
    ScriptedAgent,
    attached,
    first_layout,
    step_records,
)

pytest.importorskip("textual", reason="needs pacekeeper[cli]")

LAYOUT = first_layout()


class Terminal:
    """80 by 24, and whoever draws on it."""

    def __init__(self, *arguments: str, term: str = "xterm-256color") -> None:
        self._ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [*FRESH, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": term},
            start_new_session=True,
        )
        os.close(theirs)
        self.drawn = ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, text: str) -> None:
        """Until this has been drawn at some time."""
        give_up_s = time.monotonic() + PATIENCE_S
        while text not in self.drawn:
            assert time.monotonic() < give_up_s, self.drawn[-3000:]
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.drawn += os.read(self._ours, 1 << 16).decode(errors="replace")
                except OSError:  # nobody draws any more
                    assert text in self.drawn, self.drawn[-3000:]

    def wait(self) -> int:
        """What it leaves must be read, or it can not end."""
        give_up_s = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < give_up_s
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.drawn += os.read(self._ours, 1 << 16).decode(errors="replace")
                except OSError:
                    break
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)


def test_it_draws_what_the_controller_says_and_gives_the_terminal_back(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached("train", LAYOUT))
        for number in range(30):
            agent.report(JobReport(job="train", records=step_records(number, LAYOUT)))
        agent.report_and_wait()
        terminal = Terminal("top", "--controller", controller.api)
        try:
            terminal.until("train")
            terminal.until("node-0")
            terminal.type("s")
            terminal.until("suspicion")
            terminal.type("q")
            assert terminal.wait() == ExitCode.OK
            assert "\x1b[?1049l" in terminal.drawn, "the screen of before is back"
        finally:
            terminal.close()
            agent.close()


@pytest.mark.parametrize(
    ("term", "code", "why"),
    [
        ("dumb", ExitCode.HOST, "TERM"),
        ("xterm", ExitCode.UNREACHABLE, "127.0.0.1:1"),
    ],
)
def test_where_it_can_not_be_it_says_so_and_draws_nothing(
    term: str, code: ExitCode, why: str
) -> None:
    terminal = Terminal("top", "--controller", "127.0.0.1:1", term=term)
    try:
        assert terminal.wait() == code
        terminal.until(why)
        assert "\x1b[?1049h" not in terminal.drawn
    finally:
        terminal.close()
