"""What a rank held when it had done all its steps: weights and optimizer state, by names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from pacekeeper.trainer.checkpoint.block_states import blocks_on, read_block
from pacekeeper.trainer.elastic import loop
from pacekeeper.trainer.elastic.engine_worker import EngineWorker
from pacekeeper.trainer.elastic.launch_spec import RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsEnding:
    """The body of a rank's process that leaves its state in `directory`; else as `body`."""

    directory: str
    body: Callable[[RankSpec], None] = loop.rank_main

    def __call__(self, spec: RankSpec) -> None:
        original = loop.train

        def train(
            spec: RankSpec, make: Callable[..., EngineWorker], **options: Any
        ) -> EngineWorker:
            rank = original(spec, make, **options)
            save_file(held_state(rank), ending_path(Path(self.directory), spec.rank))
            return rank

        loop.train = train
        self.body(spec)


def ending_path(directory: Path, rank: int) -> Path:
    """Where a rank's state is."""
    return directory / f"ending-{rank}.safetensors"


def read_ending(directory: Path, rank: int) -> dict[str, Tensor]:
    """What it held: "BLOCK/NAME" of each tensor of a block."""
    return load_file(ending_path(directory, rank))


def held_state(rank: EngineWorker) -> dict[str, Tensor]:
    """The state of a rank, by names that do not depend on the layout."""
    return {
        f"{block}/{name}": tensor.clone()
        for block in blocks_on(rank.layout, rank.spec.rank)
        for name, tensor in read_block(rank.engine.states, block).items()
    }
