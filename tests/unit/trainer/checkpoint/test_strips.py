"""Large blocks are cut by rows among the ranks that hold them, and come back bit by bit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest
from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.toy.model.block_state_dict import (
    ModelStates,
    ordered_parameters,
    read_block,
)
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from support.checkpoints import TINY, Lone

RANKS = (0, 1, 2)
EVERYWHERE = even_layout(ranks=RANKS, num_layers=1, num_experts=2, replicas=3)
WIDE = replace(TINY, hidden_size=16, checkpoints_kept=9)


class Member:
    """One of several ranks that hold the same."""

    def __init__(self, directory: Path, rank: int, layout: Layout = EVERYWHERE) -> None:
        config = replace(WIDE, checkpoint_dir=str(directory))
        self.layout = layout
        self.model = MoETransformer(config, layout, rank)
        self.optimizer = torch.optim.AdamW(ordered_parameters(self.model))
        draw = torch.Generator().manual_seed(1)
        for parameter in ordered_parameters(self.model):
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype),
                "exp_avg_sq": torch.rand(parameter.shape, generator=draw, dtype=parameter.dtype),
            }
        self.checkpoints = Checkpoints(
            config,
            rank=rank,
            run_id=1,
            first_run_id=1,
            identity=run_fingerprint(config, Corpus.from_stdlib(config).crc()),
            states=ModelStates(self.model, self.optimizer),
        )

    def save(self, step: int) -> None:
        at = Position(layout=self.layout, step=step, ticket=step, last_loss=1.0)
        self.checkpoints.save_if_due(at, is_storing=False)
        self.checkpoints.close()

    def state(self) -> dict[Block, dict[str, torch.Tensor]]:
        return {b: read_block(self.model, self.optimizer, b) for b in self.layout.blocks()}


def saved_by_all(directory: Path) -> tuple[list[Member], Manifest]:
    members = [Member(directory, rank) for rank in RANKS]
    for member in members:
        member.save(1)
    storage = open_storage(str(directory / WIDE.job))
    return members, read_manifest(storage, CheckpointId(run_id=1, generation=1, step=1))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_plan, "MIN_STRIP_BYTES", 512)


def test_no_rank_writes_much_more_than_the_others(tmp_path: Path) -> None:
    """The embedding is most of this model: whole pieces would be two ranks' work."""
    _, manifest = saved_by_all(tmp_path)
    assert any(entry.piece.strips > 1 for entry in manifest.pieces)
    sizes = [file.size_bytes for file in manifest.files]
    assert len(sizes) == len(RANKS) and max(sizes) < 1.1 * sum(sizes) / len(sizes)


def test_another_number_of_ranks_reads_the_same_bits(tmp_path: Path) -> None:
    members, manifest = saved_by_all(tmp_path)
    assert list(damages(open_storage(str(tmp_path / WIDE.job)), manifest)) == []
    other = Lone(tmp_path, WIDE, run_id=2)
    other.go_back()
    for block, wanted in members[0].state().items():
        found = read_block(other.model, other.optimizer, block)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), block


def test_a_damaged_strip_is_named(tmp_path: Path) -> None:
    _, manifest = saved_by_all(tmp_path)
    root = tmp_path / WIDE.job
    of = Block(BlockKind.EMBEDDING)
    entry = next(e for e in manifest.pieces if e.piece.block == of and e.piece.strip == 1)
    path = root / entry.file
    data = bytearray(path.read_bytes())
    data[entry.first_byte] ^= 1
    path.write_bytes(data)
    (line,) = damages(open_storage(str(root)), manifest)
    assert f"(strip 2 of {entry.piece.strips})" in line


def test_strips_that_were_swapped_are_told_by_their_names(tmp_path: Path) -> None:
    """Two of equal size, each in the other's place, all digests right."""
    _, manifest = saved_by_all(tmp_path)
    pairs = [
        (one, other)
        for one in manifest.pieces
        for other in manifest.pieces
        if one.piece.strips > 1
        and one.piece.whole == other.piece.whole
        and one.piece < other.piece
        and one.size_bytes == other.size_bytes
    ]
    one, other = pairs[0]
    swapped = {one: replace(other, piece=one.piece), other: replace(one, piece=other.piece)}
    wrong = replace(manifest, pieces=tuple(swapped.get(e, e) for e in manifest.pieces))
    lines = list(damages(open_storage(str(tmp_path / WIDE.job)), wrong))
    assert len(lines) == 2 and all("there lie ['" in line for line in lines)
