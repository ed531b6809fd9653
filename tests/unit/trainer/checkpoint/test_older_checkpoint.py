"""A checkpoint that an older version wrote is restored to the bit: tests/golden has its files.

It is of one rank, after two steps. The second checkpoint is partial: one of its two experts lies in
a file of the first, of which nothing else was kept.
"""

import base64
import zlib
from dataclasses import replace
from pathlib import Path

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.trainees import TINY, Lone, assert_steps
from support.tree import ROOT

FILES = ROOT / "tests/golden/trainer/checkpoint/older"
PACKED = ".zlib.b64"
NEWEST = CheckpointId(run_id=1, generation=1, step=2)
CONFIG = replace(TINY, experts_per_checkpoint=1, lost_tokens_limit=0.0, steps=100)


def unpacked(folder: Path) -> Path:
    """The folder of checkpoints, as training finds it."""
    for source in FILES.rglob("*.*"):
        target = folder / CONFIG.job / source.relative_to(FILES)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = source.read_bytes()
        if source.name.endswith(PACKED):
            target = target.with_name(target.name.removesuffix(PACKED))
            data = zlib.decompress(base64.decodebytes(data))
        target.write_bytes(data)
    return folder / CONFIG.job


def test_it_is_found_whole(tmp_path: Path) -> None:
    storage = open_storage(str(unpacked(tmp_path)))
    manifest = read_manifest(storage, NEWEST)
    assert (manifest.job, manifest.num_updates, manifest.last_loss) == ("tiny", 2, 1.5)
    assert manifest.layout.ranks == (0,)
    assert manifest.account.routed == ((21, 29),)
    assert len(manifest.older) == 2  # weights and moments of an expert
    assert manifest.lost_tokens == (15,)
    assert list(damages(storage, manifest)) == []


def test_training_goes_on_from_it(tmp_path: Path) -> None:
    (older, *_) = read_manifest(open_storage(str(unpacked(tmp_path))), NEWEST).older
    lone = Lone(tmp_path, CONFIG, run_id=2, width=1)
    lone.restore()
    assert lone.step == 2
    states = Lone(tmp_path / "beside", CONFIG, width=1).grow(2)
    assert_steps(lone.state(), states, dict.fromkeys(states[2], 2) | {older.piece.block: 1})
    lone.grow(1)
    assert len(lone.names()) == 3
