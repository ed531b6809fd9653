"""Losses that add up over rows, so that no layout changes them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.data.batch import NO_TARGET

_INDICES = ("input_ids", "labels", "position_ids")

MicroBatch = Mapping[str, Tensor]
"""`input_ids` and `labels` [rows, tokens], and what else the model takes.

`labels[r, t]` is the token that follows `input_ids[r, t]`, or `NO_TARGET`: labels are shifted.
"""

Loss = Callable[[Tensor, MicroBatch], Tensor]
"""Computes the sum of a micro-batch's losses over its targets from the logits [rows, tokens, V].

The engine divides by the number of targets of the global batch.
"""


def cross_entropy(logits: Tensor, batch: MicroBatch) -> Tensor:
    """Return the sum of the targets' negative log-likelihoods, in nats."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        wide.flatten(0, -2), batch["labels"].flatten(), ignore_index=NO_TARGET, reduction="sum"
    )


def check_micro_batch(batch: MicroBatch) -> None:
    """Reject what is no micro-batch.

    Raises:
        ConfigError: A tensor is missing, or has another shape or type.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        raise ConfigError(
            "a micro-batch has no input_ids [rows, tokens] with at least one of each",
            remedy="give step() a list of mappings; leave out micro-batches without rows",
        )
    for name, tensor in batch.items():
        is_tensor = isinstance(tensor, Tensor)
        is_alike = is_tensor and (name != "labels" or tensor.shape == tokens.shape)
        is_whole = is_alike and (name not in _INDICES or tensor.dtype == torch.int64)
        if not is_whole or "labels" not in batch:
            raise ConfigError(
                f"{name} of a micro-batch: expected a tensor like input_ids "
                f"{tuple(tokens.shape)} int64, and labels",
                remedy="labels[r, t] is the token after input_ids[r, t], or -100",
            )


def without_plain_positions(batch: MicroBatch) -> MicroBatch:
    """Leave out `position_ids` that count each row from 0 without a restart: models count so."""
    positions = batch.get("position_ids")
    if positions is None or not torch.equal(
        positions, torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    ):
        return batch
    return {name: tensor for name, tensor in batch.items() if name != "position_ids"}


def num_targets(batch: MicroBatch) -> int:
    """Return the number of labels that are not `NO_TARGET`."""
    return int((batch["labels"] != NO_TARGET).sum())


def num_foreign_tokens(batch: MicroBatch, vocabulary_size: int) -> int:
    """Return how many tokens and labels are outside the vocabulary."""
    tokens, labels = batch["input_ids"], batch["labels"]
    outside = (tokens < 0) | (tokens >= vocabulary_size)
    wrong = (labels != NO_TARGET) & ((labels < 0) | (labels >= vocabulary_size))
    return int(outside.sum() + wrong.sum())
