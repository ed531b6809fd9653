"""One token file as the stream sees it: mapped tokens and where documents begin.

Made by `token_file` (nanoGPT) and `megatron_file`, read by `token_stream`. It never writes, and
copies no more of a file than the rows that are asked for.
"""

import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pacekeeper.core.errors import DataError, HostError

Tokens = NDArray[np.integer]
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIndex:
    """Looks up the first tokens of documents without an array of all of them in memory.

    Attributes:
        num_documents: documents of the file.
        start: the first token of a document; ascending, empty documents begin where the next does.
    """

    num_documents: int
    start: Callable[[int], int]

    def within(self, first: int, last: int) -> list[int]:
        """Return the tokens in [first, last) at which a document begins, ascending."""
        found = []
        for document in range(self._first_from(first), self.num_documents):
            if (start := self.start(document)) >= last:
                break
            found.append(start)
        return found

    def _first_from(self, token: int) -> int:
        return bisect_left(range(self.num_documents), token, key=self.start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A token file.

    Attributes:
        path: of the tokens, for messages.
        tokens: integers [num_tokens], read only, mapped from the file.
        end_of_document: token that ends a document; None: unknown.
        documents: of the file's index; None: documents end at `end_of_document`, and where that is
            unknown, too, the file is one document.
        vocab_size: tokens are below it; None: unknown.
        tokenizer: name and CRC-32 of what made the tokens; None: unknown.
        crc32: of the tokens as stored; None: unknown.
    """

    path: Path
    tokens: Tokens
    end_of_document: int | None = None
    documents: DocumentIndex | None = None
    vocab_size: int | None = None
    tokenizer: tuple[str, int] | None = None
    crc32: int | None = None

    def read(self, first: int, tokens: NDArray[np.int64], is_start: NDArray[np.bool_]) -> None:
        """Copy tokens and mark those that begin a document.

        Args:
            first: first token to read.
            tokens: int64 [n], filled with tokens [first, first + n).
            is_start: bool [n], all False; set where a document begins. With `end_of_document` the
                first place is not judged: the token before it is not read.
        """
        tokens[:] = self.tokens[first : first + len(tokens)]
        if self.documents is not None:
            for start in self.documents.within(first, first + len(tokens)):
                is_start[start - first] = True
        elif self.end_of_document is not None:
            np.equal(tokens[:-1], self.end_of_document, out=is_start[1:])

    def fingerprint(self) -> int:
        """CRC-32 of size, dtype, stored checksum, and of the first and last MiB of the tokens."""
        step = _SAMPLE_BYTES // self.tokens.itemsize
        kind = self.tokens.dtype.str
        crc = zlib.crc32(f"{kind} {len(self.tokens)} {self.crc32} {self.end_of_document}".encode())
        for part in (self.tokens[:step], self.tokens[-step:]):
            crc = zlib.crc32(np.ascontiguousarray(part).data, crc)
        return crc

    def verify(self) -> None:
        """Read the whole file and compare it with the stored checksum and the vocabulary.

        Raises:
            DataError: they differ.
        """
        step = 16 * _SAMPLE_BYTES
        crc = 0
        for first in range(0, len(self.tokens), step):
            part = self.tokens[first : first + step]
            crc = zlib.crc32(part.data, crc)
            check_vocabulary(part, self.vocab_size, self.path, first)
        if self.crc32 is not None and crc != self.crc32:
            raise DataError(
                f"{self.path}: damaged: CRC-32 {crc:#010x}, expected {self.crc32:#010x}",
                remedy="copy the file again, or tokenize again",
            )


def check_vocabulary(tokens: Tokens, vocab_size: int | None, path: Path, first: int) -> None:
    """Raise DataError for a token below 0 or from `vocab_size` on.

    Args:
        tokens: of any shape, at least one; in a file, `first` is the number of the first of them.
        vocab_size: None: any token from 0 on is valid.
    """
    limit = vocab_size if vocab_size is not None else np.iinfo(np.int64).max
    if int(tokens.max()) < limit and int(tokens.min()) >= 0:
        return
    place = int(np.flatnonzero((tokens >= limit) | (tokens < 0))[0])
    expected = "from 0 on" if vocab_size is None else f"from 0 to {vocab_size - 1}"
    raise DataError(
        f"{path}: token {first + place} is {tokens[place]}, expected {expected}",
        remedy="the file is damaged, has another dtype or is of another vocabulary",
    )


def map_file(path: Path, dtype: DTypeLike, *, offset: int = 0, count: int | None = None) -> Tokens:
    """Map a file, read only.

    Args:
        path: the file.
        dtype: of its values.
        offset: bytes before the first value.
        count: number of values; None: up to the end of the file, which must be a whole value.

    Raises:
        DataError: the file is empty or its size does not fit.
        HostError: it cannot be read.
    """
    kind = np.dtype(dtype)
    try:
        size = path.stat().st_size - offset
        if count is None and (size <= 0 or size % kind.itemsize):
            raise DataError(
                f"{path}: {size} bytes are not one or more tokens of {kind.name}",
                remedy="the file is empty, truncated or of another dtype",
            )
        wanted = size // kind.itemsize if count is None else count
        if wanted * kind.itemsize > size:
            raise DataError(
                f"{path}: {size} bytes from byte {offset} on, expected {wanted * kind.itemsize}",
                remedy="the file is truncated: copy it again",
            )
        if not wanted:  # a map cannot be empty
            return np.empty(0, kind)
        mapped = np.memmap(path, kind, "r", offset, (wanted,))
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from None
    return np.asarray(mapped)  # slices of a plain array cost less
