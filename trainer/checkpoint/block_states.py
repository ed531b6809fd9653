"""What checkpoints ask of a trainer: the state of one rank as blocks of named tensors.

`BlockStates` is implemented by each trainer over its model and optimizers; this package saves,
copies, sends and loads through it, and knows neither. A block's tensors have names that depend on
no layout: `NAME` for a weight or buffer, `NAME.KEY` for what an optimizer keeps of it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pacekeeper.core.layout.diff import StatePart
from pacekeeper.core.layout.layout import Block, Layout

WEIGHTS = ""
"""The kind of pieces with weights and buffers; every other kind is of optimizer state."""

BlockState = Mapping[str, Tensor]
"""Tensors of a block by name: all of them, or weights and buffers alone."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor of a block; `kind` is that of the piece which contains it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """Where a block's tensor lies: all of `tensor`, or one row of a stack of blocks."""

    tensor: Tensor
    row: int | None = None

    @property
    def view(self) -> Tensor:
        """The block's own tensor."""
        return self.tensor if self.row is None else self.tensor[self.row]


class BlockStates(Protocol):
    """Model and optimizers of one rank, as blocks of named tensors."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    @property
    def num_experts(self) -> Sequence[int]:
        """Experts of each layer; 0: a dense layer."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of pieces, ascending; of some kinds a block may have no tensor."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far; 0: no optimizer keeps anything yet."""

    def specs(self, block: Block) -> Sequence[StateSpec]:
        """The tensors of a block of the model, names ascending, whether or not it is held here.

        They never change: optimizer state is among them before the first update.
        """

    def parts(self, block: Block, kind: str) -> Mapping[str, Part]:
        """Where the tensors of this kind lie, without gradient, names ascending.

        State that no optimizer keeps yet is zero; of a block without its state here there is none.
        The block is held here.
        """

    def load(
        self, held: Mapping[Block, bool], state: Mapping[Block, BlockState], num_updates: int
    ) -> None:
        """Hold the blocks `held` from now on.

        Args:
            held: Whether each block comes with its optimizer state, as of `blocks_on`. What stays
                changes no bit.
            state: Tensors of new blocks and of those that change: weights, optimizer state or
                both. Of a new block that is to have optimizer state and has none here, it is any.
            num_updates: Updates that the optimizers had made; 0: they keep nothing.
        """


def state_digest(states: BlockStates, layout: Layout) -> str:
    """What tells the state of one model and optimizer from another: names, kinds, shapes, types."""
    specs = [
        (str(block), [(s.name, s.kind, s.shape, str(s.dtype)) for s in states.specs(block)])
        for block in layout.blocks()
    ]
    return hashlib.sha256(repr(specs).encode()).hexdigest()[:16]


def blocks_on(layout: Layout, rank: int) -> dict[Block, bool]:
    """The blocks that a rank holds, in the layout's order: whether with their optimizer state."""
    return {
        block: rank in layout.state_holders(block)
        for block in layout.blocks()
        if rank in layout.holders(block)
    }


def kinds_of(states: BlockStates, part: StatePart) -> tuple[str, ...]:
    """The kinds of pieces of a part of a block."""
    wanted = {StatePart.WEIGHTS: (True,), StatePart.OPTIMIZER: (False,)}.get(part, (True, False))
    return tuple(kind for kind in states.kinds if (kind == WEIGHTS) in wanted)


def read_block(
    states: BlockStates, block: Block, part: StatePart = StatePart.ALL
) -> dict[str, Tensor]:
    """The tensors of a block, or of a part, that is held here: views, names ascending."""
    kinds = kinds_of(states, part)
    parts = {name: one for kind in kinds for name, one in states.parts(block, kind).items()}
    return {name: parts[name].view for name in sorted(parts)}
