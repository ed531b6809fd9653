"""A mapping by rank that is never changed, yet cheap to make anew with a few ranks changed. Pure.

Ranks lie in chunks: a change copies the chunks it touches and the list of chunks, the rest is
shared. With ten thousand ranks and eight per report, copying a whole dictionary for each report
would cost more than everything else that is done with it.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

CHUNK_RANKS = 64

V = TypeVar("V")


class RankMap(Mapping[int, V]):
    """Ranks (any integers from 0) to values; equal to every mapping with the same content."""

    __slots__ = ("_chunks", "_size")

    def __init__(self, values: Mapping[int, V] | None = None) -> None:
        self._chunks: Mapping[int, Mapping[int, V]] = {}
        self._size = 0
        if values:
            made = self.changed(values)
            self._chunks, self._size = made._chunks, made._size

    def changed(self, values: Mapping[int, V]) -> "RankMap[V]":
        """The same mapping with these ranks set."""
        chunks = dict(self._chunks)
        touched: dict[int, dict[int, V]] = {}
        size = self._size
        for rank, value in values.items():
            number = rank // CHUNK_RANKS
            chunk = touched.get(number)
            if chunk is None:
                chunk = touched[number] = dict(chunks.get(number, {}))
            size += rank not in chunk
            chunk[rank] = value
        chunks.update(touched)
        made: RankMap[V] = RankMap()
        made._chunks, made._size = chunks, size
        return made

    def __getitem__(self, rank: int) -> V:
        return self._chunks[rank // CHUNK_RANKS][rank]

    def __iter__(self) -> Iterator[int]:
        for chunk in self._chunks.values():
            yield from chunk

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"RankMap({dict(self)!r})"
