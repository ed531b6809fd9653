"""Copies that are made beside the training hold the state as it was when they began."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.checkpoint.staging import Arrival, HostCopies, ToHost, host_copies
from pacekeeper.trainer.toy.engine.worker import Rank
from pacekeeper.trainer.toy.model.block_state_dict import read_block
from support.checkpoints import TINY
from support.thread_ranks import State, ThreadRanks

T = TypeVar("T")
CONFIG = replace(
    TINY,
    steps=100,
    rows_per_step=4,
    clock="cpu",
    checkpoint_period_steps=4,
    snapshot_period_steps=3,
)
PAIR = even_layout(
    ranks=[0, 1], num_layers=1, num_experts=2, replicas=1, num_virtual_shards=2, generation=2
)


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


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_nothing_changes_what_is_being_copied_and_nobody_reads_it_before(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_dir=str(tmp_path / "kept"))
    job = ThreadRanks(config=config, layout=PAIR, directory=tmp_path)
    for rank in job.ranks.values():
        rank.checkpoints.copies = rank.checkpoints.snapshots.copies = LateCopies()
    states: dict[int, dict[Block, State]] = {}

    def go_on(rank: Rank) -> None:
        rank.take_place()
        for _ in range(5):
            ballot = rank.do_step()
            blocks = blocks_on(PAIR, rank.spec.rank)
            states.setdefault(rank.step, {}).update(
                {b: copied(read_block(rank.model, rank.optimizer, b)) for b in blocks}
            )
            rank.save(is_storing=ballot.is_storing, is_copying=ballot.is_copying)
        rank.checkpoints.close()

    job.together(go_on)
    for rank in job.ranks.values():
        (kept,) = rank.checkpoints.snapshots.kept
        assert kept.id.step == 3 and {piece.block for piece in kept.pieces} == set(states[3])
        for piece, tensors in kept.pieces.items():
            assert all(torch.equal(t, states[3][piece.block][n]) for n, t in tensors.items())
    job.launch_again()
    assert job.step == 4
    for block, tensors in job.blocks().items():
        assert all(torch.equal(t, states[4][block][n]) for n, t in tensors.items())
    job.close()


def test_the_copies_of_host_memory_are_there_at_once() -> None:
    copies = host_copies(torch.device("cpu"))
    source = torch.arange(6.0).view(3, 2)
    (whole, some), arrival = copies.make(lambda to_host: (to_host(source), to_host(source, [2, 0])))
    source.zero_()
    assert whole.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert some.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert arrival.wait() == 0.0 and copies.settle() == (0.0, 0.0) and not copies.is_beside
