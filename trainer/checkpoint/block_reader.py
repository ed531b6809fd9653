"""What one rank needs of a checkpoint, read and checked: all its blocks, or lost ones only."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest, RunFingerprint
from pacekeeper.core.checkpoint.write_plan import piece_holders
from pacekeeper.core.config.run_fingerprint import model_differences, steering_differences
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_states import BlockState, BlockStates
from pacekeeper.trainer.checkpoint.policies.window_replay import States, states_of
from pacekeeper.trainer.checkpoint.reader import (
    BlockReader,
    NotOursError,
    RawTensor,
    read_manifest,
)
from pacekeeper.trainer.checkpoint.storage import Storage, open_storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Blocks that no living rank holds any more, while the others stand at `step`."""

    blocks: frozenset[Block]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What this rank needs of a checkpoint for `layout`, read and checked, not in force: at once,
    or of a window step by step.

    `lost`: it is of these blocks only; None: of all.
    """

    manifest: Manifest
    layout: Layout
    states: States
    size_bytes: int
    lost: Lost | None = None

    @property
    def step(self) -> int:
        """Steps committed when it comes in force."""
        return self.manifest.id.step - self.manifest.steps_again

    @property
    def last_loss(self) -> float | None:
        """Of the step before; None: of no step, or of one that is done again."""
        return None if self.manifest.steps_again else self.manifest.last_loss

    @property
    def state(self) -> Mapping[Block, BlockState]:
        """As at that step."""
        return self.states.get(self.step, {})

    @property
    def seen_tokens(self) -> dict[Block, int]:
        """Of each lost expert: tokens it had seen when the oldest piece of it was saved."""
        assert self.lost is not None, "all is of one checkpoint"
        seen: dict[Block, int] = {}
        for entry in self.manifest.pieces:
            block = entry.piece.block
            if block.kind is BlockKind.EXPERT and block in self.lost.blocks:
                seen[block] = min(seen.get(block, entry.tokens), entry.tokens)
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One rank's eyes on checkpoints, wherever they lie; `storage`: that of its own job.

    `on_piece` is called after each that was read: who waits sees that it goes on.
    """

    rank: int
    storage: Storage | None
    identity: RunFingerprint
    states: BlockStates
    on_piece: Callable[[], None] = lambda: None

    def read(self, path: str, layout: Layout, lost: Lost | None) -> Restored:
        """What this rank holds in `layout`. Raises DataError, NotOursError for another model."""
        root, _, name = path.rpartition("/")
        one = CheckpointId.of_name(name)
        if one is None:
            raise DataError(f"{path}: not the name of a checkpoint")
        if lost is not None and one.step > lost.step:
            raise NotOursError(f"{path} is of a course that was left: the run is at {lost.step}")
        storage = self.storage
        if storage is None or storage.root != root:
            storage = open_storage(root)
        manifest = read_manifest(storage, one)
        if lost is not None and manifest.window is not None:
            raise NotOursError(f"{path} is spread over a window: all go back to it, or nobody")
        others = model_differences(manifest.identity, self.identity)
        if others or set(manifest.layout.blocks()) != set(layout.blocks()):
            raise NotOursError(f"{path} is of another model: {'; '.join(others)}")
        changed = steering_differences(manifest.identity, self.identity)
        if changed and self.rank == layout.ranks[0]:
            _log.warning("this will not be the run that was saved: %s", "; ".join(changed))
        reader = BlockReader(storage=storage, manifest=manifest)
        raw: dict[int | None, dict[Block, dict[str, list[RawTensor]]]] = {}
        size_bytes = 0
        for entry in manifest.entries:
            block = entry.piece.block
            is_wanted = lost is None or block in lost.blocks
            if is_wanted and self.rank in piece_holders(layout, entry.piece):
                strips = raw.setdefault(entry.step, {}).setdefault(block, {})
                for tensor_name, tensor in reader.read(entry).items():
                    strips.setdefault(tensor_name, []).append(tensor)
                self.on_piece()
                size_bytes += entry.size_bytes
        return Restored(
            manifest=manifest,
            layout=layout,
            states=states_of(self.states, manifest, raw, layout, self.rank),
            size_bytes=size_bytes,
            lost=lost,
        )
