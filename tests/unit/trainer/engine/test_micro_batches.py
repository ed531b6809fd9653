"""Sizes of micro-batches, and what is refused as a batch or a loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.engine.micro_batches import (
    MicroBatch,
    WorkSize,
    check_micro_batch,
    cross_entropy,
    measure,
    require_sum,
)

VOCABULARY = 96


def batch_of(tokens: Tensor, **more: Tensor) -> MicroBatch:
    """A micro-batch of shifted labels; `tokens` are [rows, tokens + 1]."""
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], **more}


def test_documents_begin_where_positions_restart() -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 6))
    positions = torch.tensor([[0, 1, 0, 1, 2], [3, 4, 0, 1, 0]])
    plain = torch.arange(5).expand(2, 5)
    packed, whole, counted = measure(
        [
            batch_of(tokens, position_ids=positions),
            batch_of(tokens),
            batch_of(tokens, position_ids=plain),
        ],
        VOCABULARY,
    )
    assert packed.work == WorkSize(tokens=10, documents=5, sum_len_squared=4 + 9 + 4 + 4 + 1)
    assert whole.work == counted.work == WorkSize(tokens=10, documents=2, sum_len_squared=50)
    assert not packed.has_plain_positions
    assert counted.has_plain_positions


def test_targets_and_foreign_tokens_are_counted() -> None:
    labels = torch.tensor([[1, -100, 2], [-100, VOCABULARY, -7]])
    tokens = torch.tensor([[0, 5, 1], [-1, 3, VOCABULARY]])
    (size,) = measure([{"input_ids": tokens, "labels": labels}], VOCABULARY)
    assert (size.targets, size.foreign) == (4, 4)
    assert measure([], VOCABULARY) == []


@pytest.mark.parametrize("masked", [False, True])
def test_labels_at_their_own_places_are_seen(masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    labels = tokens[:, :-1].clone()
    if masked:
        labels[:, :4] = -100
    shifted = batch_of(tokens)
    unshifted = {"input_ids": tokens[:, :-1], "labels": labels}
    constant = batch_of(torch.full((2, 9), 7))
    assert [s.is_unshifted for s in measure([shifted, unshifted, constant], VOCABULARY)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": None},
        {"labels": torch.zeros(2, 3, dtype=torch.int64)},
        {"labels": torch.zeros(2, 4)},
        {"input_ids": torch.zeros(8, dtype=torch.int64)},
        {"position_ids": torch.zeros(2, 4)},
        {"mask": "none"},
    ],
)
def test_what_is_no_micro_batch_is_refused(change: dict[str, Any]) -> None:
    batch: dict[str, Any] = batch_of(torch.zeros(2, 5, dtype=torch.int64)) | change  # type: ignore[operator]
    batch = {name: value for name, value in batch.items() if value is not None}
    with pytest.raises(ConfigError):
        check_micro_batch(batch)


def test_a_loss_must_be_a_sum() -> None:
    logits = torch.randn(3, 4, VOCABULARY)
    batch = batch_of(torch.randint(0, VOCABULARY, (3, 5)))

    def mean(logits: Tensor, batch: MicroBatch) -> Tensor:
        return cross_entropy(logits, batch) / batch["labels"].numel()

    def weighted(logits: Tensor, batch: MicroBatch) -> Tensor:
        return cross_entropy(logits, batch) + 0.1 * logits.square().sum()

    for loss in (cross_entropy, weighted):
        require_sum(loss, logits, batch, loss(logits, batch).item())
    with pytest.raises(ConfigError):
        require_sum(mean, logits, batch, mean(logits, batch).item())
