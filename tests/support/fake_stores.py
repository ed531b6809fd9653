"""The stores of a job in memory, where ranks and whole nodes die at a chosen operation."""

import threading
from dataclasses import dataclass, field
from typing import cast

from pacekeeper.trainer.stores import DEATHS_KEY, Stores


class Killed(BaseException):
    """This rank's process is gone."""


@dataclass(kw_only=True)
class FakeCluster:
    """One store per node. `deaths[rank]`: at its how manyth operation the rank dies.

    A node in `fragile` goes down with the first of its ranks; otherwise its launcher tells all.
    """

    num_nodes: int
    ranks_per_node: int
    deaths: dict[int, int]
    fragile: frozenset[int] = frozenset()
    data: list[dict[str, str]] = field(default_factory=list)
    down: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.data = [{} for _ in range(self.num_nodes)]

    def kill(self, rank: int) -> None:
        """End a rank, and its node where that is fragile."""
        with self.lock:
            node = rank // self.ranks_per_node
            if node in self.fragile:
                self.down.add(node)
                return
            for store in self.data:
                store[DEATHS_KEY] = store.get(DEATHS_KEY, "") + f"{rank},"

    def stores_of(self, rank: int) -> Stores:
        """What `rank` uses in place of clients."""
        return cast(Stores, FakeStores(self, rank))


class FakeStores:
    """One rank's view."""

    def __init__(self, cluster: FakeCluster, rank: int) -> None:
        self.gone: set[int] = set()
        self._cluster = cluster
        self._rank = rank
        self._num_operations = 0

    def client(self, node: int) -> dict[str, str] | None:
        return None if node in self.gone else self._cluster.data[node]

    def read(self, node: int, key: str) -> str | None:
        with self._cluster.lock:
            return self._store(node).get(key)

    def write(self, node: int, key: str, value: str) -> None:
        with self._cluster.lock:
            self._store(node)[key] = value

    def append(self, node: int, key: str, value: str) -> None:
        with self._cluster.lock:
            store = self._store(node)
            store[key] = store.get(key, "") + value

    def write_first(self, node: int, key: str, value: str) -> str | None:
        with self._cluster.lock:
            standing = self._store(node).setdefault(key, value)
            return None if node in self.gone else standing

    def _store(self, node: int) -> dict[str, str]:
        """The node's store; a throw-away one where it is down."""
        cluster = self._cluster
        self._num_operations += 1
        if self._rank // cluster.ranks_per_node in cluster.down:
            raise Killed
        if self._num_operations == cluster.deaths.get(self._rank):
            cluster.kill(self._rank)
            raise Killed
        if node in cluster.down:
            self.gone.add(node)
        return {} if node in self.gone else cluster.data[node]
