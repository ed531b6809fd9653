"""Losses that add up over rows, so that no layout changes them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

IGNORED = -100
"""Label of a position that is no target, as in PyTorch and transformers."""

MicroBatch = Mapping[str, Tensor]
"""`input_ids` and `labels` [rows, tokens], and what else the model takes.

`labels[r, t]` is the token that follows `input_ids[r, t]`, or `IGNORED`: they are shifted already.
"""

Loss = Callable[[Tensor, MicroBatch], Tensor]
"""Computes the sum of a micro-batch's losses over its targets from the logits [rows, tokens, V].

The engine divides by the number of targets of the global batch.
"""


def cross_entropy(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of the targets' negative log-likelihoods, in nats."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        wide.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )


def num_targets(batch: MicroBatch) -> int:
    """Return the number of labels that are not `IGNORED`."""
    return int((batch["labels"] != IGNORED).sum())


def num_foreign_tokens(batch: MicroBatch, vocabulary_size: int) -> int:
    """Return how many tokens and labels are outside the vocabulary."""
    tokens, labels = batch["input_ids"], batch["labels"]
    outside = (tokens < 0) | (tokens >= vocabulary_size)
    wrong = (labels != IGNORED) & ((labels < 0) | (labels >= vocabulary_size))
    return int(outside.sum() + wrong.sum())
