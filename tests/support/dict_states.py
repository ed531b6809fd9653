"""The state of a rank as blocks in a dictionary, for tests of what moves and compares blocks."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, BlockState, Part, StateSpec

STATE = "state"


class States:
    """Blocks in a dictionary; every value tells the block, the tensor and the place."""

    device = torch.device("cpu")
    num_experts = (4, 4)
    kinds = (WEIGHTS, STATE)

    def __init__(self, held: Collection[Block], num_updates: int) -> None:
        self.num_updates = num_updates
        self.held = {block: value_of(block) for block in held}

    def specs(self, block: Block) -> Sequence[StateSpec]:
        return [
            StateSpec(name, STATE if "." in name else WEIGHTS, tuple(t.shape), t.dtype)
            for name, t in value_of(block).items()
        ]

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        specs = (spec for spec in self.specs(block) if spec.kind == kind)
        return {spec.name: Part(self.held[block][spec.name]) for spec in specs}

    def load(
        self, held: Collection[Block], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        had = self.held
        self.held = {b: {**had.get(b, {}), **state[b]} if b in state else had[b] for b in held}
        self.num_updates = num_updates


def value_of(block: Block) -> dict[str, Tensor]:
    shape = (2, 3) if block.kind is BlockKind.EXPERT else (5,)
    first = 100.0 * block.layer + 10.0 * block.index + len(block.kind)
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    return {
        "bias": torch.tensor([block.layer, 3, block.index], dtype=torch.bfloat16),
        "up": first + places,
        "up.exp_avg": (-first - places).double(),
        "up.step": torch.tensor(first),
    }
