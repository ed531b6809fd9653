"""Real text of strongly varying document length: the source of the Python that runs this.

A document is one paragraph of a standard-library module (lines between blank lines), as bytes: from
a dozen to thousands of them. Documents are packed into rows of a fixed token budget. The row of
(step, index) is a function of the seed alone: who computes it, and when, changes nothing.
"""

import math
import os
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.core.config.train import MIN_DOCUMENT_TOKENS, TrainConfig
from pacekeeper.core.errors import ConfigError, HostError
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.distributed.collectives import Collectives, end_together

MAX_CORPUS_BYTES = 2_000_000
NO_TARGET = -1
MAX_OPEN_ROWS = 16
_BLANK_LINES = re.compile(rb"\n[ \t]*\n+")
_SKIPPED = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "__pycache__",
    "turtledemo",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of packed documents.

    tokens, targets, documents, positions: int64 [rows, row_tokens]. `targets` is NO_TARGET at each
    document's last token and on padding; `documents` numbers the documents within a row (padding:
    -1); `positions` counts from 0 in each document.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor
    positions: Tensor
    num_tokens: int
    sum_len_squared: int
    num_documents: int

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "Batch":
        """The same rows on that device."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=self.targets.to(device),
            documents=self.documents.to(device),
            positions=self.positions.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Packed rows: each a tuple of documents whose lengths add up to `row_tokens` at most."""

    rows: tuple[tuple[bytes, ...], ...]
    row_tokens: int
    rows_per_step: int
    seed: int

    @classmethod
    def from_stdlib(cls, config: TrainConfig) -> "Corpus":
        """The standard library's source, shuffled by the seed, packed, shuffled again.

        Raises HostError where this Python came without its source, or it can not be read.
        """
        root = sysconfig.get_path("stdlib")
        return cls(
            rows=_stdlib_rows(root, config.row_tokens, config.seed),
            row_tokens=config.row_tokens,
            rows_per_step=config.rows_per_step,
            seed=config.seed,
        )

    def crc(self) -> int:
        """A name of the text and its packing: what a step is made of, given seed and batch."""
        return _crc(self.rows)

    def row(self, step: int, index: int) -> tuple[bytes, ...]:
        """The documents of row `index` of the global batch of `step`."""
        number = step * self.rows_per_step + index
        epoch, place = divmod(number, len(self.rows))
        if epoch == 0:
            return self.rows[place]
        # Another order each epoch, without keeping one: an affine walk over all rows.
        size = len(self.rows)
        stride = random.Random(f"{self.seed}/{epoch}").randrange(1, max(size, 2))
        while math.gcd(stride, size) != 1:
            stride = stride % (size - 1) + 1
        return self.rows[(place * stride + epoch) % size]

    def target_tokens(self, step: int) -> int:
        """Tokens of the step's global batch that have a target; needs no communication."""
        return sum(
            len(document) - 1
            for index in range(self.rows_per_step)
            for document in self.row(step, index)
        )

    def num_tokens(self, step: int) -> int:
        """Tokens of the step's global batch."""
        return sum(
            len(document)
            for index in range(self.rows_per_step)
            for document in self.row(step, index)
        )

    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """The given rows of the global batch of `step`, in that order (none: an empty batch)."""
        shape = (len(indices), self.row_tokens)
        tokens = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, NO_TARGET, dtype=torch.int64)
        documents = torch.full(shape, -1, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        num_tokens = sum_len_squared = num_documents = 0
        for i, index in enumerate(indices):
            at = 0
            for number, document in enumerate(self.row(step, index)):
                length = len(document)
                values = torch.frombuffer(bytearray(document), dtype=torch.uint8).long()
                tokens[i, at : at + length] = values
                targets[i, at : at + length - 1] = values[1:]
                documents[i, at : at + length] = number
                positions[i, at : at + length] = torch.arange(length)
                at += length
                num_tokens += length
                sum_len_squared += length * length
                num_documents += 1
        return Batch(
            tokens=tokens,
            targets=targets,
            documents=documents,
            positions=positions,
            num_tokens=num_tokens,
            sum_len_squared=sum_len_squared,
            num_documents=num_documents,
        )


@lru_cache(maxsize=4)
def _stdlib_rows(root: str, row_tokens: int, seed: int) -> tuple[tuple[bytes, ...], ...]:
    """Rows of `row_tokens` from the source below `root`; read and packed once per process."""
    documents = [
        piece
        for document in _stdlib_documents(root)
        for piece in _cut(document, row_tokens)
        if len(piece) >= MIN_DOCUMENT_TOKENS
    ]
    if not documents:
        raise HostError(
            f"no Python source below {root} to train on",
            remedy="use a Python whose standard library is not zipped",
        )
    order = random.Random(seed)
    order.shuffle(documents)
    rows = list(_pack(documents, row_tokens))
    order.shuffle(rows)  # packing closes rows of one long document early
    return tuple(rows)


@lru_cache(maxsize=4)
def _crc(rows: tuple[tuple[bytes, ...], ...]) -> int:
    crc = 0
    for row in rows:
        crc = zlib.crc32(b"\0".join(row), crc)
    return crc


def _stdlib_documents(root: str) -> Iterator[bytes]:
    """Paragraphs of the standard library's modules, files in a fixed order."""
    modules = []
    for folder, inner, names in os.walk(root):
        # Pruned before they are walked: site-packages may be larger than all the rest.
        inner[:] = set(inner) - _SKIPPED
        modules += [Path(folder, name) for name in names if name.endswith(".py")]
    taken = 0
    for path in sorted(modules):
        try:
            source = path.read_bytes()
        except OSError as error:  # left out, this rank's text would be another one
            raise HostError(
                f"can not read {path}, which is trained on: {error.strerror}",
                remedy="use a Python whose standard library this user can read",
            ) from None
        yield from split_paragraphs(source)
        taken += len(source)
        if taken > MAX_CORPUS_BYTES:
            return


def split_paragraphs(source: bytes) -> list[bytes]:
    """The pieces between blank lines; indentation by four spaces becomes one tab each."""
    return [
        paragraph.replace(b"    ", b"\t")
        for paragraph in _BLANK_LINES.split(source.strip())
        if paragraph
    ]


def _cut(document: bytes, limit: int) -> Iterator[bytes]:
    for start in range(0, len(document), limit):
        yield document[start : start + limit]


def _pack(documents: Sequence[bytes], row_tokens: int) -> tuple[tuple[bytes, ...], ...]:
    """First-fit over a few open rows: the fullest is closed when there are too many."""
    rows: list[tuple[bytes, ...]] = []
    open_rows: list[list[bytes]] = []
    room: list[int] = []
    for document in documents:
        length = len(document)
        for i, free in enumerate(room):
            if length <= free:
                open_rows[i].append(document)
                room[i] -= length
                break
        else:
            open_rows.append([document])
            room.append(row_tokens - length)
        if len(room) > MAX_OPEN_ROWS:
            fullest = room.index(min(room))
            rows.append(tuple(open_rows.pop(fullest)))
            room.pop(fullest)
    rows.extend(tuple(row) for row in open_rows)
    return tuple(rows)


def check(crc: int, fabric: Collectives) -> None:
    """Compare the checksums of all ranks' texts. Raises ConfigError on all ranks, PeerLost."""
    told = fabric.exchange([float(crc)])[:, 0].tolist()
    others = [rank for rank, one in zip(fabric.ranks, told, strict=True) if one != told[0]]
    if not others:
        return
    end_together(fabric)
    raise ConfigError(
        f"ranks {format_ranks(others)} would train on another text than rank {fabric.ranks[0]}: "
        "the standard library of their Python is not the same",
        remedy="use the same build of Python on all nodes",
    )
