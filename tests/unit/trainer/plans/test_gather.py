"""The group of votes: what it leaves behind when it is closed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from pacekeeper.trainer.plans.gather import CpuGather
from support.threads import num_threads, until_ended

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="threads are not listed here"
)
AT_EXIT = """
import atexit, sys
import torch.distributed as dist
from pacekeeper.trainer.plans.gather import CpuGather
sys.path.insert(0, sys.argv[3])
from support.threads import num_threads, until_ended
bare = num_threads()
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
before = num_threads()
gather = CpuGather()
gather.itself = gather  # a cycle: it would outlive the interpreter
assert gather([3, 4]) == [(3, 4)]
if sys.argv[2] == "destroyed":
    dist.destroy_process_group()
    before = bare
atexit._run_exitfuncs()
until_ended(before)
"""


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[int]:
    """Number of threads before there was a group of this one rank."""
    count = num_threads()
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield count
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("is_destroyed", [False, True])
def test_closing_joins_the_threads_of_the_group(bare: int, is_destroyed: bool) -> None:
    before = num_threads()
    gather = CpuGather()
    assert gather([1, 2]) == [(1, 2)]
    assert num_threads() > before
    if is_destroyed:  # by the trainer, as at its end: the gather's reference keeps the group alive
        dist.destroy_process_group()
    gather.close()
    until_ended(bare if is_destroyed else before)
    gather.close()  # does nothing


@pytest.mark.parametrize("group", ["destroyed", "kept"])
def test_a_group_that_nothing_closes_is_closed_at_exit(tmp_path: Path, group: str) -> None:
    tests = str(Path(__file__).resolve().parents[3])
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "store"), group, tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
