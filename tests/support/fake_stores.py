"""The stores of a job in memory, where ranks and whole nodes die at a chosen operation."""

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

from pacekeeper.trainer.elastic.agreement.kv_store import (
    DEATHS_KEY,
    Stores,
    fence_key,
    group_key,
    notice,
)
from pacekeeper.trainer.elastic.agreement.quorum import FIRST_GROUP


class Killed(BaseException):
    """This rank's process is gone."""


@dataclass(kw_only=True)
class FakeCluster:
    """One store per node. `deaths[rank]`: at its how manyth operation the rank dies.

    A node in `fragile` goes down with the first of its ranks; otherwise its launcher tells all that
    it reaches. From operation `cuts[rank]` on, a rank reaches only the nodes of its side (`sides`).
    `has_fences`: who is fenced dies at once, and its launcher tells.
    """

    num_nodes: int
    ranks_per_node: int
    deaths: dict[int, int]
    fragile: frozenset[int] = frozenset()
    sides: tuple[frozenset[int], ...] = ()
    cuts: dict[int, int] = field(default_factory=dict)
    has_fences: bool = False
    fenced: set[int] = field(default_factory=set)
    data: list[dict[str, str]] = field(default_factory=list)
    down: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.data = [{} for _ in range(self.num_nodes)]

    @property
    def node_of(self) -> dict[int, int]:
        return {r: r // self.ranks_per_node for r in range(self.num_nodes * self.ranks_per_node)}

    def kill(self, rank: int) -> None:
        """End a rank, and its node where that is fragile."""
        with self.lock:
            node = self.node_of[rank]
            if node in self.fragile:
                self.down.add(node)
                return
        self.tell_end(rank)

    def tell_end(self, rank: int) -> None:
        """What the launcher does when a rank's process has ended."""
        with self.lock:
            node = self.node_of[rank]
            said = self.data[node].get(group_key(rank), FIRST_GROUP)
            for other, store in enumerate(self.data):
                if self.reaches(node, other):
                    store[DEATHS_KEY] = store.get(DEATHS_KEY, "") + notice(rank, said)

    def reaches(self, node: int, other: int) -> bool:
        """Are both on one side?"""
        return not self.sides or any({node, other} <= side for side in self.sides)

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

    def try_get(self, node: int, key: str) -> str | None:
        return self.read(node, key)

    def probe(self, nodes: Collection[int]) -> None:
        for node in nodes:
            self.read(node, DEATHS_KEY)

    def write(self, node: int, key: str, value: str) -> None:
        with self._cluster.lock:
            self._store(node)[key] = value
            named = {
                rank for rank in self._cluster.node_of if fence_key(rank) == key
            } - self._cluster.fenced
            if self._cluster.has_fences and node not in self.gone:
                for rank in named:
                    self._cluster.fenced.add(rank)
                    self._cluster.kill(rank)

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
        if cluster.node_of[self._rank] in cluster.down or self._rank in cluster.fenced:
            raise Killed
        if self._num_operations == cluster.deaths.get(self._rank):
            cluster.kill(self._rank)
            raise Killed
        is_cut = self._num_operations >= cluster.cuts.get(self._rank, 0)
        own = cluster.node_of[self._rank]
        if node in cluster.down or (is_cut and not cluster.reaches(own, node)):
            self.gone.add(node)
        return {} if node in self.gone else cluster.data[node]
