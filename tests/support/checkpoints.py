"""Checkpoints for tests: manifests of any layout, and real ones of a small model on one rank."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
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
from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.toy.model.block_state_dict import ModelStates, ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from support.layouts import layouts

TINY = TrainConfig(
    job="tiny",
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    expert_hidden_size=8,
    num_experts=2,
    rows_per_step=2,
    row_tokens=32,
    dtype="float64",
    checkpoint_period_steps=1,
    checkpoints_kept=2,
)


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


class Lone:
    """One rank that trains and saves; `run_id` numbers its launches."""

    def __init__(
        self, directory: Path, config: TrainConfig = TINY, *, run_id: int = 1, first_run_id: int = 0
    ) -> None:
        self.config = replace(config, checkpoint_dir=config.checkpoint_dir or str(directory))
        self.fabric = LocalFabric()
        self.layout = even_layout(
            ranks=[0], num_layers=config.num_layers, num_experts=config.num_experts, replicas=1
        )
        self.corpus = Corpus.from_stdlib(config)
        self.model = MoETransformer(self.config, self.layout, 0)
        self.model.set_layout(self.layout, self.fabric)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model), lr=1e-2)
        self.checkpoints = Checkpoints(
            self.config,
            rank=0,
            run_id=run_id,
            first_run_id=first_run_id or run_id,
            identity=run_fingerprint(self.config, self.corpus.crc()),
            states=ModelStates(self.model, self.optimizer),
        )
        self.step = 0

    @property
    def root(self) -> Path:
        return Path(self.config.checkpoint_dir, self.config.job)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            rows = range(self.config.rows_per_step)
            meter = WorkMeter()
            output = self.model(self.corpus.batch(self.step, rows), WorkPass(meter))
            output.loss_sum.backward()
            self.optimizer.step()
            self.checkpoints.partial.count(meter.routed)
            self.step += 1
            self.checkpoints.step_is_over(self.step)

    def save(self) -> None:
        """A checkpoint of now, written to its end."""
        self.checkpoints.receive_votes([self.checkpoints.encode_vote(self.step, self.layout)])
        at = Position(layout=self.layout, step=self.step, ticket=self.step, last_loss=1.5)
        self.checkpoints.save_if_due(at, is_storing=False)
        self.checkpoints.close()

    def go_back(self, paths: tuple[str, ...] | None = None) -> None:
        """To the newest, or the first of `paths`, that can be read."""
        wanted = self.checkpoints.candidates() if paths is None else paths
        found = self.checkpoints.stage(wanted, self.layout, self.fabric)
        self.checkpoints.apply(found)
        self.model.set_layout(self.layout, self.fabric)
        self.step = found.step

    def names(self) -> list[str]:
        """Directories of checkpoints, newest last."""
        return sorted(path.name for path in self.root.iterdir())

    def state(self) -> dict[str, torch.Tensor]:
        """All that training goes on from."""
        found: dict[str, torch.Tensor] = {}
        for i, parameter in enumerate(ordered_parameters(self.model)):
            found[f"{i}"] = parameter.detach().clone()
            for name, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{i}.{name}"] = value.clone()
        return found
