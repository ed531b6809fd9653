"""The global batch is dealt in whole micro-batches: each row once, whoever runs it."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.trainer.adapters.batch_shares.dealing import (
    ShareSchedule,
    StepSampler,
    step_loader,
    steps_of_stream,
    without_rows,
)
from support.examples import examples


def schedules(num_ranks: int, per_step: int, first_step: int = 0) -> list[ShareSchedule]:
    return [
        ShareSchedule(
            rank=rank, num_ranks=num_ranks, micro_batches_per_step=per_step, first_step=first_step
        )
        for rank in range(num_ranks)
    ]


@st.composite
def shares(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Ranks, and the counts of some steps, each of the same sum; the first are even."""
    num_ranks = draw(st.integers(1, 4))
    per_step = draw(st.integers(num_ranks, 9))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        cut = st.lists(st.integers(0, per_step), min_size=num_ranks - 1, max_size=num_ranks - 1)
        steps.append([b - a for a, b in pairwise([0, *sorted(draw(cut)), per_step])])
    return num_ranks, steps


@settings(max_examples=examples(100))
@given(shares(), st.integers(1, 3), st.booleans())
def test_each_row_of_an_epoch_is_dealt_once_in_an_order_that_no_share_changes(
    drawn: tuple[int, list[list[int]]], size: int, is_shuffled: bool
) -> None:
    num_ranks, counts = drawn
    per_step, num_steps = sum(counts[0]), len(counts)
    num_rows = num_steps * per_step * size + (size * per_step - 1)
    of_ranks = schedules(num_ranks, per_step)
    samplers = [
        iter(StepSampler(s, num_rows, rows_per_micro_batch=size, seed=7, is_shuffled=is_shuffled))
        for s in of_ranks
    ]
    whole = list(
        StepSampler(
            schedules(1, per_step)[0], num_rows, rows_per_micro_batch=size, seed=7,
            is_shuffled=is_shuffled,
        )
    )  # fmt: skip
    assert len(whole) == num_steps
    for step, of_step in enumerate(counts):
        for schedule in of_ranks:
            schedule.change(step, of_step)
        dealt = [next(sampler) for sampler in samplers]
        assert [0 if deal.is_empty else len(deal.micro_batches) for deal in dealt] == of_step
        joined = [batch for deal in dealt if not deal.is_empty for batch in deal.micro_batches]
        assert tuple(joined) == whole[step].micro_batches
        assert all(len(deal.micro_batches) == 1 for deal in dealt if deal.is_empty)
    rows = [row for deal in whole for batch in deal.micro_batches for row in batch]
    assert len(set(rows)) == len(rows) == num_steps * per_step * size


def test_epochs_have_orders_of_their_own_and_a_run_that_begins_later_the_same_ones() -> None:
    def epochs(first_step: int, count: int) -> list[Any]:
        (schedule,) = schedules(1, 2, first_step)
        sampler = StepSampler(schedule, 9, rows_per_micro_batch=2)
        assert len(sampler) == 2
        return [list(sampler) for _ in range(count)]

    first, second = epochs(0, 2)
    assert first != second
    assert epochs(3, 1) == [second[1:]]


def test_a_rank_without_a_share_gets_a_micro_batch_without_rows() -> None:
    for schedule, sizes in zip(schedules(2, 3), ([0], [2, 2, 2]), strict=True):
        schedule.change(0, (0, 3))
        rows = TensorDataset(torch.arange(12), torch.zeros(12, 3))
        loader = step_loader(schedule, rows, rows_per_micro_batch=2, is_shuffled=False)
        own = next(iter(loader))
        assert [len(x) for x, _ in own] == sizes
        assert [y.shape for _, y in own] == [(size, 3) for size in sizes]


def test_a_stream_is_dealt_in_its_order_and_its_rest_is_dropped() -> None:
    batches = [torch.full((2,), float(number)) for number in range(11)]
    own = [list(steps_of_stream(schedule, batches)) for schedule in schedules(2, 5)]
    numbers = [[[int(batch[0]) for batch in step] for step in steps] for steps in own]
    assert numbers == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
    one, other = schedules(2, 5)
    for schedule in (one, other):
        schedule.change(0, (5, 0))
    assert [len(batch) for batch in next(steps_of_stream(other, batches))] == [0]


def test_what_was_dealt_is_not_changed() -> None:
    (schedule, _) = schedules(2, 4)
    schedule.deal(0)
    schedule.deal(1)
    schedule.change(3, (1, 3))
    assert [schedule.at(step) for step in (0, 2, 3, 9)] == [(2, 2), (2, 2), (1, 3), (1, 3)]
    with pytest.raises(AssertionError):
        schedule.change(1, (4, 0))


def test_too_few_micro_batches_or_rows() -> None:
    with pytest.raises(ConfigError, match="micro_batches_per_step = 3"):
        schedules(4, 3)
    (schedule,) = schedules(1, 4)
    with pytest.raises(DataError, match="7 rows"):
        StepSampler(schedule, 7, rows_per_micro_batch=2)


def test_without_rows() -> None:
    batch = {"x": torch.ones(2, 3), "meta": ("a", [torch.ones(2), torch.tensor(1.0)])}
    empty = without_rows(batch)
    assert empty["x"].shape == (0, 3)
    name, (vector, scalar) = empty["meta"]
    assert (name, vector.shape, scalar.shape) == ("a", (0,), ())
