"""Processes of benchmarks end with the benchmark, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.tree import ROOT

SCRIPT = """
import subprocess, sys, time
from benchmarks.rank_processes import bound, exit_on_stop_signals
exit_on_stop_signals()
line = bound(sys.executable, "-c", "import time; print(0, flush=True); time.sleep(600)")
rank = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
rank.stdout.readline()
try:
    print(rank.pid, flush=True)
    time.sleep(600)
finally:
    print("cleaned", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_bound_process_ends_with_its_benchmark_even_if_it_is_frozen(
    number: signal.Signals,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    os.kill(rank, signal.SIGSTOP)
    process.send_signal(number)
    text, _ = process.communicate(timeout=60.0)
    assert text == ("cleaned\n" if number is signal.SIGTERM else "")
    give_up_s = time.monotonic() + 60.0
    while _runs(rank):
        assert time.monotonic() < give_up_s, "the rank outlived its benchmark"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
