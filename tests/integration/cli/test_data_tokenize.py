"""`pacekeeper data tokenize` as a process: killed, interrupted, on a full disk, from a pipe."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.trainer.data.token_file import open_token_file
from support.commands import FRESH, PATIENCE_S, Started, pacekeeper

Run = Started | subprocess.Popen[bytes]
LINE = b'{"text": "%s"}\n' % (b"the word " * 10_000)


@contextmanager
def under_way(
    folder: Path, *options: str, start: Callable[..., Run] = Started
) -> Iterator[tuple[Run, IO[bytes]]]:
    """A run that has written some tokens and waits for more text from a pipe: its end to write."""
    pipe, output = folder / "pipe.jsonl", folder / "o.bin"
    os.mkfifo(pipe)
    arguments = ("data", "tokenize", str(pipe), "--out", str(output), *options)
    with start(*arguments) as run, pipe.open("wb", buffering=0) as text:
        partial, deadline_s = folder / "o.bin.partial", time.monotonic() + PATIENCE_S
        while not (partial.exists() and partial.stat().st_size):
            text.write(LINE)
            assert time.monotonic() < deadline_s
        yield run, text


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_killed_run_leaves_no_file_and_can_be_repeated(tmp_path: Path) -> None:
    with under_way(tmp_path, "--tokenizer", "bytes") as (run, _):
        os.kill(run.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    assert names(tmp_path) == {"pipe.jsonl", "o.bin.partial"}
    (tmp_path / "a.txt").write_text("ab")
    again = ("data", "tokenize", "a.txt", "--tokenizer", "bytes", "--out", "o.bin")
    assert pacekeeper(*again, cwd=tmp_path).returncode == ExitCode.CONFIG
    assert pacekeeper(*again, "--overwrite", cwd=tmp_path).returncode == ExitCode.OK
    assert names(tmp_path) == {"pipe.jsonl", "a.txt", "o.bin", "o.bin.json"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with under_way(tmp_path, "--tokenizer", "bytes") as (run, text):
        os.kill(run.pid, number)
        with suppress(BrokenPipeError):  # a signal between two reads is seen after the second one
            while True:
                text.write(LINE)
        assert run.wait() != ExitCode.OK
        assert isinstance(run, Started)
        assert "Traceback" not in run.stderr.read()
    assert names(tmp_path) == {"pipe.jsonl"}


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    with under_way(tmp_path, "--tokenizer", "bytes") as (run, text):
        text.write(b'{"text": "last"}\n')
        text.close()
        assert run.wait() == ExitCode.OK
    assert open_token_file(tmp_path / "o.bin").tokens[-5:].tolist() == [*b"last", 256]


def test_a_killed_run_takes_its_processes_with_it(tmp_path: Path) -> None:

    def fresh(*arguments: str) -> subprocess.Popen[bytes]:
        """Its processes load as little as an operator's; those of a forked one load all."""
        return subprocess.Popen([*FRESH, *arguments])

    options = ("--tokenizer", "bytes", "--processes", "2")
    with under_way(tmp_path, *options, start=fresh) as (run, _):
        children = descendants(run.pid)
        assert len(children) >= 2
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk."""
    (tmp_path / "a.txt").write_bytes(bytes(3_000_000))
    line = [*FRESH, "data", "tokenize", "a.txt", "--tokenizer", "bytes", "--out", "o.bin"]
    done = subprocess.run(
        ["prlimit", "--fsize=1000000", *line], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == ExitCode.HOST
    assert "o.bin" in done.stderr and len(done.stderr.splitlines()) == 1
    assert names(tmp_path) == {"a.txt"}


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found
