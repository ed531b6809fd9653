"""Ranks of a group as threads of one process: collectives without torch.distributed."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from pacekeeper.trainer.groups.group import AllOf, Messages, Pending

T = TypeVar("T")
_TIMEOUT_S = 60.0


class _Hub:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.given: list[list[Tensor]] = [[] for _ in range(size)]
        self.others: dict[str, _Hub] = {}  # of the same ranks, by name
        self.messages: dict[tuple[int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self.lock = threading.Lock()


class ThreadGroup:
    """One rank's side of a group whose members are threads."""

    def __init__(self, hub: _Hub, rank: int, ranks: Sequence[int]) -> None:
        self._hub = hub
        self.rank = rank
        self.ranks = tuple(ranks)

    def another(self, name: str) -> "ThreadGroup":
        """A group of the same ranks, the same for a name: other threads of theirs may use it."""
        with self._hub.lock:
            hub = self._hub.others.setdefault(name, _Hub(len(self.ranks)))
        return ThreadGroup(hub, self.rank, self.ranks)

    def _swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Give part i to member i; return what the members gave."""
        own = self.ranks.index(self.rank)
        self._hub.given[own] = [part.clone() for part in parts]
        self._hub.barrier.wait()
        taken = [given[own] for given in self._hub.given]
        self._hub.barrier.wait()
        return taken

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack(self._swap([values] * len(self.ranks)))

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        arrived = self._swap(rows.split(list(send)))
        assert [len(part) for part in arrived] == list(receive), "sides disagree on the rows"
        return _Arrived(output, torch.cat(arrived))

    def all_reduce(self, values: Tensor) -> Pending:
        return _Arrived(values, torch.stack(self._swap([values] * len(self.ranks))).sum(0))

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        for rank, tensor in sends:
            self._hub.messages[self.rank, rank].put(tensor.clone())
        return AllOf([_Arrived(tensor, self._message(rank)) for rank, tensor in receives])

    def _message(self, rank: int) -> Tensor:
        while True:
            try:
                return self._hub.messages[rank, self.rank].get(timeout=0.2)
            except Empty:
                if self._hub.barrier.broken:
                    raise threading.BrokenBarrierError from None


class _Arrived:
    """A collective that is over, but shows nothing before it is waited for."""

    def __init__(self, output: Tensor, values: Tensor) -> None:
        self._output, self._values = output, values

    def wait(self) -> object:
        assert self._output.shape == self._values.shape, "sides disagree on the message"
        self._output.copy_(self._values)
        return None


def run_ranks(ranks: int | Sequence[int], work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` on each rank of a group; the results in their order. The first error is raised."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    hub = _Hub(len(ranks))

    def guarded(rank: int) -> T:
        try:
            return work(ThreadGroup(hub, rank, ranks))
        except BaseException:
            for one in (hub, *hub.others.values()):
                one.barrier.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(guarded, rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
