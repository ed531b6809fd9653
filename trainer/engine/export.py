"""Writes models as Hugging Face checkpoints, block by block: that of all ranks, or a saved one."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest
from pacekeeper.core.errors import DataError, PacekeeperError
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, StateSpec
from pacekeeper.trainer.checkpoint.reader import BlockReader, RawTensor, read_manifest
from pacekeeper.trainer.checkpoint.storage import Storage
from pacekeeper.trainer.checkpoint.tensors import tensors_of
from pacekeeper.trainer.groups.agreement import on_all_ranks
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.checkpoint_writer import CheckpointWriter, writer_groups
from pacekeeper.trainer.model.skeleton import build_skeleton
from pacekeeper.trainer.parallel.row_exchange import exchange


def choose_writers(groups: Sequence[tuple[Block, ...]], layout: Layout) -> dict[Block, int]:
    """Return the rank that writes each block.

    Args:
        groups: Blocks that have one writer together.
        layout: Who holds what.

    Returns:
        The rank that holds most blocks of a group; of several, the one with the fewest blocks to
        write so far.
    """
    writers: dict[Block, int] = {}
    load: Counter[int] = Counter()
    for blocks in groups:
        held = Counter(rank for block in blocks for rank in layout.holders(block))
        rank = min(held, key=lambda r: (-held[r], load[r], r))
        load[rank] += len(blocks)
        writers |= dict.fromkeys(blocks, rank)
    return writers


def export_checkpoint(
    store: BlockStore,
    layout: Layout,
    groups: EngineGroups,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the files of all ranks; all ranks call it together, with one folder that all reach.

    A rank never has more than its own blocks and, of other ranks, one block or the shards of one
    layer's attention or MLP. Where it fails on one rank, it fails on all, and no index is written.

    Args:
        store: The blocks of this rank.
        layout: The layout in force.
        groups: All ranks.
        folder: Of the checkpoint; it holds none yet.
        dtype: Type of floating-point tensors on disk; None: as in the model.

    Raises:
        PacekeeperError: It cannot be written, here or elsewhere.
    """
    rank, control = groups.exchange.rank, groups.control
    families = [group.blocks for group in writer_groups(store.skeleton, dtype)]
    writers = choose_writers(families, layout)
    writer = on_all_ranks(
        lambda: CheckpointWriter(store.skeleton, folder, writers=writers, rank=rank, dtype=dtype),
        control,
    )
    failure: PacekeeperError | None = None
    is_finished = False

    def finish() -> None:
        nonlocal is_finished
        if failure is not None:
            raise failure
        writer.finish()
        is_finished = True

    try:
        for block, target in writers.items():
            holders = layout.holders(block)
            source = target if target in holders else holders[0]
            tensors = store.read(block) if rank == source else {}
            if source != target:
                tensors = _sent(store, block, source, target, groups)
            if rank == target and failure is None:
                try:
                    writer.write(block, tensors)
                except PacekeeperError as error:  # the others wait for this rank's blocks
                    failure = error
        on_all_ranks(finish, control)
        on_all_ranks(lambda: writer.commit() if rank == control.ranks[0] else None, control)
    except BaseException as error:
        # Where a rank is lost after that, the index may name these files on others' word.
        if not is_finished or isinstance(error, PacekeeperError):
            writer.abort()
        raise


def export_saved(
    storage: Storage,
    one: CheckpointId,
    model: Path | str,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> Manifest:
    """Write the weights of a checkpoint of a job, which may train on meanwhile.

    Args:
        storage: Of the job's checkpoints.
        one: The checkpoint.
        model: Folder with the model's config.json.
        folder: Of the Hugging Face checkpoint; it holds none yet.
        dtype: Type of floating-point tensors on disk; None: as they were saved.

    Returns:
        What was saved.

    Raises:
        DataError: It cannot be read, is of another model, or is spread over several steps.
        PacekeeperError: The model cannot be built, or the folder not be written.
    """
    manifest = read_manifest(storage, one)
    where = f"{storage.root}/{one.name}"
    if manifest.window is not None:
        raise DataError(
            f"{where} is spread over {manifest.steps_again + 1} steps: no step's weights are whole",
            remedy="take one that was saved with checkpoint_window_steps = 1",
        )
    skeleton = build_skeleton(
        model,
        num_attention_shards=manifest.layout.num_attention_shards,
        num_mlp_shards=manifest.layout.num_mlp_shards,
    )
    if set(skeleton.blocks) != set(manifest.layout.blocks()):
        raise DataError(f"{where} is not of the model in {model}", remedy="give the model's folder")
    pieces = defaultdict(list)
    for entry in manifest.pieces:
        if entry.piece.kind == WEIGHTS:
            pieces[entry.piece.block].append(entry)
    reader = BlockReader(storage=storage, manifest=manifest)
    writers = dict.fromkeys(skeleton.blocks, 0)
    writer = CheckpointWriter(skeleton, folder, writers=writers, dtype=dtype)
    try:
        for block, specs in skeleton.blocks.items():
            raw: dict[str, list[RawTensor]] = defaultdict(list)
            for entry in pieces[block]:
                for name, strip in reader.read(entry).items():
                    raw[name].append(strip)
            wanted = [
                StateSpec(name, WEIGHTS, tuple(spec.shape), spec.dtype)
                for name, spec in sorted(specs.items())
            ]
            writer.write(block, tensors_of(wanted, block, raw))
        writer.finish()
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return manifest


def _sent(
    store: BlockStore, block: Block, source: int, target: int, groups: EngineGroups
) -> dict[str, Tensor]:
    """Send a block from one rank to another; the block there, nothing elsewhere."""
    group, specs = groups.exchange, store.skeleton.blocks[block]
    sizes = {
        name: torch.Size(spec.shape).numel() * spec.dtype.itemsize for name, spec in specs.items()
    }
    total = sum(sizes.values())
    mine = torch.empty(0, dtype=torch.uint8, device=store.device)
    if group.rank == source:
        own = store.read(block)
        mine = torch.cat([own[name].reshape(-1).view(torch.uint8) for name in specs])
    arrived = exchange(
        mine,
        group,
        receive=[total * (group.rank == target and member == source) for member in group.ranks],
        send=[total * (group.rank == source and member == target) for member in group.ranks],
    )
    if group.rank != target:
        return {}
    parts = arrived.split(list(sizes.values()))
    return {
        name: part.clone().view(spec.dtype).view(spec.shape)
        for part, (name, spec) in zip(parts, specs.items(), strict=True)
    }
