"""`pacekeeper` as a person or a program calls it: its own process, its output, its exit code."""

import subprocess
import sys


def pacekeeper(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pacekeeper.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def started(*arguments: str) -> subprocess.Popen[str]:
    """Start a command that goes on until it is told to end."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "pacekeeper.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
