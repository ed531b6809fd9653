"""Opens text files of others, plain or gzipped; what is cut off or unpacks to too much is said."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pacekeeper.core.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
MAX_BYTES = 1 << 30  # unpacked, of a file that is read as a whole: a bound on memory
MAX_LINE_BYTES = 1 << 24
_CHUNK_BYTES = 1 << 20
_BROKEN = (OSError, EOFError, zlib.error)


def head_of(path: Path, num_bytes: int) -> bytes:
    """The first bytes, unpacked; as many as can be had. Raises DataError where there are none to be
    read at all.
    """
    with _opened(path) as file:
        head = b""
        try:
            while len(head) < num_bytes and (more := file.read(min(1 << 12, num_bytes))):
                head += more
        except _BROKEN as error:
            if not head:
                raise DataError(f"{path}: {_words(error)}") from None
    return head[:num_bytes]


def lines_of(path: Path, notes: list[str]) -> Iterator[str]:
    """Its lines in UTF-8, what is no UTF-8 replaced; where it is cut off, a note tells.

    Raises DataError where not even one line can be read.
    """
    number = 0
    with _opened(path) as file:
        try:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                yield line.decode("utf-8", errors="replace").rstrip("\r\n")
        except _BROKEN as error:
            if not number:
                raise DataError(f"{path}: {_words(error)}") from None
            notes.append(f"{path.name}: cut off after line {number} ({_words(error)})")


def text_of(path: Path, notes: list[str]) -> str:
    """All of it, at most MAX_BYTES; where it is cut off, a note tells.

    Raises DataError where it is larger, or where nothing can be read.
    """
    parts: list[bytes] = []
    size = 0
    with _opened(path) as file:
        try:
            while part := file.read(_CHUNK_BYTES):
                parts.append(part)
                size += len(part)
                if size > MAX_BYTES:
                    raise DataError(
                        f"{path}: unpacks to more than {MAX_BYTES >> 20} MiB",
                        remedy="record fewer steps per file",
                    )
        except _BROKEN as error:
            if not parts:
                raise DataError(f"{path}: {_words(error)}") from None
            notes.append(f"{path.name}: cut off after {size} bytes ({_words(error)})")
    return b"".join(parts).decode("utf-8", errors="replace")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {_words(error)}") from None
    with file:
        try:
            magic = file.read(len(GZIP_MAGIC))
            file.seek(0)
        except OSError as error:
            raise DataError(f"{path}: {_words(error)}") from None
        if magic != GZIP_MAGIC:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked  # type: ignore[misc]


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
