"""Small worlds for tests: ranks as threads of this process, with exact collectives."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ThreadWorld:
    """What the threads of one world share."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(len(ranks))
        self.parcels: dict[int, list[Tensor]] = {}


class ThreadFabric:
    """The Collectives of one rank that is a thread."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.ranks = world.ranks
        self._world = world

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        world = self._world
        world.parcels[self.rank] = list(torch.split(input.detach().clone(), input_splits))
        world.barrier.wait()
        position = self.ranks.index(self.rank)
        arrived = [world.parcels[other][position] for other in self.ranks]
        assert [len(part) for part in arrived] == output_splits, "both sides agree on the splits"
        output.copy_(torch.cat(arrived))
        world.barrier.wait()

    def exchange(self, values: Sequence[float]) -> Tensor:
        size = len(self.ranks)
        mine = torch.tensor([list(values)] * size, dtype=torch.float64)
        theirs = torch.empty_like(mine)
        self.all_to_all(theirs, mine, [1] * size, [1] * size)
        return theirs


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
            world.barrier.abort()

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
