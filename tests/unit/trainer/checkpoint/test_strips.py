"""Large blocks are cut by rows among the ranks that hold them, and come back bit by bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint import write_plan
from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.trainees import TINY, Job, State, assert_all_same

RANKS = (0, 1, 2)
EVERYWHERE = even_layout(ranks=RANKS, num_layers=1, num_experts=2, replicas=3)


def saved_by_all(directory: Path) -> tuple[State, Manifest]:
    """A checkpoint of ranks that hold the same, and what they hold."""
    job = Job(config=replace(TINY, checkpoint_dir=str(directory)), layout=EVERYWHERE)
    job.train(1)
    storage = open_storage(str(directory / TINY.job))
    one = CheckpointId(run_id=1, generation=1, step=1)
    return job.state(), read_manifest(storage, one)


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
    state, manifest = saved_by_all(tmp_path)
    assert list(damages(open_storage(str(tmp_path / TINY.job)), manifest)) == []
    alone = even_layout(ranks=[0], num_layers=1, num_experts=2, replicas=1)
    other = Job(config=replace(TINY, checkpoint_dir=str(tmp_path)), layout=alone, run_id=2)
    assert other.step == 1
    assert_all_same(other.state(), state)


def test_a_damaged_strip_is_named(tmp_path: Path) -> None:
    _, manifest = saved_by_all(tmp_path)
    root = tmp_path / TINY.job
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
    lines = list(damages(open_storage(str(tmp_path / TINY.job)), wrong))
    assert len(lines) == 2 and all("there lie ['" in line for line in lines)
