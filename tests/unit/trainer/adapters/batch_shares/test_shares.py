"""Weights of losses, what a batch's tokens are, and settings that cannot work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Capability
from pacekeeper.trainer.adapters import reporter
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule
from pacekeeper.trainer.adapters.batch_shares.gradient_sync import gradient_sync
from pacekeeper.trainer.adapters.batch_shares.shares import tokens_in


def made(tmp_path: Path, told: list[tuple[int, ...]] | None = None) -> BatchShares:
    """Shares of a rank beside another one that says what `told` has, or the same."""
    pace = reporter.attach(
        job="j", device=torch.device("cpu"), rank=0, world_size=1, ring_dir=str(tmp_path),
        micro_batches_per_step=2,
    )  # fmt: skip
    schedule = ShareSchedule(rank=0, num_ranks=1, micro_batches_per_step=2)
    others = iter(told) if told else None
    return BatchShares(
        pace,
        nn.Linear(1, 1),
        schedule,
        gather=lambda own: [tuple(own)] if others is None else [tuple(own), next(others)],
    )


def test_the_attachment_opts_in_to_micro_batches_only(tmp_path: Path) -> None:
    shares = made(tmp_path)
    path = shares._session._hooks.ring.path
    assert path is not None
    attachment = shm_ring.decode_header(path.read_bytes()[: shm_ring.SLOTS_OFFSET])
    assert attachment.capabilities == {Capability.MICROBATCH_COUNTS}
    assert attachment.model is not None and attachment.model.rows_per_step == 2
    watched = reporter.attach(
        job="w", device=torch.device("cpu"), rank=0, world_size=1, ring_dir=str(tmp_path)
    )
    assert watched.ring.path is not None
    header = watched.ring.path.read_bytes()[: shm_ring.SLOTS_OFFSET]
    assert shm_ring.decode_header(header).capabilities == frozenset()
    assert b"plan_kinds" not in header  # agents from before this field read it, too


def test_a_loss_counts_by_its_part_of_all_tokens(tmp_path: Path) -> None:
    # The other rank has 5 of 8 tokens; first both compare settings.
    shares = made(tmp_path, [(0, 2), (0, 5, 1, 0, 0)])
    batches = [torch.zeros(1), torch.zeros(2)]
    scaled = [float(shares.scale(torch.tensor(1.0))) for _ in shares.micro_batches(batches)]
    assert scaled == [1 / 8, 2 / 8]  # times ranks, which is 1 here
    assert shares.step == 1


def test_a_mean_over_nothing_is_no_number_and_counts_nothing(tmp_path: Path) -> None:
    shares = made(tmp_path, [(0, 2), (0, 3, 1, 0, 0)])
    weight = torch.ones(2, requires_grad=True)
    for batch in shares.micro_batches([torch.zeros(0), torch.zeros(0)]):
        shares.backward((weight.sum() * batch).mean())
    assert weight.grad is not None and weight.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("own", "told", "message"),
    [
        ([torch.zeros(1)], [(0, 2)], "1 micro-batches, this rank's share is 2"),
        ([torch.zeros(1)] * 2, [(0, 2), (1, 9, 2, 0, 0)], r"ranks are at steps \[0, 1\]"),
    ],
)
def test_ranks_that_train_something_else_end(
    tmp_path: Path, own: list[Any], told: list[tuple[int, ...]], message: str
) -> None:
    shares = made(tmp_path, told)
    with pytest.raises(ConfigError, match=message):
        list(shares.micro_batches(own))


def test_other_settings_on_another_rank(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins at step 0 with 2"):
        made(tmp_path, [(4, 2)])


def test_ranks_whose_gradients_nothing_averages() -> None:
    with pytest.raises(ConfigError, match="gradients of 2 ranks are not averaged"):
        gradient_sync(nn.Linear(1, 1), 2)


def test_tokens_of_a_batch() -> None:
    ids = torch.zeros(2, 3)
    labels = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert tokens_in({"input_ids": ids, "labels": labels}) == 3
    assert tokens_in({"input_ids": ids}) == tokens_in(ids) == 6
    with pytest.raises(ConfigError, match="a tuple"):
        tokens_in((ids, labels))
