"""Copies that are made beside the training hold the state as it was when they began."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.checkpoint.staging import Arrival, HostCopies, ToHost, host_copies
from support.rank_threads import ThreadGroup
from support.trainees import Job, State, Trainee, assert_all_same, assert_same, together

T = TypeVar("T")
PAIR = even_layout(ranks=[0, 1], num_layers=1, num_experts=2, replicas=1)


class LateCopies(HostCopies):
    """As of a device at its slowest: nothing is there until somebody has to have it."""

    is_beside = True

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Tensor]] = []
        self._arrivals: list[threading.Event] = []

    def make(self, copy: Callable[[ToHost], T]) -> tuple[T, Arrival]:
        there = threading.Event()
        self._arrivals.append(there)

        def later(tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
            wanted = tensor if rows is None else tensor[list(rows)]
            found = torch.full_like(wanted, torch.nan)
            for place in range(len(wanted)):
                source = tensor[place if rows is None else rows[place]]
                self._open.append((found[place], source))
            return found

        return copy(later), _Later(there)

    def settle(self) -> tuple[float, float]:
        for target, source in self._open:
            target.copy_(source)
        self._open.clear()
        for there in self._arrivals:
            there.set()
        return 0.25, 0.5


class _Later:
    def __init__(self, there: threading.Event) -> None:
        self._there = there

    def wait(self) -> float:
        assert self._there.wait(60.0)
        return 0.5


def test_nothing_changes_what_is_being_copied_and_nobody_reads_it_before(tmp_path: Path) -> None:
    config = JobConfig(
        checkpoint_dir=str(tmp_path), checkpoint_period_steps=4, snapshot_period_steps=3
    )
    job = Job(config=config, layout=PAIR)
    for one in job.ranks.values():
        one.checkpoints.copies = one.checkpoints.snapshots.copies = LateCopies()

    def go_on(one: Trainee, group: ThreadGroup) -> list[State]:
        states = []
        for _ in range(5):
            one.do_step(group)
            states.append(one.state())
        one.checkpoints.close()
        return states

    states = [together(parts) for parts in zip(*job.run(go_on).values(), strict=True)]
    for one in job.ranks.values():
        (kept,) = one.checkpoints.snapshots.kept
        assert kept.id.step == 3 and {piece.block for piece in kept.pieces} == set(states[2])
        for piece, tensors in kept.pieces.items():
            wanted = {name: states[2][piece.block][name] for name in tensors}
            assert_same(dict(tensors), wanted, str(piece))
    again = Job(config=config, layout=PAIR, run_id=2)
    assert again.step == 4
    assert_all_same(again.state(), states[3])


def test_the_copies_of_host_memory_are_there_at_once() -> None:
    copies = host_copies(torch.device("cpu"))
    source = torch.arange(6.0).view(3, 2)
    (whole, some), arrival = copies.make(lambda to_host: (to_host(source), to_host(source, [2, 0])))
    source.zero_()
    assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert some.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert arrival.wait() == 0.0 and copies.settle() == (0.0, 0.0) and not copies.is_beside
