"""Rows of the global batch as a function of (seed, step, place) alone.

Row number `step * rows_per_step + place` is counted through epochs; each epoch is a permutation of
all rows of the stream. The layout decides only who reads which places, so it changes no batch, and
to resume the sampler needs the step and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.data.batch import Batch, make_batch
from pacekeeper.trainer.data.permutation import Permutation
from pacekeeper.trainer.data.token_stream import TokenStream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampler:
    """Rows of `row_tokens` tokens and their targets.

    Row r of the stream has the tokens [r T, r T + T + 1): it shares its last token, a target only,
    with the row after it.

    Attributes:
        stream: tokens, at least `row_tokens` + 1.
        row_tokens: T, input tokens of a row.
        rows_per_step: rows of the global batch.
        seed: of the order.
        is_shuffled: False: rows in the order of the stream, for evaluation.
        separate_documents: see `batch.make_batch`.
        predict_across_documents: see `batch.make_batch`.
    """

    stream: TokenStream
    row_tokens: int
    rows_per_step: int
    seed: int = 0
    is_shuffled: bool = True
    separate_documents: bool = True
    predict_across_documents: bool = False

    def __post_init__(self) -> None:
        if self.row_tokens < 1 or self.rows_per_step < 1:
            raise ConfigError(
                f"rows of {self.row_tokens} tokens, {self.rows_per_step} per step: expected "
                "at least 1 of each"
            )
        if self.num_rows < 1:
            names = ", ".join(str(shard.path) for shard in self.stream.shards)
            raise DataError(
                f"{names}: {self.stream.num_tokens} tokens do not fill one row of "
                f"{self.row_tokens} tokens and its last target",
                remedy="add text or make rows shorter",
            )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return (self.stream.num_tokens - 1) // self.row_tokens

    def num_first_places(self, step: int) -> int:
        """Places of `step` that belong to the first epoch: those of one pass for evaluation."""
        return min(max(self.num_rows - step * self.rows_per_step, 0), self.rows_per_step)

    def row_numbers(self, step: int, places: Sequence[int]) -> NDArray[np.int64]:
        """Return which row of the stream each place of a step has.

        Args:
            step: from 0 on.
            places: of the global batch, from 0 to `rows_per_step` - 1.

        Returns:
            int64 [places], from 0 to `num_rows` - 1.
        """
        wanted = np.asarray(places, dtype=np.int64)
        if step < 0 or (wanted < 0).any() or (wanted >= self.rows_per_step).any():
            raise ValueError(f"no places {list(places)} in step {step}")
        epochs, rows = np.divmod(step * self.rows_per_step + wanted, self.num_rows)
        if self.is_shuffled:
            for epoch in np.unique(epochs).tolist():
                own = epochs == epoch
                rows[own] = Permutation(self.num_rows, self.seed, epoch)(rows[own])
        return rows

    def batch(self, step: int, places: Sequence[int]) -> Batch:
        """Read places of a step, in the given order; none: an empty batch.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        starts = self.row_numbers(step, places) * self.row_tokens
        tokens, is_start = self.stream.read(starts, self.row_tokens + 1)
        return make_batch(
            tokens,
            is_start,
            separate_documents=self.separate_documents,
            predict_across_documents=self.predict_across_documents,
        )
