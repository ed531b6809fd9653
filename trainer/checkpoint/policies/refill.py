"""Blocks that are put in force from elsewhere than the checkpoint that everybody goes back to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pacekeeper.core.checkpoint.manifest import Account, CheckpointId, PieceEntry, saved_in
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.checkpoint_reading import Lost
from pacekeeper.trainer.model.block_state_dict import BlockState


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What this rank needs of snapshot `id` for `layout`, not in force: all of one step."""

    id: CheckpointId
    num_updates: int
    last_loss: float | None
    account: Account
    layout: Layout
    state: Mapping[Block, BlockState]

    @property
    def step(self) -> int:
        """Steps committed when it comes in force."""
        return self.id.step

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.state.values() for t in tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """What this rank is to hold of blocks that nobody holds any more, not in force.

    `steps`: of which step each of these blocks is, wherever it goes; `seen`: tokens it had then.
    """

    layout: Layout
    lost: Lost
    state: Mapping[Block, BlockState]
    steps: Mapping[Block, int]
    seen: Mapping[Block, int]

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.state.values() for t in tensors.values())

    def with_newer(
        self,
        *,
        state: Mapping[Block, BlockState],
        steps: Mapping[Block, int],
        seen: Mapping[Block, int],
    ) -> "Refill":
        """What was found of these blocks elsewhere takes the place of what was here."""
        return replace(
            self,
            state={**self.state, **state},
            steps={**self.steps, **steps},
            seen={**self.seen, **seen},
        )


def steps_of(entries: Iterable[PieceEntry]) -> dict[Block, int]:
    """The step at which the oldest of these pieces of each block was saved."""
    steps: dict[Block, int] = {}
    for entry in entries:
        of = saved_in(entry.file)
        assert of is not None, "a manifest names files of checkpoints only"
        block = entry.piece.block
        steps[block] = min(steps.get(block, of.step), of.step)
    return steps
