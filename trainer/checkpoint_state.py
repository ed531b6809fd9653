"""Blocks as a checkpoint holds them: tensors with names, dtypes and shapes that can be checked."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Block, BlockKind, Layout
from pacekeeper.core.manifest import Piece, block_name
from pacekeeper.core.tensor_file import TensorSpec
from pacekeeper.trainer.block_state import ENDINGS, bank_of, parts_of, shapes_of, whole_of
from pacekeeper.trainer.checkpoint_catalog import RawTensor
from pacekeeper.trainer.host_copies import ToHost, at_once
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


def piece_rows(model: MoETransformer, pieces: Iterable[Piece]) -> dict[Piece, int]:
    """Into how many strips each can be cut: rows of its longest tensor."""
    return {
        piece: max(shape[0] for shape in shapes_of(model, piece.block).values()) for piece in pieces
    }


def piece_shapes(model: MoETransformer, piece: Piece) -> dict[str, tuple[int, ...]]:
    """A whole piece's tensors, wherever it lives: named and ordered as `copy_of_pieces` does."""
    shapes = shapes_of(model, piece.block)
    return {_name_in(piece, name): shapes[name] for name in sorted(shapes)}


def copy_of_pieces(
    model: MoETransformer,
    optimizer: torch.optim.Optimizer,
    pieces: Sequence[Piece],
    to_host: ToHost = at_once,
) -> dict[Piece, dict[str, Tensor]]:
    """Copies in host memory of pieces of blocks that this rank holds; names ascend.

    Rows of one bank are copied together: training may wait for this.
    """
    alike: dict[tuple[BlockKind, int, str], list[Piece]] = {}
    found: dict[Piece, dict[str, Tensor]] = {}
    for piece in pieces:
        found[piece] = {}
        if piece.strips > 1:
            found[piece] = _copy_of_strip(model, optimizer, piece, to_host)
            continue
        alike.setdefault((piece.block.kind, piece.block.layer, piece.kind), []).append(piece)
    for (_, _, kind), own in alike.items():
        bank = bank_of(model, own[0].block)
        slots = [bank.held.index(piece.block.index) for piece in own]
        are_all = slots == list(range(len(bank.held)))
        for name in sorted(bank.shapes):
            whole = whole_of(optimizer, bank.get_parameter(name), kind)
            rows = to_host(whole, None if are_all else slots)
            for piece, row in zip(own, rows.unbind(), strict=True):
                found[piece][_name_in(piece, name)] = row
    return found


def _copy_of_strip(
    model: MoETransformer, optimizer: torch.optim.Optimizer, piece: Piece, to_host: ToHost
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, part in sorted(parts_of(model, piece.block).items()):
        tensor = part.of(whole_of(optimizer, part.parameter, piece.kind))
        rows = piece.rows(len(tensor))
        if rows:
            found[_name_in(piece, name)] = to_host(tensor[rows.start : rows.stop])
    return found


def _name_in(piece: Piece, parameter: str) -> str:
    return f"{parameter}.{piece.kind}" if piece.kind else parameter


def to_tensors(
    model: MoETransformer,
    block: Block,
    raw: Mapping[str, Sequence[RawTensor]],
    *,
    are_weights: bool = False,
) -> dict[str, Tensor]:
    """The tensors in what was read, each in strips of rows that follow each other; `are_weights`:
    without moments. Raises DataError where they do not fit this model's block.
    """
    specs = [spec for spec in block_specs(model, block) if not (are_weights and "." in spec.name)]
    if [(name, *_joined_form(raw[name])) for name in sorted(raw)] != [
        (spec.name, spec.dtype, spec.shape) for spec in specs
    ]:
        raise DataError(f"{block_name(block)}: names, dtypes or shapes are of another model")
    dtype = model.dtype
    return {
        spec.name: torch.frombuffer(
            bytearray().join(strip.data for strip in raw[spec.name]), dtype=dtype
        ).view(spec.shape)
        for spec in specs
    }


def _joined_form(strips: Sequence[RawTensor]) -> tuple[str | None, tuple[int, ...] | None]:
    """Dtype and shape of all together; None where they do not fit each other."""
    dtypes, widths = {strip.dtype for strip in strips}, {strip.shape[1:] for strip in strips}
    if len(dtypes) != 1 or len(widths) != 1 or not all(strip.shape for strip in strips):
        return None, None
    return dtypes.pop(), (sum(strip.shape[0] for strip in strips), *widths.pop())
