"""Micro-batches: what they must be, their sizes, and losses that add up over their rows.

Sizes of all micro-batches of a step are read from the device at once. A loss is a sum over
targets, so that no layout changes it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.data.batch import NO_TARGET

_INDICES = ("input_ids", "labels", "position_ids")
_SUM_TOLERANCE = 1e-2  # of a loss in bfloat16; a mean over two parts is wrong by a factor

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


def require_sum(loss: Loss, logits: Tensor, batch: MicroBatch, value: float) -> None:
    """Reject a loss that does not add up over rows, as a mean does not.

    Args:
        loss: Of the user.
        logits: [rows, tokens, V]; nothing can be seen in a single row.
        batch: The micro-batch.
        value: `loss` of all rows.

    Raises:
        ConfigError: The losses of the first row and of the others do not add up to `value`.
    """
    num_rows = len(logits)
    if num_rows < 2:
        return
    parts = 0.0
    with torch.no_grad():
        for rows in (slice(1), slice(1, None)):
            part = {n: t[rows] if len(t) == num_rows else t for n, t in batch.items()}
            parts += loss(logits.detach()[rows], part).item()
    if abs(parts - value) > _SUM_TOLERANCE * max(abs(parts), abs(value)):
        raise ConfigError(
            f"the loss of {num_rows} rows is {value:.6g}, but the losses of the first row and of "
            f"the others add up to {parts:.6g}",
            remedy="return the sum over targets, not the mean: the engine divides by the targets "
            "of the global batch",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSize:
    """What a micro-batch, or several, cost by size: tokens, documents, sum of squared lengths."""

    tokens: int = 0
    documents: int = 0
    sum_len_squared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSize:
    """What is counted in one micro-batch.

    Attributes:
        work: Its cost; a row is one document unless `position_ids` restart.
        targets: Labels that are not `NO_TARGET`.
        foreign: Tokens and labels outside the vocabulary.
        has_plain_positions: `position_ids` count each row from 0, as a model does without them.
        is_unshifted: Each label is the token at its own place.
    """

    work: WorkSize
    targets: int
    foreign: int
    has_plain_positions: bool
    is_unshifted: bool


def measure(batches: Sequence[MicroBatch], vocabulary_size: int) -> list[MicroBatchSize]:
    """Count in micro-batches that `check_micro_batch` accepts; waits for their device once."""
    if not batches:
        return []
    device = batches[0]["input_ids"].device
    counted = [_counts(batch, vocabulary_size).to(device) for batch in batches]
    return [
        MicroBatchSize(
            work=WorkSize(
                tokens=batch["input_ids"].numel(), documents=documents, sum_len_squared=squared
            ),
            targets=targets,
            foreign=foreign,
            has_plain_positions=bool(is_plain),
            is_unshifted=bool(is_unshifted),
        )
        for batch, (targets, documents, squared, foreign, is_plain, is_unshifted) in zip(
            batches, torch.stack(counted).tolist(), strict=True
        )
    ]


def _counts(batch: MicroBatch, vocabulary_size: int) -> Tensor:
    """Return targets, documents, squares, foreign tokens, plain positions, unshifted labels [6]."""
    tokens, labels = batch["input_ids"], batch["labels"]
    rows, length = tokens.shape
    is_target = labels != NO_TARGET
    outside = (tokens < 0) | (tokens >= vocabulary_size)
    wrong = is_target & ((labels < 0) | (labels >= vocabulary_size))
    # Where the next token is another one, a shifted label is never the token of its own place.
    telling = is_target[:, :-1] & (tokens[:, 1:] != tokens[:, :-1])
    is_own = labels[:, :-1] == tokens[:, :-1]
    is_unshifted = telling.any() & (is_own | ~telling).all()
    documents, squared = tokens.new_tensor(rows), tokens.new_tensor(rows * length**2)
    is_plain = is_unshifted.new_zeros(())
    if "position_ids" in batch:
        positions = batch["position_ids"]
        place = torch.arange(length, device=tokens.device)
        starts = (positions == 0) | (place == 0)
        begins = torch.where(starts, place, 0).cummax(1).values
        # The first n odd numbers add up to n squared.
        documents, squared = starts.sum(), (2 * (place - begins) + 1).sum()
        is_plain = (positions == place).all()
    foreign = outside.sum() + wrong.sum()
    return torch.stack(
        [is_target.sum(), documents, squared, foreign, is_plain.long(), is_unshifted.long()]
    )


def check_micro_batch(batch: MicroBatch) -> None:
    """Reject what is no micro-batch.

    Raises:
        ConfigError: A tensor is missing, or has another shape, type or device.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel():
        raise ConfigError(
            "a micro-batch has no input_ids [rows, tokens] with at least one of each",
            remedy="give step() a list of mappings; leave out micro-batches without rows",
        )
    for name, tensor in batch.items():
        is_tensor = isinstance(tensor, Tensor) and tensor.device == tokens.device
        is_alike = is_tensor and (name != "labels" or tensor.shape == tokens.shape)
        is_valid = is_alike and (name not in _INDICES or tensor.dtype == torch.int64)
        if not is_valid or "labels" not in batch:
            raise ConfigError(
                f"{name} of a micro-batch: expected a tensor like input_ids "
                f"{tuple(tokens.shape)} int64 on {tokens.device}, and labels",
                remedy="labels[r, t] is the token after input_ids[r, t], or -100",
            )


def on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Return the micro-batch on a device; the host does not wait for the copies."""
    if device.type != "cuda" or batch["input_ids"].device.type != "cpu":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {n: t.pin_memory().to(device, non_blocking=True) for n, t in batch.items()}
