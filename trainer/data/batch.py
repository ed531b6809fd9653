"""Rows of a step as the tensors that a causal language model takes."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TARGET = -100  # as torch's and transformers' cross entropy ignore it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows of T tokens.

    Attributes:
        input_ids: int64 [rows, T].
        labels: int64 [rows, T]; the token to predict at each place, NO_TARGET: none. They are
            shifted already: the label of a place is the token after it. transformers takes them as
            `shift_labels`; its `labels` would be shifted once more.
        position_ids: int64 [rows, T]; 0, 1, .. from the first token of each document on. Given
            these and no attention mask, attention of transformers stays within documents.
        document_lengths: tokens of each document in each row; each row's add up to T.
        num_targets_of_row: places of each row that have a target.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_lengths: tuple[tuple[int, ...], ...]
    num_targets_of_row: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of this batch, 0 or more."""
        return self.input_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Input tokens."""
        return self.input_ids.numel()

    @property
    def num_targets(self) -> int:
        """Places that have a target; sums of losses are divided by this number of all ranks."""
        return sum(self.num_targets_of_row)

    @property
    def num_documents(self) -> int:
        """Documents, each counted in every row that it reaches into."""
        return sum(map(len, self.document_lengths))

    @property
    def sum_len_squared(self) -> int:
        """Sum over documents of squared length, tokens^2: attention work."""
        return sum(length * length for row in self.document_lengths for length in row)

    def to(self, device: torch.device) -> "Batch":
        """The same rows on a device; copies from pinned memory do not wait."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as `Engine.step` takes a micro-batch."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
        }

    def split(self, number: int) -> tuple["Batch", ...]:
        """Divide into micro-batches of equal size, which share the memory of this batch.

        Args:
            number: micro-batches; fewer where there are fewer rows.

        Returns:
            The micro-batches in order, equal to within a row; none of a batch without rows.
        """
        number = min(number, self.num_rows)
        ends = [self.num_rows * (at + 1) // number for at in range(number)]
        parts = map(slice, [0, *ends[:-1]], ends)
        return tuple(
            Batch(
                input_ids=self.input_ids[part],
                labels=self.labels[part],
                position_ids=self.position_ids[part],
                document_lengths=self.document_lengths[part],
                num_targets_of_row=self.num_targets_of_row[part],
            )
            for part in parts
        )


def make_batch(
    tokens: NDArray[np.int64],
    is_start: NDArray[np.bool_],
    *,
    separate_documents: bool = True,
    predict_across_documents: bool = False,
) -> Batch:
    """Make a batch of rows that the stream has read.

    Args:
        tokens: int64 [rows, T + 1].
        is_start: bool [rows, T + 1]; whether a document begins at the token.
        separate_documents: attention stays within documents and positions restart with each.
            False: a row is one sequence, as in nanoGPT and by default in Megatron-LM.
        predict_across_documents: a document's last place has the next document's first token as
            its target.
    """
    num_rows, width = tokens.shape
    length = width - 1
    labels = tokens[:, 1:].copy()
    if not predict_across_documents:
        labels[is_start[:, 1:]] = NO_TARGET
    begins = np.zeros((num_rows, length), np.bool_)
    if separate_documents:
        begins |= is_start[:, :length]
    begins[:, :1] = True
    places = np.arange(length)
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return Batch(
        input_ids=torch.from_numpy(tokens[:, :length].copy()),
        labels=torch.from_numpy(labels),
        position_ids=torch.from_numpy(positions),
        document_lengths=tuple(
            tuple(np.diff(np.flatnonzero(row), append=length).tolist()) for row in begins
        ),
        num_targets_of_row=tuple(np.count_nonzero(labels != NO_TARGET, axis=1).tolist()),
    )
