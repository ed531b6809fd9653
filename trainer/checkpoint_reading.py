"""What one rank needs of a checkpoint, read and checked: all its blocks, or lost ones only."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Block, BlockKind, Layout
from pacekeeper.core.manifest import CheckpointId, Identity, Manifest
from pacekeeper.core.run_identity import other_course, other_model
from pacekeeper.trainer.block_state import BlockState
from pacekeeper.trainer.checkpoint_catalog import BlockReader, RawTensor, read_manifest
from pacekeeper.trainer.checkpoint_files import Storage, open_storage
from pacekeeper.trainer.checkpoint_state import to_tensors
from pacekeeper.trainer.model import MoETransformer

_log = logging.getLogger(__name__)


class NotOursError(DataError):
    """It may be whole, but it is not for us to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Blocks that no living rank holds any more, while the others stand at `step`."""

    blocks: frozenset[Block]
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What this rank needs of a checkpoint for `layout`, read and checked, not in force.

    `lost`: it is of these blocks only; None: of all.
    """

    manifest: Manifest
    layout: Layout
    state: Mapping[Block, BlockState]
    lost: Lost | None = None

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.state.values() for t in tensors.values())

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
    """One rank's eyes on checkpoints, wherever they lie; `storage`: that of its own job."""

    rank: int
    storage: Storage | None
    identity: Identity
    model: MoETransformer

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
        others = other_model(manifest.identity, self.identity)
        if others or set(manifest.layout.blocks()) != set(layout.blocks()):
            raise NotOursError(f"{path} is of another model: {'; '.join(others)}")
        changed = other_course(manifest.identity, self.identity)
        if changed and self.rank == layout.ranks[0]:
            _log.warning("this will not be the run that was saved: %s", "; ".join(changed))
        reader = BlockReader(storage=storage, manifest=manifest)
        raw: dict[Block, dict[str, RawTensor]] = {}
        for entry in manifest.pieces:
            block = entry.piece.block
            is_wanted = lost is None or block in lost.blocks
            if is_wanted and self.rank in layout.holders(block):
                raw.setdefault(block, {}).update(reader.read(entry))
        state = {block: to_tensors(self.model, block, tensors) for block, tensors in raw.items()}
        return Restored(manifest=manifest, layout=layout, state=state, lost=lost)
