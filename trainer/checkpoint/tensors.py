"""Blocks as a checkpoint holds them: tensors with names, dtypes and shapes that can be checked."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import Piece, block_name
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_states import WEIGHTS, BlockStates, StateSpec
from pacekeeper.trainer.checkpoint.reader import RawTensor
from pacekeeper.trainer.checkpoint.staging import ToHost, at_once

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def piece_specs(states: BlockStates, piece: Piece) -> list[StateSpec]:
    """The tensors of a whole piece, wherever it lives: named and ordered as by `copy_pieces`."""
    return [spec for spec in states.specs(piece.block) if spec.kind == piece.kind]


def piece_bytes(states: BlockStates, layout: Layout) -> dict[Piece, int]:
    """Bytes of every piece of the layout's blocks; 0 where a block has nothing of the kind."""
    pieces = (Piece(block, kind) for block in layout.blocks() for kind in states.kinds)
    return {p: sum(spec.size_bytes for spec in piece_specs(states, p)) for p in pieces}


def piece_rows(states: BlockStates, pieces: Iterable[Piece]) -> dict[Piece, int]:
    """Into how many strips each can be cut: rows of its longest tensor."""
    return {
        piece: max((_rows(spec.shape)[0] for spec in piece_specs(states, piece)), default=1)
        for piece in pieces
    }


def copy_pieces(
    states: BlockStates, pieces: Sequence[Piece], to_host: ToHost = at_once
) -> dict[Piece, dict[str, Tensor]]:
    """Copies in host memory of pieces, or strips of them, of blocks held here; names ascend.

    Training waits for this: rows of one stack are copied together.
    """
    found: dict[Piece, dict[str, Tensor]] = {piece: {} for piece in pieces}
    stacks: dict[tuple[BlockKind, int, str], list[tuple[Piece, Tensor, int]]] = {}
    for piece in pieces:
        for name, part in states.parts(piece.block, piece.kind).items():
            if piece.strips > 1:
                whole = part.view.view(_rows(tuple(part.view.shape)))
                rows = piece.rows(len(whole))
                if rows:
                    found[piece][name] = to_host(whole[rows.start : rows.stop])
            elif part.row is None:
                found[piece][name] = to_host(part.tensor)
            else:
                found[piece][name] = part.tensor  # its place in the order of names
                stack = piece.block.kind, piece.block.layer, name
                stacks.setdefault(stack, []).append((piece, part.tensor, part.row))
    for (_, _, name), members in stacks.items():
        whole, places = members[0][1], [row for *_, row in members]
        copied = to_host(whole, None if places == list(range(len(whole))) else places)
        for (piece, *_), row in zip(members, copied.unbind(), strict=True):
            found[piece][name] = row
    return found


def to_tensors(
    states: BlockStates,
    block: Block,
    raw: Mapping[str, Sequence[RawTensor]],
    *,
    are_weights: bool = False,
) -> dict[str, Tensor]:
    """The tensors in what was read, each in strips of rows that follow each other.

    Args:
        states: Of this rank.
        block: Of the model.
        raw: Strips of each tensor, by name.
        are_weights: It was read without optimizer state.

    Raises:
        DataError: They do not fit the block.
    """
    specs = [s for s in states.specs(block) if s.kind == WEIGHTS or not are_weights]
    return tensors_of(specs, block, raw)


def tensors_of(
    specs: Sequence[StateSpec], block: Block, raw: Mapping[str, Sequence[RawTensor]]
) -> dict[str, Tensor]:
    """The tensors of a block, `specs` by ascending name. Raises DataError as `to_tensors`."""
    if [(name, *_joined_form(raw[name])) for name in sorted(raw)] != [
        (spec.name, DTYPE_NAMES[spec.dtype], _rows(spec.shape)) for spec in specs
    ]:
        raise DataError(
            f"{block_name(block)}: names, dtypes or shapes are of another model or optimizer"
        )
    return {
        spec.name: tensor_of(bytearray().join(strip.data for strip in raw[spec.name]), spec)
        for spec in specs
    }


def tensor_of(data: bytearray, spec: StateSpec) -> Tensor:
    """A tensor over these bytes."""
    if not data:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(data, dtype=spec.dtype).view(spec.shape)


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a tensor can be cut: a single value is one row."""
    return shape or (1,)


def _joined_form(strips: Sequence[RawTensor]) -> tuple[str | None, tuple[int, ...] | None]:
    """Dtype and shape of all together; None where they do not fit each other."""
    dtypes = {strip.dtype for strip in strips}
    shapes = [_rows(strip.shape) for strip in strips]
    widths = {shape[1:] for shape in shapes}
    if len(dtypes) != 1 or len(widths) != 1:
        return None, None
    return dtypes.pop(), (sum(shape[0] for shape in shapes), *widths.pop())
