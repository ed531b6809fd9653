"""The footprint's figures are of the process that is meant."""

import os
import subprocess
import sys

from benchmarks.agent_footprint import cpu_s, memory_bytes

BUSY = "x = bytearray(50_000_000)\nwhile True:\n    sum(range(1000))\n"


def test_memory_and_time_are_of_the_process_asked_for() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        while cpu_s(process.pid) < 0.2 or memory_bytes(process.pid)[0] < 50_000_000:
            assert process.poll() is None
        now, most = memory_bytes(process.pid)
        process.kill()
    assert 50_000_000 <= now <= most < 150_000_000
    assert cpu_s(os.getpid()) > 0.0
