"""Small worlds for tests: ranks as threads of this process, or as real processes with gloo."""

import os
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from pacekeeper.trainer.distributed.collectives import Collectives, FabricGroup, exchanged
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from support.fork_server import server_context

T = TypeVar("T")
PROCESS_TIMEOUT_S = 120.0


class ThreadWorld:
    """What the threads of one world share: what each has sent to each other and not yet arrived."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.is_aborted = False
        self.parcels: dict[tuple[object, int, int], deque[Tensor]] = defaultdict(deque)
        self.arrival = threading.Condition()

    def abort(self) -> None:
        """Nobody waits any more."""
        with self.arrival:
            self.is_aborted = True
            self.arrival.notify_all()


class ThreadFabric(FabricGroup):
    """The Collectives of one rank that is a thread; `name` is that of its group."""

    def __init__(
        self, world: ThreadWorld, rank: int, ranks: tuple[int, ...] = (), name: str = ""
    ) -> None:
        self.rank = rank
        self.ranks = ranks or world.ranks
        self.num_collectives = 0
        self._world = world
        self._name = (self.ranks, name)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        entered_synchronously: bool = False,
    ) -> None:
        self.post(output, input, output_splits, input_splits).wait()

    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> "ThreadPosted":
        self.num_collectives += 1
        world = self._world
        parts = torch.split(input.detach().clone(), input_splits)
        with world.arrival:
            for other, part in zip(self.ranks, parts, strict=True):
                world.parcels[self._name, self.rank, other].append(part)
            world.arrival.notify_all()
        return ThreadPosted(self, output, output_splits)

    def take(self, sender: int) -> Tensor:
        """What comes next from a member; waits for it."""
        world, name = self._world, (self._name, sender, self.rank)
        with world.arrival:
            world.arrival.wait_for(lambda: world.is_aborted or world.parcels[name])
            if world.is_aborted:
                raise WorldAborted
            return world.parcels[name].popleft()

    def close(self) -> None:
        """Leave; who waits here is told by `ThreadWorld.abort`."""

    def group(self, ranks: tuple[int, ...], name: str = "") -> "ThreadFabric":
        if ranks == self.ranks and not name:
            return self
        return ThreadFabric(self._world, self.rank, ranks, name)

    def exchange(self, values: Sequence[float]) -> Tensor:
        return exchanged(self, values)


class ThreadPosted:
    """An all-to-all that has begun. Those of one group are waited for in the order of posting."""

    def __init__(self, fabric: ThreadFabric, output: Tensor, splits: list[int]) -> None:
        self._fabric, self._output, self._splits = fabric, output, splits

    def wait(self) -> None:
        arrived = [self._fabric.take(other) for other in self._fabric.ranks]
        assert [len(part) for part in arrived] == self._splits, "both sides agree on the splits"
        self._output.copy_(torch.cat(arrived))


class WorldAborted(Exception):
    """Another thread of the world has failed."""


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
        if not isinstance(failure, WorldAborted):
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
    return {rank: torch.load(directory / f"result-{rank}.pt") for rank in ranks}  # noqa: TID251


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
        fabric = InterruptibleProcessGroup(
            store=FileStore(str(directory / "store"), len(ranks)),
            generation=1,
            rank=rank,
            ranks=ranks,
            is_aborted=lambda: False,
            tick_s=0.1,
            timeout_s=60.0,
        )
        result = body(fabric, argument)
        torch.save(result, directory / f"result-{rank}.pt")  # noqa: TID251
        fabric.exchange([1.0])  # nobody leaves while a peer still waits for its bytes
        fabric.close()
    except BaseException:
        (directory / f"failure-{rank}.txt").write_text(traceback.format_exc())
        raise
