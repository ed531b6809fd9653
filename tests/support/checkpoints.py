"""Checkpoints for tests: manifests of any layout."""

import hashlib
from dataclasses import replace

from hypothesis import strategies as st

from pacekeeper.core.checkpoint.interval import SaveCosts
from pacekeeper.core.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    Manifest,
    Piece,
    PieceEntry,
    TokenLedgerState,
)
from pacekeeper.core.layout.layout import BlockKind, Layout
from support.layouts import layouts


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def _account(draw: st.DrawFn, layout: Layout) -> TokenLedgerState:
    if draw(st.booleans()):
        return TokenLedgerState()
    tokens = st.integers(0, 1 << 40)
    return TokenLedgerState(
        routed=tuple(tuple(draw(tokens) for _ in on) for on in layout.experts),
        lost=tuple(draw(tokens) for _ in layout.experts),
        num_faults=draw(st.integers(0, 9)),
    )


@st.composite
def manifests(draw: st.DrawFn, *, is_partial: bool | None = None) -> Manifest:
    """Of any layout; its pieces lie on up to three files, in any number per file; of a partial one
    (None: of any) some files are of older checkpoints, which hold more than is used.
    """
    layout = draw(layouts(generation=draw(st.integers(2, 20_000))))
    some = st.floats(1e-9, 1e9)
    kinds = draw(st.sampled_from([("",), ("", "exp_avg", "exp_avg_sq")]))
    whole = [Piece(block, kind) for block in layout.blocks() for kind in kinds]
    most = draw(st.integers(1, 3))
    pieces = [strip for i, piece in enumerate(whole) for strip in piece.cut(1 + i % most)]
    own = CheckpointId(
        run_id=draw(st.integers(0, 1 << 50)),
        generation=layout.generation,
        step=draw(st.integers(0, 1 << 40)),
    )
    older = replace(own, generation=own.generation - 1)
    is_older = [draw(st.booleans()) if is_partial is None else is_partial, False, False]
    # All strips of a piece are as old as each other: in file 0, or by turns in files 1 and 2.
    file_of = {piece: draw(st.integers(0, 2)) for piece in whole}
    on = [1 + (file_of[p.whole] + p.strip) % 2 if file_of[p.whole] else 0 for p in pieces]
    account = _account(draw, layout)
    entries, files = [], []
    for file in sorted(set(on)):
        at = draw(st.integers(1, 200))
        name = f"{(older if is_older[file] else own).name}/rank-{file}"
        for piece, place in zip(pieces, on, strict=True):
            if place == file:
                at += draw(st.integers(0, 9)) if is_older[file] else 0
                size = draw(st.integers(0, 99))
                entries.append(
                    PieceEntry(
                        piece=piece,
                        file=name,
                        first_byte=at,
                        size_bytes=size,
                        sha256=digest(piece),
                    )
                )
                at += size
        at += draw(st.integers(0, 9)) if is_older[file] else 0
        files.append(FileEntry(name=name, size_bytes=at, header_sha256=digest(file)))
    entries.sort(key=lambda entry: pieces.index(entry.piece))
    return Manifest(
        job="any",
        id=own,
        ticket=draw(st.integers(0, 1 << 40)),
        num_updates=draw(st.integers(0, 1 << 40)),
        last_loss=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        identity={"model.family": "any", "rate": draw(some), "data": draw(st.integers(0, 1 << 32))},
        layout=layout,
        files=tuple(sorted(files, key=lambda file: file.name)),
        pieces=tuple(replace(e, tokens=tokens_of(account, e.piece)) for e in entries),
        account=account,
        costs=draw(
            st.none()
            | st.builds(
                SaveCosts, held_s=some, step_s=some, running_s=some, num_restores=st.integers(0, 9)
            )
        ),
    )


def tokens_of(account: TokenLedgerState, piece: Piece) -> int:
    """What was routed to the piece's expert; 0 of others."""
    block = piece.block
    is_counted = block.kind is BlockKind.EXPERT and bool(account.routed)
    return account.routed[block.layer][block.index] if is_counted else 0
