"""`pacekeeper` as a person or a program calls it: its own process, its output, its exit code.

The process is forked from the tests' server. What has to be as fresh as an operator's own - imports
that are not done yet, the interpreter's own end - is started by the real line (`FRESH`).
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType

from support.fork_server import Handed, hear_signals, server_context

FRESH = (sys.executable, "-m", "pacekeeper.cli.main")
PATIENCE_S = 120.0


def pacekeeper(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = _forked(arguments, output.fileno(), errors.fileno(), cwd)
        process.join(PATIENCE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, PATIENCE_S)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(
            arguments, process.exitcode, output.read(), errors.read()
        )


class Started:
    """A command that goes on until it is told to end; of Popen what tests need."""

    def __init__(self, *arguments: str, errors: int | None = None) -> None:
        """Its standard error goes to the descriptor `errors`, else to `stderr`."""
        out, theirs = os.pipe()
        err, their_errors = os.pipe()
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(err)
        self._process = _forked(arguments, theirs, errors or their_errors, None)
        os.close(theirs)
        os.close(their_errors)
        self.pid = int(self._process.pid or 0)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code; raises TimeoutExpired where there is none by then."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("pacekeeper", timeout_s)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Read nothing more of what it says."""
        self.stdout.close()
        self.stderr.close()

    def __enter__(self) -> "Started":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self.wait()
        self.close()


def _forked(
    arguments: tuple[str, ...], output: int, errors: int, cwd: Path | None
) -> ForkServerProcess:
    process = server_context().Process(
        target=_run,
        args=(arguments, Handed(output), Handed(errors), dict(os.environ), str(cwd or Path.cwd())),
    )
    process.start()
    return process


def _run(
    arguments: tuple[str, ...],
    output: Handed,
    errors: Handed,
    environment: Mapping[str, str],
    cwd: str,
) -> None:
    from pacekeeper.cli.main import main

    hear_signals()
    output.become(1)
    errors.become(2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    main(arguments)
