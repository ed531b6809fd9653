"""Rows of a step as the tensors that a causal language model takes."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NO_TARGET = -100  # as torch's and transformers' cross entropy ignore it


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of T tokens.

    Attributes:
        input_ids: int64 [rows, T].
        labels: int64 [rows, T]; the token to predict at each place, NO_TARGET: none. They are
            shifted already: the label of a place is the token after it. transformers takes them as
            `shift_labels`; its `labels` would be shifted once more.
        position_ids: int64 [rows, T]; 0, 1, .. from the first token of each document on. Given
            these and no attention mask, attention of transformers stays within documents.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as `Engine.step` takes a micro-batch."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
        }


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
        torch.from_numpy(tokens[:, :length].copy()),
        torch.from_numpy(labels),
        torch.from_numpy(positions),
    )
