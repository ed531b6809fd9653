"""Going back to a window: its steps are done again, each block joins in when its state is loaded.

Who has its whole state is active. Of the others, the frozen ones, the true weights are put in
before every step, so that all that is computed from them is what it was; what the step makes of
them is thrown away. After the last step all are active, as if nothing had happened.
"""

import logging
from collections.abc import Mapping, Sequence

from pacekeeper.core.checkpoint.manifest import Manifest
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, BlockStates, blocks_on
from pacekeeper.trainer.checkpoint.reader import RawTensor
from pacekeeper.trainer.checkpoint.tensors import to_tensors

_log = logging.getLogger(__name__)
States = Mapping[int, Mapping[Block, BlockState]]
"""By the number of steps that are committed: what is put in then."""


def states_of(
    states: BlockStates,
    manifest: Manifest,
    raw: Mapping[int | None, Mapping[Block, Mapping[str, Sequence[RawTensor]]]],
    layout: Layout,
    rank: int,
) -> States:
    """What was read of a checkpoint's blocks, by step (None: all at once), as it is put in.

    A block comes with its optimizer state at its turn, where the rank has that in `layout`; before
    it comes without. Raises DataError where it is of another model.
    """
    turns = {entry.piece.block: entry.step for entry in manifest.pieces}

    def is_frozen(block: Block, step: int | None) -> bool:
        return turns[block] != step or rank not in layout.state_holders(block)

    return {
        manifest.id.step if step is None else step: {
            block: to_tensors(states, block, tensors, are_weights=is_frozen(block, step))
            for block, tensors in blocks.items()
        }
        for step, blocks in raw.items()
    }


class Replay:
    """Puts in force, on one rank, what was read of a checkpoint: at once, or step by step.

    Gradients of frozen blocks are computed and applied as always: they count in the norm of all
    gradients, and the weights that result are replaced by those of the next step.
    """

    def __init__(self, manifest: Manifest, read: States, states: BlockStates) -> None:
        self.manifest = manifest
        self._read = read
        self._states = states

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
        self._held = blocks_on(layout, rank)
        self._states.load(self._held, self._read.get(self.first_step, {}), updates)
        if window is not None and rank == layout.ranks[0]:
            _log.info(
                "steps %d to %d are done again: after them all is as it was at step %d",
                self.first_step,
                self.last_step - 1,
                self.last_step,
            )

    def go_on(self, step: int) -> None:
        """`step` are committed: states whose turn it is, true weights of those that wait."""
        self._states.load(self._held, self._read.get(step, {}), self._states.num_updates)
