"""A mapping that is never changed, yet cheap to make anew with a few keys changed. Pure.

Keys lie in chunks: a change copies the chunks it touches and the list of chunks, the rest is
shared. With ten thousand ranks or nodes, copying a whole dictionary for each report would cost more
than everything else that is done with it.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, Self, TypeVar
from zlib import crc32

CHUNK_RANKS = 64
NODE_CHUNKS = 256

K = TypeVar("K")
V = TypeVar("V")


class ChunkedMap(Mapping[K, V]):
    """Equal to every mapping with the same content."""

    __slots__ = ("_chunks", "_size")

    def __init__(self, values: Mapping[K, V] | None = None) -> None:
        self._chunks: Mapping[int, Mapping[K, V]] = {}
        self._size = 0
        if values:
            made = self.changed(values)
            self._chunks, self._size = made._chunks, made._size

    @staticmethod
    @abstractmethod
    def _chunk_of(key: K) -> int:
        """The number of the chunk that a key lies in, always the same."""

    def changed(self, values: Mapping[K, V]) -> Self:
        """The same mapping with these keys set."""
        chunks = dict(self._chunks)
        touched: dict[int, dict[K, V]] = {}
        size = self._size
        for key, value in values.items():
            number = self._chunk_of(key)
            chunk = touched.get(number)
            if chunk is None:
                chunk = touched[number] = dict(chunks.get(number, {}))
            size += key not in chunk
            chunk[key] = value
        chunks.update(touched)
        return self._made(chunks, size)

    def without(self, keys: Collection[K]) -> Self:
        """The same mapping without these keys."""
        gone = set(keys)
        chunks = {
            number: {key: value for key, value in chunk.items() if key not in gone}
            for number, chunk in self._chunks.items()
        }
        return self._made(chunks, sum(map(len, chunks.values())))

    def _made(self, chunks: Mapping[int, Mapping[K, V]], size: int) -> Self:
        made = type(self)()
        made._chunks, made._size = chunks, size
        return made

    def __getitem__(self, key: K) -> V:
        return self._chunks[self._chunk_of(key)][key]

    def get(self, key: K, default: Any = None) -> Any:
        """As any mapping's; without an exception where the key is not there."""
        chunk = self._chunks.get(self._chunk_of(key))
        return default if chunk is None else chunk.get(key, default)

    def values(self) -> Any:
        """All values, in the order of their keys, as a list: made at once, it costs little."""
        return list(chain.from_iterable(chunk.values() for chunk in self._chunks.values()))

    def __iter__(self) -> Iterator[K]:
        for chunk in self._chunks.values():
            yield from chunk

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


class RankMap(ChunkedMap[int, V]):
    """Ranks (any integers from 0) to values."""

    __slots__ = ()

    @staticmethod
    def _chunk_of(key: int) -> int:
        return key // CHUNK_RANKS


class NodeMap(ChunkedMap[str, V]):
    """Nodes by name to values."""

    __slots__ = ()

    @staticmethod
    def _chunk_of(key: str) -> int:
        return crc32(key.encode("utf-8", "surrogatepass")) % NODE_CHUNKS


def node_map(nodes: Mapping[str, V]) -> NodeMap[V]:
    """The same nodes in chunks."""
    return nodes if isinstance(nodes, NodeMap) else NodeMap(nodes)
