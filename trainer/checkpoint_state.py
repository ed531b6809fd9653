"""Blocks as a checkpoint holds them: tensors with names, dtypes and shapes that can be checked."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Block, BlockKind, Layout
from pacekeeper.core.manifest import Piece, block_name
from pacekeeper.core.tensor_file import TensorSpec
from pacekeeper.trainer.block_state import ENDINGS, bank_of, shapes_of, whole_of
from pacekeeper.trainer.checkpoint_catalog import RawTensor
from pacekeeper.trainer.model import MoETransformer

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def block_specs(model: MoETransformer, block: Block) -> tuple[TensorSpec, ...]:
    """Names, dtypes and shapes of the block's tensors, names ascending; also of blocks that live
    elsewhere.
    """
    shapes, dtype = shapes_of(model, block), DTYPE_NAMES[model.dtype]
    return tuple(
        TensorSpec(name=name, dtype=dtype, shape=shapes[name.partition(".")[0]])
        for name in sorted(f"{name}{ending}" for name in shapes for ending in ENDINGS)
    )


def piece_bytes(model: MoETransformer, layout: Layout) -> dict[Piece, int]:
    """Bytes of every piece of the layout's blocks."""
    found: dict[Piece, int] = {}
    for block in layout.blocks():
        for spec in block_specs(model, block):
            piece = Piece.of(block, spec.name)
            found[piece] = found.get(piece, 0) + spec.size_bytes
    return found


def copy_of_pieces(
    model: MoETransformer, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece]
) -> dict[Piece, dict[str, Tensor]]:
    """Copies in host memory of pieces of blocks that this rank holds; names ascend.

    Rows of one bank are copied together: training waits for this.
    """
    alike: dict[tuple[BlockKind, int, str], list[Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.block.kind, piece.block.layer, piece.kind), []).append(piece)
    found: dict[Piece, dict[str, Tensor]] = {piece: {} for piece in pieces}
    for (_, _, kind), own in alike.items():
        bank = bank_of(model, own[0].block)
        slots = [bank.held.index(piece.block.index) for piece in own]
        are_all = slots == list(range(len(bank.held)))
        for name in sorted(bank.shapes):
            whole = whole_of(optimizer, bank.get_parameter(name), kind)
            if not are_all:  # indexing copies
                whole = whole[slots].to("cpu")
            rows = whole.to("cpu", copy=are_all).contiguous()
            for piece, row in zip(own, rows.unbind(), strict=True):
                found[piece][f"{name}.{kind}" if kind else name] = row
    return found


def to_tensors(
    model: MoETransformer, block: Block, raw: Mapping[str, RawTensor], *, are_weights: bool = False
) -> dict[str, Tensor]:
    """The tensors in what was read; `are_weights`: without moments. Raises DataError where they do
    not fit this model's block.
    """
    specs = [spec for spec in block_specs(model, block) if not (are_weights and "." in spec.name)]
    if [(n, raw[n].dtype, raw[n].shape) for n in sorted(raw)] != [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]:
        raise DataError(f"{block_name(block)}: names, dtypes or shapes are of another model")
    dtype = model.dtype
    return {
        spec.name: torch.frombuffer(bytearray(raw[spec.name].data), dtype=dtype).view(spec.shape)
        for spec in specs
    }
