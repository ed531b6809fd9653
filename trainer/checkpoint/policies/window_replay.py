"""Going back to a window: its steps are done again, each block joins in when its state is loaded.

Who has its whole state is active. Of the others, the frozen ones, the true weights are put in
before every step, so that all that is computed from them is what it was; what the step makes of
them is thrown away. After the last step all are active, as if nothing had happened.
"""

import logging
from collections.abc import Mapping, Sequence

import torch

from pacekeeper.core.checkpoint.manifest import Manifest
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.reader import RawTensor
from pacekeeper.trainer.checkpoint.tensors import to_tensors
from pacekeeper.trainer.toy.model.block_state_dict import (
    MOMENTS,
    BlockState,
    blocks_on,
    load_blocks,
    num_updates,
)
from pacekeeper.trainer.toy.model.transformer import MoETransformer

_log = logging.getLogger(__name__)
States = Mapping[int, Mapping[Block, BlockState]]
"""By the number of steps that are committed: what is put in then."""


def states_of(
    model: MoETransformer,
    manifest: Manifest,
    raw: Mapping[int | None, Mapping[Block, Mapping[str, Sequence[RawTensor]]]],
) -> States:
    """What was read of a checkpoint's blocks, by step (None: all at once), as it is put in.

    Raises DataError where it is of another model.
    """
    turns = {entry.piece.block: entry.step for entry in manifest.pieces}
    return {
        manifest.id.step if step is None else step: {
            block: to_tensors(model, block, tensors)
            if turns[block] == step
            else _frozen(to_tensors(model, block, tensors, are_weights=True))
            for block, tensors in blocks.items()
        }
        for step, blocks in raw.items()
    }


def _frozen(weights: BlockState) -> BlockState:
    """With moments that nobody will use and that hold no memory."""
    moments = {
        f"{name}.{moment}": tensor.new_zeros(1).expand(tensor.shape)
        for name, tensor in weights.items()
        for moment in MOMENTS
    }
    return {**weights, **moments}


class Replay:
    """Puts in force, on one rank, what was read of a checkpoint: at once, or step by step."""

    def __init__(
        self,
        manifest: Manifest,
        states: States,
        model: MoETransformer,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.manifest = manifest
        self._states = states
        self._model = model
        self._optimizer = optimizer

    @property
    def first_step(self) -> int:
        """Steps committed at its beginning."""
        window = self.manifest.window
        return self.manifest.id.step if window is None else window.step

    @property
    def last_step(self) -> int:
        """Steps committed when all is as it was."""
        return self.manifest.id.step

    def begin(self, layout: Layout, rank: int) -> None:
        """Hold what `layout` says, as it was at the first step."""
        window = self.manifest.window
        updates = self.manifest.num_updates if window is None else window.num_updates
        state = self._states.get(self.first_step, {})
        self._wanted = blocks_on(layout, rank)
        load_blocks(self._model, self._optimizer, self._wanted, state, updates)
        if window is not None and rank == layout.ranks[0]:
            _log.info(
                "steps %d to %d are done again: after them all is as it was at step %d",
                self.first_step,
                self.last_step - 1,
                self.last_step,
            )

    def go_on(self, step: int) -> None:
        """`step` are committed: states whose turn it is, true weights of those that wait."""
        updates, state = num_updates(self._optimizer), self._states.get(step, {})
        load_blocks(self._model, self._optimizer, self._wanted, state, updates)
