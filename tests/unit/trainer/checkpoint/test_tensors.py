"""Copies of pieces, and tensors of what was read: any types, stacks, strips, nothing at all."""

import pytest
import torch

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.block_states import read_block
from pacekeeper.trainer.checkpoint.reader import RawTensor
from pacekeeper.trainer.checkpoint.tensors import (
    DTYPE_NAMES,
    copy_pieces,
    piece_bytes,
    piece_rows,
    to_tensors,
)
from support.block_states import MixedStates, layout_of

LAYOUT = layout_of([0])
ATTENTION = Block(BlockKind.ATTENTION)


def expert(number: int) -> Block:
    return Block(BlockKind.EXPERT, 0, number)


def test_a_copy_is_of_the_values_as_they_are_now() -> None:
    states, pieces = MixedStates(), [Piece(expert(2), "moments"), Piece(ATTENTION)]
    before = copy_pieces(states, pieces)
    for piece in pieces:
        for part in states.parts(piece.block, piece.kind).values():
            part.view.copy_(~part.view if part.tensor.dtype == torch.bool else part.view + 1)
    after = copy_pieces(states, pieces)
    for piece in pieces:
        now = {n: part.view for n, part in states.parts(piece.block, piece.kind).items()}
        assert list(after[piece]) == sorted(now)
        for name, tensor in after[piece].items():
            assert torch.equal(tensor, now[name]) and not torch.equal(tensor, before[piece][name])


def test_experts_of_a_stack_are_copied_together_and_each_gets_its_own() -> None:
    states, asked = MixedStates(held=[2, 0, 1], seed=3), []

    def to_host(tensor: torch.Tensor, rows: object = None) -> torch.Tensor:
        asked.append(rows)
        return tensor.clone() if rows is None else tensor[list(rows)]  # type: ignore[call-overload]

    everybody = [Piece(expert(number)) for number in (2, 0, 1)]
    some = [Piece(expert(number), "moments") for number in (1, 2)]
    for pieces in (everybody, some):
        for piece, tensors in copy_pieces(states, pieces, to_host).items():
            wanted = states.parts(piece.block, piece.kind)
            assert all(torch.equal(t, wanted[name].view) for name, t in tensors.items())
    assert asked == [None, [2, 0]]


@pytest.mark.parametrize("strips", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["", "moments"])
def test_strips_together_are_the_whole(strips: int, kind: str) -> None:
    states, whole = MixedStates(), Piece(ATTENTION, kind)
    found = copy_pieces(states, (whole, *whole.cut(strips)))
    for name, tensor in found[whole].items():
        parts = [found[strip][name] for strip in whole.cut(strips) if name in found[strip]]
        assert torch.equal(torch.cat(parts).view(tensor.shape), tensor), name


def test_sizes_are_those_of_the_copies_and_pieces_may_be_empty() -> None:
    states = MixedStates()
    sizes = piece_bytes(states, LAYOUT)
    assert sizes.keys() == {Piece(b, kind) for b in LAYOUT.blocks() for kind in states.kinds}
    found = copy_pieces(states, list(sizes))
    copied = {p: sum(t.nbytes for t in tensors.values()) for p, tensors in found.items()}
    assert copied == sizes
    assert {p.block for p, size in sizes.items() if not size and not p.kind} == {
        Block(BlockKind.HEAD)
    }
    rows = piece_rows(states, sizes)
    assert rows[Piece(ATTENTION)] == 7 and rows[Piece(ATTENTION, "other")] == 1


def raw_of(states: MixedStates, block: Block, strips: int) -> dict[str, list[RawTensor]]:
    raw: dict[str, list[RawTensor]] = {}
    for kind in states.kinds:
        for tensors in copy_pieces(states, Piece(block, kind).cut(strips)).values():
            for name, tensor in tensors.items():
                raw.setdefault(name, []).append(
                    RawTensor(
                        dtype=DTYPE_NAMES[tensor.dtype],
                        shape=tuple(tensor.shape),
                        data=tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
                    )
                )
    return raw


@pytest.mark.parametrize("strips", [1, 2, 4])
@pytest.mark.parametrize("block", [ATTENTION, expert(1), Block(BlockKind.HEAD)])
def test_what_is_read_is_what_was_copied(block: Block, strips: int) -> None:
    states = MixedStates()
    found, wanted = (
        to_tensors(states, block, raw_of(states, block, strips)),
        read_block(states, block),
    )
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "state", "widths"])
def test_what_does_not_fit_the_block_is_refused(change: str) -> None:
    states = MixedStates()
    raw = raw_of(states, ATTENTION, 2)
    match change:
        case "name":
            raw["other"] = raw.pop("mask")
        case "dtype":
            raw["mask"] = [RawTensor(dtype="U8", shape=t.shape, data=t.data) for t in raw["mask"]]
        case "shape":
            raw["mask"] = raw["mask"][:1]
        case "state":
            del raw["in.weight.mean"]
        case _:
            first, *others = raw["in.weight"]
            wide = RawTensor(dtype=first.dtype, shape=(*first.shape, 1), data=first.data)
            raw["in.weight"] = [wide, *others]
    with pytest.raises(DataError):
        to_tensors(states, ATTENTION, raw)


def test_weights_alone_are_a_state_too() -> None:
    states = MixedStates()
    raw = {
        n: t for n, t in raw_of(states, ATTENTION, 1).items() if "." not in n or n == "in.weight"
    }
    assert sorted(to_tensors(states, ATTENTION, raw, are_weights=True)) == sorted(raw)
    with pytest.raises(DataError):
        to_tensors(states, ATTENTION, raw)
