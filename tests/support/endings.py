"""What a rank held when it had done all its steps: weights and moments, by names of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.elastic.worker import Worker
from pacekeeper.trainer.toy.engine.worker import Rank
from pacekeeper.trainer.toy.model.block_state_dict import read_block


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsEnding:
    """The body of a rank's process that leaves its state in `directory`; else as `body`."""

    directory: str
    body: Callable[[RankSpec], None] = loop.rank_main

    def __call__(self, spec: RankSpec) -> None:
        original = loop.train

        def train(spec: RankSpec, make: Callable[..., Worker], **options: Any) -> Worker:
            rank = original(spec, make, **options)
            assert isinstance(rank, Rank)
            torch.save(held_state(rank), ending_path(Path(self.directory), spec.rank))  # noqa: TID251
            return rank

        loop.train = train
        self.body(spec)


def ending_path(directory: Path, rank: int) -> Path:
    """Where a rank's state is."""
    return directory / f"ending-{rank}.pt"


def read_ending(directory: Path, rank: int) -> dict[str, Tensor]:
    """What it held: "BLOCK/w1", and moments beside it."""
    state: dict[str, Tensor] = torch.load(ending_path(directory, rank))  # noqa: TID251
    return state


def held_state(rank: Rank) -> dict[str, Tensor]:
    """Weights and moments of a rank, by names that do not depend on the layout."""
    return {
        f"{block}/{name}": tensor.clone()
        for block in blocks_on(rank.layout, rank.spec.rank)
        for name, tensor in read_block(rank.model, rank.optimizer, block).items()
    }
