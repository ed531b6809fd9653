"""Recorded document lengths as the workload of a simulated job: what packers make of them.

Documents are drawn from those recorded until a micro-batch is full; the one that fills it is cut. A
long one makes attention dearer than many short ones of as many tokens together: what a micro-batch
takes differs although nobody is slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pacekeeper.core.config.loader import read_table
from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.simulator.io import tables

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

MOST_TOKENS = 10**9  # of a document or a micro-batch: their product is still a number of 64 bits
MOST_PIECES = 20_000_000  # of all documents: what is more would not fit into memory
MOST_DOCUMENTS = 100_000  # of a mean micro-batch
MEAN_OF = 512  # micro-batches whose price is the mean one


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthsTable:
    """[lengths]: a column of a table of documents or prompts; `doubling_tokens`: of `Lengths`."""

    file: str
    column: str
    doubling_tokens: float

    def __post_init__(self) -> None:
        if not self.file or "\0" in self.file:
            raise ValueError(f"file: expected a path, got {self.file!r}")
        if not 1.0 <= self.doubling_tokens < inf:
            raise ValueError(f"doubling_tokens: expected at least 1, got {self.doubling_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Of each micro-batch: tokens, sum of squared document lengths, documents."""

    tokens: Counts
    sum_len_squared: Counts
    num_documents: Counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """tokens [documents], each at least 1. `doubling_tokens`: a document of so many tokens takes
    twice as long for each of them as a short one, since attention takes its square.
    """

    tokens: Counts
    doubling_tokens: float

    def split(self, sequence_tokens: int) -> "Lengths":
        """Of the pieces that fit into sequences of so many tokens."""
        whole, rest = np.divmod(self.tokens, sequence_tokens)
        pieces = np.concatenate([np.full(int(whole.sum()), sequence_tokens), rest[rest > 0]])
        return replace(self, tokens=pieces)

    def packed(self, budgets_tokens: Sequence[int], draw: np.random.Generator) -> Packed:
        """Micro-batches of these sizes, full; an empty one has no documents."""
        squares, documents = [], []
        mean = float(self.tokens.mean())
        for budget in budgets_tokens:
            taken = np.empty(0, dtype=np.int64)
            while (room := budget - int(taken.sum())) > 0:
                more = draw.choice(self.tokens, size=int(room / mean) + 1)
                taken = np.concatenate([taken, more])
            cut = np.diff(np.minimum(np.cumsum(taken), budget), prepend=0)
            cut = cut[cut > 0]
            squares.append(int((cut * cut).sum()))
            documents.append(len(cut))
        return Packed(
            tokens=np.array(budgets_tokens, dtype=np.int64),
            sum_len_squared=np.array(squares, dtype=np.int64),
            num_documents=np.array(documents, dtype=np.int64),
        )

    def price(self, packed: Packed, mean_tokens: int) -> Array:
        """What a token of each micro-batch takes, 1.0 in a mean one of `mean_tokens`."""
        return _price(self, packed) / _mean_price(self, mean_tokens)

    def quadratic_share(self, mean_tokens: int) -> float:
        """The part of a mean micro-batch's time that goes into squares."""
        return 1.0 - 1.0 / _mean_price(self, mean_tokens)


@lru_cache(maxsize=16)
def _mean_price(lengths: Lengths, mean_tokens: int) -> float:
    mean = lengths.packed([mean_tokens] * MEAN_OF, np.random.default_rng(0))
    return float(_price(lengths, mean).mean())


def _price(lengths: Lengths, packed: Packed) -> Array:
    """Of a token, over one of documents without length."""
    each = packed.sum_len_squared / np.maximum(packed.tokens, 1)
    priced: Array = 1.0 + each / lengths.doubling_tokens
    return priced


def read_lengths(
    values: dict[str, Any], path: Path, *, sequence_tokens: int, batch_tokens: int
) -> Lengths | None:
    """[lengths] of the scenario at `path`, cut into sequences, to fill batches of so many tokens.

    None where it says nothing. Raises ConfigError that names file, key and what was expected,
    DataError for a file without such lengths.
    """
    if not values:
        return None
    where = f"{path}: [lengths]"
    asked = read_table(LengthsTable, values, where=where)
    file = path.parent / asked.file
    table = tables.read_table(file)
    if asked.column not in table:
        numbers = ", ".join(sorted(table.columns)) or "none"
        raise ConfigError(f"{where} column: {file} has no {asked.column!r}; it has {numbers}")
    told = table.numbers(asked.column)
    told = told[told != 0.0]  # an empty document is none
    if not len(told):
        raise DataError(f"{file}: column {asked.column} has no document of any length")
    wrong = ~(np.isfinite(told) & (told >= 1.0) & (told <= MOST_TOKENS) & (told == np.rint(told)))
    if wrong.any():
        raise DataError(
            f"{file}: column {asked.column}: {int(wrong.sum())} of {len(told)} are no whole number "
            f"of tokens, the first {told[wrong][0]}",
            remedy="name the column that counts tokens, or mend it",
        )
    num_pieces = np.ceil(told / sequence_tokens).sum()
    documents = batch_tokens / (told.sum() / num_pieces)
    for name, value, most in (
        ("pieces of a sequence", num_pieces, MOST_PIECES),
        ("tokens of a micro-batch", batch_tokens, MOST_TOKENS),
        ("documents of a micro-batch", documents, MOST_DOCUMENTS),
    ):
        if value > most:
            raise ConfigError(f"{where} file: {name}: {value:.3g}, expected at most {most:,}")
    lengths = Lengths(tokens=told.astype(np.int64), doubling_tokens=asked.doubling_tokens)
    return lengths.split(sequence_tokens)
