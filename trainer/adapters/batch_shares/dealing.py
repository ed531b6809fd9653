"""Deals the global batch of each step to the ranks, in whole micro-batches.

The rows of a step are the same under any shares, in the same order: only who runs which of its
micro-batches changes. A rank runs a contiguous part of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from pacekeeper.core.errors import ConfigError, DataError
from pacekeeper.core.layout.apportion import apportion


class ShareSchedule:
    """The number of micro-batches of each rank in each step.

    Steps below `num_dealt` were dealt on this rank, for instance by a data loader that reads ahead:
    a change applies to a later step, the same on all ranks.

    Attributes:
        rank: This rank.
        micro_batches_per_step: Of all ranks together.
        first_step: The first step of this run.
        num_dealt: The first step that was not dealt yet.
    """

    def __init__(
        self, *, rank: int, num_ranks: int, micro_batches_per_step: int, first_step: int = 0
    ) -> None:
        """Raises ConfigError for fewer micro-batches than ranks."""
        if micro_batches_per_step < num_ranks:
            raise ConfigError(
                f"micro_batches_per_step = {micro_batches_per_step}: expected at least one for "
                f"each of {num_ranks} ranks",
                remedy="make micro-batches smaller; four or more for each rank divide work well",
            )
        self.rank = rank
        self.micro_batches_per_step = micro_batches_per_step
        self.first_step = self.num_dealt = first_step
        even = apportion(micro_batches_per_step, [1.0] * num_ranks)
        self._counts = [(first_step, even)]

    def at(self, step: int) -> tuple[int, ...]:
        """Return the micro-batches of each rank in `step`."""
        return next(counts for first, counts in reversed(self._counts) if first <= step)

    def deal(self, step: int) -> range:
        """Return this rank's micro-batches of `step`, as places in the global batch."""
        self.num_dealt = max(self.num_dealt, step + 1)
        counts = self.at(step)
        first = sum(counts[: self.rank])
        return range(first, first + counts[self.rank])

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Deal these counts from `step` on, which no rank may have dealt."""
        assert step >= self.num_dealt and sum(counts) == self.micro_batches_per_step
        self._counts = [*self._counts[-1:], (step, tuple(counts))]


class Deal(NamedTuple):
    """The row numbers of one rank's micro-batches of a step.

    `is_empty`: it has none; the one here only shows what a micro-batch looks like.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    is_empty: bool


class StepSampler(Sampler[Deal]):
    """Yields a `Deal` for each step; an iteration is an epoch, without rows that fill no step."""

    def __init__(
        self,
        schedule: ShareSchedule,
        num_rows: int,
        *,
        rows_per_micro_batch: int,
        seed: int = 0,
        is_shuffled: bool = True,
    ) -> None:
        """Raises DataError if the rows do not fill one step."""
        self._schedule, self._num_rows = schedule, num_rows
        self._size, self._seed, self._is_shuffled = rows_per_micro_batch, seed, is_shuffled
        per_step = rows_per_micro_batch * schedule.micro_batches_per_step
        self._steps_per_epoch = num_rows // per_step
        if not self._steps_per_epoch:
            raise DataError(
                f"{num_rows} rows do not fill one step of {schedule.micro_batches_per_step} "
                f"micro-batches of {rows_per_micro_batch} rows",
                remedy="use more data or smaller micro-batches",
            )
        self._next = schedule.num_dealt

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[Deal]:
        epoch, number = divmod(self._next, self._steps_per_epoch)
        draw = torch.Generator().manual_seed(self._seed + epoch)
        rows = torch.randperm(self._num_rows, generator=draw) if self._is_shuffled else None
        for at in range(number, self._steps_per_epoch):
            step, self._next = self._next, self._next + 1
            own = self._schedule.deal(step)
            batches = []
            for place in own or range(1):
                first = (at * self._schedule.micro_batches_per_step + place) * self._size
                span = range(first, first + self._size)
                batches.append(tuple(span) if rows is None else tuple(rows[list(span)].tolist()))
            yield Deal(micro_batches=tuple(batches), is_empty=not own)


class StepRows(Dataset[list[Any]]):
    """A dataset by step: its items are the lists of a rank's micro-batches."""

    def __init__(self, rows: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._rows, self._collate = rows, collate

    def __getitem__(self, deal: Deal) -> list[Any]:
        batches = [
            self._collate([self._rows[number] for number in numbers])
            for numbers in deal.micro_batches
        ]
        return [without_rows(batches[0])] if deal.is_empty else batches


def step_loader(
    schedule: ShareSchedule,
    rows: Dataset[Any],
    *,
    rows_per_micro_batch: int,
    seed: int = 0,
    is_shuffled: bool = True,
    collate: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> DataLoader[list[Any]]:
    """Return a loader whose items are the lists of this rank's micro-batches, one list a step.

    Args:
        schedule: Of the job's shares.
        rows: A dataset with a length, the same on every rank; each rank reads its rows only.
        rows_per_micro_batch: Rows of a micro-batch.
        seed: Of the order, which is another one in each epoch.
        is_shuffled: False: rows in the order of the dataset.
        collate: Makes a micro-batch of rows.
        options: Of `DataLoader`. A new plan waits for the steps that workers have read ahead.

    Raises:
        DataError: The rows do not fill one step.
    """
    assert isinstance(rows, Sized), "a dataset with a length"
    sampler = StepSampler(
        schedule,
        len(rows),
        rows_per_micro_batch=rows_per_micro_batch,
        seed=seed,
        is_shuffled=is_shuffled,
    )
    return DataLoader(
        StepRows(rows, collate), sampler=sampler, batch_size=None, collate_fn=_as_is, **options
    )


def steps_of_stream(schedule: ShareSchedule, batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the list of this rank's micro-batches of each step.

    Args:
        schedule: Of the job's shares.
        batches: All micro-batches of the job in one order, the same on every rank. Those at the end
            that fill no step are dropped.
    """
    source = iter(batches)
    while True:
        place, own, first = 0, schedule.deal(schedule.num_dealt), None
        kept = []
        for batch in islice(source, schedule.micro_batches_per_step):
            first = batch if place == 0 else first
            if place in own:
                kept.append(batch)
            place += 1
        if place < schedule.micro_batches_per_step:
            return
        yield kept or [without_rows(first)]


def without_rows(batch: Any) -> Any:
    """Return the batch with no row: its tensors, in mappings and sequences, of length 0."""
    match batch:
        case Tensor():
            return batch[:0] if batch.dim() else batch
        case Mapping():
            return type(batch)({name: without_rows(part) for name, part in batch.items()})  # type: ignore[call-arg]
        case list() | tuple():
            return type(batch)(map(without_rows, batch))
        case _:
            return batch


def _as_is(batches: list[Any]) -> list[Any]:
    return batches
