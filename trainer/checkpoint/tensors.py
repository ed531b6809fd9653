"""Blocks as a checkpoint holds them: tensors with names, dtypes and shapes that can be checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.checkpoint.manifest import Piece, block_name
from pacekeeper.core.checkpoint.safetensors_header import TensorSpec
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import RawTensor
from pacekeeper.trainer.checkpoint.staging import ToHost, at_once
from pacekeeper.trainer.toy.model.block_state_dict import ENDINGS, bank_of, shapes_of, whole_of
from pacekeeper.trainer.toy.model.stacked_params import StackedParams
from pacekeeper.trainer.toy.model.transformer import MoETransformer

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}

_MOST_KNOWN = 16  # a window has at most eight turns


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
    """A whole piece's tensors, wherever it lives: named and ordered as `PieceCopies` does."""
    shapes = shapes_of(model, piece.block)
    return {_name_in(piece, name): shapes[name] for name in sorted(shapes)}


class PieceCopies:
    """Copies in host memory of pieces of blocks that this rank holds; names ascend.

    Training waits for this: rows of one bank are copied together, and what lies where is looked up
    once for the same `pieces`, as long as banks hold what they held.
    """

    def __init__(self, model: MoETransformer, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._known: dict[int, tuple[Sequence[Piece], tuple[_Rows, ...]]] = {}

    def of(
        self, pieces: Sequence[Piece], to_host: ToHost = at_once
    ) -> dict[Piece, dict[str, Tensor]]:
        """A copy of each, whole or a strip of it."""
        known = self._known.get(id(pieces))
        if known is None or any(rows.bank.held != rows.held for rows in known[1]):
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            known = self._known[id(pieces)] = pieces, _looked_up(self._model, pieces)
        found: dict[Piece, dict[str, Tensor]] = {piece: {} for piece in pieces}
        for rows in known[1]:
            whole = whole_of(self._optimizer, rows.bank.get_parameter(rows.parameter), rows.kind)
            if rows.strip is not None:
                part = whole[rows.slots[0]][rows.strip.start : rows.strip.stop]
                found[rows.pieces[0]][rows.name] = to_host(part)
                continue
            copied = to_host(whole, rows.slots or None)
            for piece, row in zip(rows.pieces, copied.unbind(), strict=True):
                found[piece][rows.name] = row
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a bank's parameter, or of one of its moments, that are copied together: `slots` of
    what the bank `held`, one for each of `pieces`, none: all; of a strip these rows of its one.
    """

    bank: StackedParams
    held: tuple[int, ...]
    parameter: str
    kind: str
    name: str
    pieces: tuple[Piece, ...]
    slots: tuple[int, ...]
    strip: range | None = None


def _looked_up(model: MoETransformer, pieces: Sequence[Piece]) -> "tuple[_Rows, ...]":
    alike: dict[tuple[BlockKind, int, str, Piece | None], list[Piece]] = {}
    for piece in pieces:
        alone = piece if piece.strips > 1 else None
        alike.setdefault((piece.block.kind, piece.block.layer, piece.kind, alone), []).append(piece)
    found: list[_Rows] = []
    for (_, _, kind, alone), own in alike.items():
        bank = bank_of(model, own[0].block)
        slots = tuple(bank.held.index(piece.block.index) for piece in own)
        if alone is None and slots == tuple(range(len(bank.held))):
            slots = ()
        for parameter in sorted(bank.shapes):
            strip = None if alone is None else alone.rows(bank.shapes[parameter][0])
            rows = _Rows(
                bank=bank,
                held=bank.held,
                parameter=parameter,
                kind=kind,
                name=_name_in(own[0], parameter),
                pieces=tuple(own),
                slots=slots,
                strip=strip,
            )
            if strip is None or strip:
                found.append(rows)
    return tuple(found)


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
