"""What a rank held when it had done all its steps: weights and moments, by names of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pacekeeper.trainer import loop
from pacekeeper.trainer.rank import Rank, RankSpec

PARTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsEnding:
    """The body of a rank's process that leaves its state in `directory`; else as `body`."""

    directory: str
    body: Callable[[RankSpec], None] = loop.rank_main

    def __call__(self, spec: RankSpec) -> None:
        original = loop.train

        def train(spec: RankSpec, **options: Any) -> Rank:
            rank = original(spec, **options)
            torch.save(held_state(rank), ending_path(Path(self.directory), spec.rank))
            return rank

        loop.train = train
        self.body(spec)


def ending_path(directory: Path, rank: int) -> Path:
    """Where a rank's state is."""
    return directory / f"ending-{rank}.pt"


def read_ending(directory: Path, rank: int) -> dict[str, Tensor]:
    """What it held: "dense/NUMBER" and "LAYER/EXPERT/w1", moments below them."""
    state: dict[str, Tensor] = torch.load(ending_path(directory, rank))
    return state


def held_state(rank: Rank) -> dict[str, Tensor]:
    """Weights and moments of a rank, by names that do not depend on the layout."""
    state: dict[str, Tensor] = {}

    def add(name: str, parameter: torch.nn.Parameter, slot: int | None = None) -> None:
        moments = rank.optimizer.state.get(parameter, {})
        tensors = {name: parameter.detach()} | {f"{name}/{p}": moments[p] for p in PARTS}
        for key, tensor in tensors.items():
            state[key] = (tensor if slot is None else tensor[slot]).clone()

    for i, parameter in enumerate(rank.model.dense_parameters()):
        add(f"dense/{i}", parameter)
    for layer, module in enumerate(rank.model.layers()):
        for slot, expert in enumerate(module.bank.held):
            add(f"{layer}/{expert}/w1", module.bank.w1, slot)
            add(f"{layer}/{expert}/w2", module.bank.w2, slot)
    return state
