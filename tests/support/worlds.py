"""Small worlds for tests: ranks as threads of this process, or as real processes with gloo."""

import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from pacekeeper.trainer.fabric import Collectives, Fabric, exchanged
from support.fork_server import server_context

T = TypeVar("T")
PROCESS_TIMEOUT_S = 120.0


class ThreadWorld:
    """What the threads of one world share."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(len(ranks))
        self.parcels: dict[int, list[Tensor]] = {}
        self.parts: dict[tuple[int, ...], ThreadWorld] = {}
        self.lock = threading.Lock()

    def part(self, ranks: tuple[int, ...]) -> "ThreadWorld":
        """The world of some of its ranks: one for all that ask."""
        with self.lock:
            return self.parts.setdefault(ranks, ThreadWorld(ranks))

    def abort(self) -> None:
        """Nobody waits any more."""
        with self.lock:
            worlds = [self, *self.parts.values()]
        for world in worlds:
            world.barrier.abort()


class ThreadFabric:
    """The Collectives of one rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.ranks = world.ranks
        self.num_collectives = 0
        self._world = world

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        is_together: bool = False,
    ) -> None:
        world = self._world
        self.num_collectives += 1
        world.parcels[self.rank] = list(torch.split(input.detach().clone(), input_splits))
        world.barrier.wait()
        position = self.ranks.index(self.rank)
        arrived = [world.parcels[other][position] for other in self.ranks]
        assert [len(part) for part in arrived] == output_splits, "both sides agree on the splits"
        output.copy_(torch.cat(arrived))
        world.barrier.wait()

    def group(self, ranks: tuple[int, ...]) -> "ThreadFabric":
        return self if ranks == self.ranks else ThreadFabric(self._world.part(ranks), self.rank)

    def exchange(self, values: Sequence[float]) -> Tensor:
        return exchanged(self, values)


def run_world(ranks: tuple[int, ...], body: Callable[[ThreadFabric], T]) -> dict[int, T]:
    """Run `body` once per rank, in threads; their results by rank. Raises the first failure."""
    world = ThreadWorld(ranks)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(ThreadFabric(world, rank))
        except BaseException as error:
            failures.append(error)
            world.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    if failures:
        raise failures[0]
    return results


def run_processes(
    ranks: tuple[int, ...],
    body: Callable[[Collectives, Any], dict[str, Tensor]],
    argument: object,
    directory: Path,
) -> dict[int, dict[str, Tensor]]:
    """Run `body(fabric, argument)` once per rank, each a process with a real gloo group.

    `body` is a function of an importable module; results and the store are files in `directory`.
    Raises RuntimeError with the text of the first failure; leaves no process behind.
    """
    context = server_context()
    processes: list[BaseProcess] = [
        context.Process(target=_process_main, args=(rank, ranks, body, argument, directory))
        for rank in ranks
    ]
    give_up_s = time.monotonic() + PROCESS_TIMEOUT_S
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, give_up_s - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    for rank, process in zip(ranks, processes, strict=True):
        if process.exitcode != 0:
            failure = directory / f"failure-{rank}.txt"
            text = failure.read_text() if failure.exists() else f"exit code {process.exitcode}"
            raise RuntimeError(f"rank {rank}: {text}")
    return {rank: torch.load(directory / f"result-{rank}.pt") for rank in ranks}


def _process_main(
    rank: int,
    ranks: tuple[int, ...],
    body: Callable[[Collectives, Any], dict[str, Tensor]],
    argument: object,
    directory: Path,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        fabric = Fabric(
            store=FileStore(str(directory / "store"), len(ranks)),
            generation=1,
            rank=rank,
            ranks=ranks,
            is_aborted=lambda: False,
            tick_s=0.1,
            timeout_s=60.0,
        )
        result = body(fabric, argument)
        torch.save(result, directory / f"result-{rank}.pt")
        fabric.exchange([1.0])  # nobody leaves while a peer still waits for its bytes
        fabric.close()
    except BaseException:
        (directory / f"failure-{rank}.txt").write_text(traceback.format_exc())
        raise
