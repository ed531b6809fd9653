"""Writes the model of all ranks as one Hugging Face checkpoint, block by block."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.core.errors import PacekeeperError
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.groups.agreement import on_all_ranks
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.model.blocks import BlockStore
from pacekeeper.trainer.model.checkpoint_writer import CheckpointWriter, writer_groups
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

    A rank never has more than its own blocks and one of another rank. Where it fails on one rank,
    it fails on all, and no index is written.

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
