"""Counts of experts: told when they are there, under the step they are of, never more than fits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pacekeeper.trainer.adapters.instrumentation import expert_load
from pacekeeper.trainer.adapters.instrumentation.expert_load import MAX_LATE_STEPS, ExpertCounts
from support.adapters import Pace


class Copy:
    """The event of a copy that is under way until somebody says it has arrived."""

    def __init__(self) -> None:
        self.is_there = False

    def query(self) -> bool:
        return self.is_there


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Copy]]:
    """The copies of counts that lie on a device, in order."""
    plain, begun = expert_load._copy_to_host, list[Copy]()

    def copied(step: int, layers: tuple[int, ...], rows: list[Any]) -> Any:
        begun.append(Copy())
        return plain(step, layers, rows)._replace(is_there=begun[-1])

    monkeypatch.setattr(expert_load, "_copy_to_host", copied)
    yield begun


def end(counts: ExpertCounts, pace: Pace, step: int, *values: float) -> None:
    pace.hooks.begin_step(step)
    if values:
        counts.add(0, torch.tensor(values))
    counts.end_step(step)


def test_late_counts_carry_the_number_of_their_step(pace: Pace, copies: list[Copy]) -> None:
    counts = ExpertCounts(pace.hooks)
    end(counts, pace, 1, 5.0, 6.0)
    end(counts, pace, 2, 7.0, 8.0)
    assert pace.loads == []
    copies[0].is_there = True
    end(counts, pace, 3, 9.0, 1.0)
    assert [(r.step, r.counts) for r in pace.loads] == [(1, (5, 6))]
    copies[1].is_there = copies[2].is_there = True
    counts.tell()
    assert [r.step for r in pace.loads] == [1, 2, 3]


def test_a_device_far_behind_loses_the_oldest(pace: Pace, copies: list[Copy]) -> None:
    counts = ExpertCounts(pace.hooks)
    for step in range(MAX_LATE_STEPS + 3):
        end(counts, pace, step, float(step), 0.0)
    for copy in copies:
        copy.is_there = True
    counts.tell()
    assert [r.step for r in pace.loads] == list(range(3, MAX_LATE_STEPS + 3))


def test_what_is_counted_in_may_be_used_again(pace: Pace) -> None:
    counts, buffer = ExpertCounts(pace.hooks), torch.tensor([1, 2])
    pace.hooks.begin_step(0)
    counts.add(0, buffer)
    buffer.zero_()
    counts.end_step(0)
    assert [r.counts for r in pace.loads] == [(1, 2)]


def test_a_step_without_counts_and_one_given_up_tell_nothing(pace: Pace) -> None:
    counts = ExpertCounts(pace.hooks)
    end(counts, pace, 0)
    counts.add(0, torch.ones(2))
    counts.forget()
    end(counts, pace, 1)
    assert pace.loads == []


def test_where_there_are_too_many_layers_take_turns(pace: Pace) -> None:
    counts, seen = ExpertCounts(pace.hooks), set[int]()
    for step in range(4):
        pace.hooks.begin_step(step)
        before = len(pace.loads)
        for layer in range(61):
            counts.add(layer, torch.full((128,), layer))
        counts.end_step(step)
        told = pace.loads[before:]
        assert len(told) <= expert_load.MAX_RECORDS_PER_STEP
        seen |= {r.layer for r in told}
    assert seen == set(range(61))


def test_layers_may_have_different_numbers_of_experts(pace: Pace) -> None:
    counts = ExpertCounts(pace.hooks)
    pace.hooks.begin_step(0)
    counts.add(1, torch.tensor([1, 2, 3]))
    counts.add(0, torch.tensor([4]))
    counts.end_step(0)
    assert [(r.layer, r.counts) for r in pace.loads] == [(0, (4,)), (1, (1, 2, 3))]
