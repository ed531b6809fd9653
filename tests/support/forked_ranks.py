"""Ranks of other trainers as forks of one process that has loaded the library once.

Run as a script of its own (`*_runs.py`): libraries of that size load for seconds. What a rank
computes is real; a sleep in proportion to its work stands for the device, so that busy test
machines tell no tales.
"""

import contextlib
import functools
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.trainer.hooks.compute_timers import SCHEDSTAT
from support.ports import free_port

S_PER_TOKEN, S_PER_SQUARE = 1e-3, 1e-5  # so long that what a busy host adds is small beside it
SLOW_RANK, SLOWDOWN, HEALTHY_STEPS, STEPS = 1, 2.0, 28, 48
SEQUENCES = 4


class Pace:
    """The device of a rank: it takes its time for every training pass, and may become slow."""

    def __init__(self, rank: int, *, becomes_slow: bool, passes_per_step: int = 1) -> None:
        self.is_victim = becomes_slow and rank == SLOW_RANK
        self.healthy_passes = HEALTHY_STEPS * passes_per_step
        self.passes = 0

    def take(self, input_ids: Tensor) -> None:
        rows, length = input_ids.shape
        self.passes += 1
        slowdown = SLOWDOWN if self.is_victim and self.passes > self.healthy_passes else 1.0
        rest(rows * length * (S_PER_TOKEN + length * S_PER_SQUARE) * slowdown)


def rest(seconds: float) -> None:
    """Sleep so long beside the time for which the thread waits for a core.

    A thread that is preempted when its timer runs already waits for a core while it seems to sleep.
    The hooks' clock takes that for the host's time: on a busy host the device's would be lost.
    """
    end_s = _idle_s() + seconds
    while (left_s := end_s - _idle_s()) > 0.0:
        time.sleep(left_s)


def _idle_s() -> float:
    """Time of this thread that it neither ran nor waited for a core."""
    while True:
        waited_s = _waited_s()
        idle_s = time.monotonic() - time.thread_time() - waited_s
        if _waited_s() == waited_s:  # else it waited between two of these readings
            return idle_s


def _waited_s() -> float:
    """0.0 where the kernel does not tell."""
    with contextlib.suppress(OSError), open(SCHEDSTAT) as file:
        return 1e-9 * int(file.read().split()[1])
    return 0.0


class Lengths:
    """Batches of drawn lengths; `is_uneven`: the longer, the higher the rank, in every step."""

    def __init__(self, rank: int, *, is_uneven: bool) -> None:
        self.draw = random.Random(rank)
        self.scale = 1 + 2 * rank if is_uneven else 2

    def batch(self, _: object = None) -> dict[str, Tensor]:
        length = self.scale * self.draw.randint(12, 24)
        ids = torch.arange(SEQUENCES * length).reshape(SEQUENCES, length) % 64
        return {"input_ids": ids, "labels": ids}


def fork(body: Callable[[], None], environment: Mapping[str, str], log: Path) -> int:
    """The pid of a process that does `body` and ends; what went wrong is in `log`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        torch.set_num_threads(1)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_ranks(body: Callable[[int], None], log: Path, world_size: int = 2) -> list[int]:
    """One process per rank, in an environment as torchrun makes it."""
    port = free_port()
    pids = []
    for rank in range(world_size):
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        texts = {name: str(value) for name, value in environment.items()}
        pids.append(fork(functools.partial(body, rank), texts, log.with_suffix(f".{rank}.log")))
    return pids


def _await_all(pids: list[int]) -> int:
    """0 where all ended well."""
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


def run_all(
    rank_of: Callable[[str, Path, Path, int], None],
    alone: Callable[[Path], None],
    jobs: Sequence[str] = ("slow", "uneven"),
) -> int:
    """What such a script does, `python -m support.X RINGS FOLDER`: lone runs, and jobs of two
    ranks, one with a slow rank, one with uneven sequences. 0 where all ended well.
    """
    rings, folder = Path(sys.argv[1]), Path(sys.argv[2])
    pids = [fork(lambda: alone(folder), {}, folder / "alone.log")]
    for job in jobs:
        pids += fork_ranks(functools.partial(rank_of, job, rings, folder), folder / job)
    return _await_all(pids)
