"""Inputs of tokenizing: text files, JSON lines and saved datasets, read block by block.

Never more of an input is in memory than a block or one line or record of it.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from pacekeeper.core.errors import ConfigError, DataError, HostError
from pacekeeper.trainer.data.tokenizing.blocks import BLOCK_BYTES, Block, cut_size

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_RECORDS = 1000  # of a dataset, read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input, and how it is divided into documents.

    Attributes:
        path: a file, or the folder of a saved dataset.
        size_bytes: stored; 0 for a pipe.
        field: key or column of the text, in JSON lines and datasets.
        separator: line between the documents of a text file, b"": a blank one; None: the file is
            one document.
    """

    path: Path
    size_bytes: int
    field: str
    separator: bytes | None

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Yield the input's blocks in order, each with the stored bytes that are read so far.

        Raises:
            ConfigError: a dataset has no such column.
            DataError: the input is damaged.
            HostError: it cannot be read.
        """
        if self.path.is_dir():
            yield from self._dataset_blocks()
            return
        with _opened(self.path) as (stream, raw):
            if self.path.name.removesuffix(".gz").endswith(_JSON_SUFFIXES):
                found = self._line_blocks(stream)
            elif self.separator is None:
                found = self._file_blocks(stream)
            else:
                found = self._document_blocks(stream, self.separator)
            for block in found:
                yield block, raw.tell() if raw.seekable() else 0

    def _line_blocks(self, stream: IO[bytes]) -> Iterator[Block]:
        first_line = 1
        while lines := stream.readlines(BLOCK_BYTES):
            yield Block(
                source=str(self.path),
                data=b"".join(lines),
                field=self.field,
                first_line=first_line,
            )
            first_line += len(lines)

    def _file_blocks(self, stream: IO[bytes]) -> Iterator[Block]:
        text = b""
        while part := stream.read(BLOCK_BYTES):
            text += part
            while len(text) > BLOCK_BYTES:
                size = cut_size(text)
                yield self._text_block([text[:size]], is_open=True)
                text = text[size:]
        if text:
            yield self._text_block([text])

    def _document_blocks(self, stream: IO[bytes], separator: bytes) -> Iterator[Block]:
        done: list[bytes] = []  # whole documents
        lines: list[bytes] = []  # of the one that is being read
        done_bytes = text_bytes = 0
        is_cut = False  # pieces of the one that is being read are on their way
        for line in chain(stream, [separator]):
            if line.strip() != separator:
                lines.append(line)
                text_bytes += len(line)
                if text_bytes > BLOCK_BYTES:
                    text = b"".join(lines)
                    while len(text) > BLOCK_BYTES:
                        size = cut_size(text)
                        yield self._text_block([*done, text[:size]], is_open=True)
                        done, done_bytes, is_cut, text = [], 0, True, text[size:]
                    lines, text_bytes = [text], len(text)
                continue
            text = b"".join(lines).rstrip(b"\r\n")
            if text or is_cut:
                done.append(text)
                done_bytes += len(text)
            lines, text_bytes, is_cut = [], 0, False
            if done_bytes >= BLOCK_BYTES:
                yield self._text_block(done)
                done, done_bytes = [], 0
        if done:
            yield self._text_block(done)

    def _text_block(self, pieces: list[bytes], *, is_open: bool = False) -> Block:
        return Block(
            source=str(self.path),
            data=b"".join(pieces),
            piece_sizes=tuple(map(len, pieces)),
            is_open=is_open,
        )

    def _dataset_blocks(self) -> Iterator[tuple[Block, int]]:
        dataset = _load_dataset(self.path)
        if self.field not in dataset.column_names:
            raise ConfigError(
                f"{self.path}: there is no column {self.field!r}, but "
                f"{', '.join(dataset.column_names)}",
                remedy="name the column of the text with --field",
            )
        lines: list[bytes] = []
        for number, text in enumerate(_texts(dataset.select_columns([self.field]), self.field)):
            if not isinstance(text, str):
                raise DataError(
                    f"{self.path}, record {number + 1}: expected a text in {self.field!r}, got "
                    f"{type(text).__name__}",
                    remedy="name the column of the text with --field",
                )
            lines.append(json.dumps({self.field: text}).encode() + b"\n")
            if len(lines) == _RECORDS or len(lines[-1]) > BLOCK_BYTES:
                yield self._records_block(lines, number), self._done_bytes(number, len(dataset))
                lines = []
        if lines:
            yield self._records_block(lines, len(dataset) - 1), self.size_bytes

    def _records_block(self, lines: list[bytes], last: int) -> Block:
        first_line = last - len(lines) + 2  # records count from 1, like lines
        return Block(
            source=str(self.path), data=b"".join(lines), field=self.field, first_line=first_line
        )

    def _done_bytes(self, last: int, num_records: int) -> int:
        return self.size_bytes * (last + 1) // num_records


def find_inputs(
    paths: Sequence[Path], *, field: str = "text", separator: str | None = None
) -> tuple[Input, ...]:
    """Look at inputs before the first one is read.

    Args:
        paths: files, and folders of datasets written by `save_to_disk`.
        field: key or column of the text, in JSON lines and datasets.
        separator: line between documents of text files, "": a blank one; None: a file is one
            document.

    Raises:
        ConfigError: a path is a folder of something else, or of a dataset with several splits.
        HostError: one is missing or cannot be read.
    """
    line = None if separator is None else separator.strip().encode()
    return tuple(
        Input(path=path, size_bytes=_stored_bytes(path), field=field, separator=line)
        for path in paths
    )


def _stored_bytes(path: Path) -> int:
    try:
        if not path.is_dir():
            return path.stat().st_size
        files = [file for file in path.iterdir() if file.is_file()]
        sizes = sum(file.stat().st_size for file in files)
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from None
    names = {file.name for file in files}
    if "dataset_dict.json" in names:
        raise ConfigError(
            f"{path}: a dataset of several splits", remedy="give the folder of one split"
        )
    if not {"state.json", "dataset_info.json"} <= names:
        raise ConfigError(
            f"{path}: a folder, but no dataset that was saved with `save_to_disk`",
            remedy="name the files in it",
        )
    return sizes


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The content of a file, unpacked, and the file itself. Errors while it is read name it."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(IO[bytes], unpacked), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged: {error}", remedy="copy the file again") from None
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from None


def _load_dataset(path: Path) -> Any:
    try:
        import datasets
    except ModuleNotFoundError:
        raise HostError(
            f"{path} is a saved dataset, but the package datasets is not installed here",
            remedy="run `pip install datasets`, or save the text as JSON lines",
        ) from None
    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:  # of pyarrow, json, the file system
        raise DataError(f"{path}: cannot be loaded: {error}") from None


def _texts(dataset: Any, field: str) -> Iterator[object]:
    for first in range(0, len(dataset), _RECORDS):
        yield from dataset[first : first + _RECORDS][field]
