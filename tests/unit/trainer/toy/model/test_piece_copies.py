"""Copies of pieces: what is looked up once is looked up anew when banks hold something else."""

from dataclasses import replace

import torch

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.write_plan import cut_pieces
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.staging import at_once
from pacekeeper.trainer.checkpoint.tensors import PieceCopies, piece_bytes, piece_rows
from pacekeeper.trainer.toy.model.block_state_dict import (
    load_blocks,
    ordered_parameters,
    read_block,
)
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from support.checkpoints import TINY

CONFIG = replace(TINY, num_experts=4)
LAYOUT = even_layout(
    ranks=[0, 1], num_layers=1, num_experts=4, replicas=1, num_virtual_shards=2, generation=1
)


def rank_0() -> tuple[MoETransformer, torch.optim.Optimizer]:
    model = MoETransformer(CONFIG, LAYOUT, 0)
    return model, torch.optim.AdamW(ordered_parameters(model))


def experts(*numbers: int) -> tuple[Piece, ...]:
    return tuple(Piece(Block(BlockKind.EXPERT, 0, number)) for number in numbers)


def test_a_copy_is_of_the_values_as_they_are_now() -> None:
    model, optimizer = rank_0()
    copies, pieces = PieceCopies(model, optimizer), experts(*LAYOUT.experts_on(0, 0))
    before = copies.of(pieces)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    after = copies.of(pieces)
    for piece in pieces:
        now = read_block(model, optimizer, piece.block)
        for name, tensor in after[piece].items():
            assert torch.equal(tensor, now[name])
            assert not torch.equal(tensor, before[piece][name])


def test_after_a_move_the_same_pieces_lie_elsewhere() -> None:
    """The bank's rows are others: what was known of them before would copy another expert."""
    model, optimizer = rank_0()
    copies = PieceCopies(model, optimizer)
    (first, second), *_ = LAYOUT.experts_on(0, 0), None
    pieces = experts(second)
    was = {name: t.clone() for name, t in copies.of(pieces)[pieces[0]].items()}
    dense = [b for b in LAYOUT.blocks() if b.kind is not BlockKind.EXPERT]
    held = [b for b in dense if 0 in LAYOUT.holders(b)]
    load_blocks(model, optimizer, [*held, pieces[0].block], {}, 0)  # `first` has gone
    assert first != second
    assert all(torch.equal(t, was[n]) for n, t in copies.of(pieces)[pieces[0]].items())


def test_strips_together_are_the_whole_and_names_ascend() -> None:
    model, optimizer = rank_0()
    copies = PieceCopies(model, optimizer)
    whole = Piece(Block(BlockKind.EMBEDDING, 0, 0))
    strips = whole.cut(3)
    found = copies.of((whole, *strips))
    assert list(found[whole]) == sorted(found[whole])
    for name, tensor in found[whole].items():
        parts = [found[strip][name] for strip in strips if name in found[strip]]
        assert torch.equal(torch.cat(parts), tensor)


def test_of_many_pieces_in_turn_only_the_newest_are_remembered() -> None:
    model, optimizer = rank_0()
    copies = PieceCopies(model, optimizer)
    all_pieces = [experts(LAYOUT.experts_on(0, 0)[0]) for _ in range(100)]
    for pieces in all_pieces:
        copies.of(pieces)
    assert len(copies._known) <= 16


def test_every_piece_of_a_rank_can_be_copied_at_once() -> None:
    model, optimizer = rank_0()
    sizes = piece_bytes(model, LAYOUT)
    cuts = cut_pieces(LAYOUT, sizes, piece_rows(model, sizes))
    own = tuple(piece for piece in cuts if 0 in LAYOUT.holders(piece.block))
    found = PieceCopies(model, optimizer).of(own, at_once)
    for piece in own:
        assert sum(t.nbytes for t in found[piece].values()) == piece_size(model, piece)


def piece_size(model: MoETransformer, piece: Piece) -> int:
    from pacekeeper.trainer.toy.model.block_state_dict import shapes_of

    rows = ((len(piece.rows(s[0])), *s[1:]) for s in shapes_of(model, piece.block).values())
    return sum(torch.Size(shape).numel() for shape in rows) * model.dtype.itemsize
