"""Stacks of a rank's process: by its own handler, by py-spy, or the reason why there are none."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacekeeper.agent.host.process_state import catches_signal, lock_holder, read_process
from pacekeeper.agent.rings import stack_dump
from pacekeeper.agent.rings.reader import open_ring
from pacekeeper.agent.rings.stack_dump import DumpTarget, take_dump
from pacekeeper.core.telemetry.sign_of_life import MAX_STACK_BYTES, Phase

RANK = """
import signal, sys, threading
from pacekeeper.trainer.hooks import hooks
exec(sys.argv[2])
pace = hooks.attach(job="job", rank=0, world_size=2, ring_dir=sys.argv[1])
pace.begin_step(0)
def hangs_here():
    print("attached", flush=True)
    threading.Lock().__enter__() if False else threading.Event().wait()
hangs_here()
"""


class Rank:
    def __init__(self, directory: Path, *, before: str = "", environment: str = "1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(directory), before],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PACEKEEPER_STACK_DUMPS": environment},
        )
        assert self.process.stdout is not None and self.process.stdout.readline()
        self.reader = open_ring(directory / "job" / "rank-00000.ring", "job", 0.0)

    def target(self) -> DumpTarget:
        sign = self.reader.sign()
        assert sign.phase is Phase.STEPPING
        return DumpTarget(
            rank=0, ring=self.reader.path, pid=self.reader.process(), signal=sign.dump_signal
        )

    def end(self) -> None:
        self.reader.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made: list[Rank] = []
    yield made
    for rank in made:
        rank.end()


def test_a_rank_that_hangs_dumps_its_stacks_beside_its_ring(
    tmp_path: Path, ranks: list[Rank]
) -> None:
    ranks.append(Rank(tmp_path))
    target = ranks[0].target()
    assert target.pid == ranks[0].process.pid
    for _ in range(2):  # a second dump holds its own lines only
        stack = take_dump(target)
        assert (stack.rank, stack.source) == (0, "faulthandler")
        assert stack.text.count("in hangs_here") == 1
    assert ranks[0].process.poll() is None, "the process lives"


def test_a_stopped_rank_is_not_signalled_and_py_spy_reads_it(
    tmp_path: Path, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.append(Rank(tmp_path))
    target = ranks[0].target()
    os.kill(target.pid, signal.SIGSTOP)
    os.waitpid(target.pid, os.WUNTRACED)
    state = read_process(target.pid)
    assert state is not None and state.letter == "T"
    monkeypatch.setattr(stack_dump, "_kernel_stack", lambda pid: "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert take_dump(target).source == "" and "stopped" in take_dump(target).text
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\n/bin/echo "$@"; /bin/yes line | /usr/bin/head -c 100000\n')
    spy.chmod(spy.stat().st_mode | stat.S_IXUSR)
    stack = take_dump(target)
    assert stack.source == "py-spy"
    assert MAX_STACK_BYTES - 1 <= len(stack.text) <= MAX_STACK_BYTES  # cut, maybe at a line's end
    assert stack.text.startswith(f"dump --nonblocking --pid {target.pid}")


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("", "0"),
        ("signal.signal(signal.SIGRTMIN + 13, lambda *_: None)", "1"),
        ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 13])", "1"),
    ],
)
def test_a_signal_that_is_refused_or_taken_is_left_alone(
    tmp_path: Path,
    ranks: list[Rank],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    environment: str,
) -> None:
    ranks.append(Rank(tmp_path, before=before, environment=environment))
    target = ranks[0].target()
    assert target.signal == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(stack_dump, "_kernel_stack", lambda pid: "")
    assert take_dump(target).source == ""
    assert ranks[0].process.poll() is None


def test_no_process_that_would_die_of_the_signal_gets_it(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks.append(Rank(tmp_path))
    held = ranks[0].target()
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        assert catches_signal(held.pid, held.signal)
        assert not catches_signal(other.pid, held.signal)
        take_dump(DumpTarget(rank=0, ring=held.ring, pid=other.pid, signal=held.signal))
        assert other.poll() is None
        other.kill()
    assert lock_holder((tmp_path / "job").stat()) == 0
    assert take_dump(DumpTarget(rank=0, ring=held.ring, pid=0, signal=0)).source == ""
