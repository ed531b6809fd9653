"""The power fails at any moment: what was complete before is there, and exact."""

import random
import shutil
from pathlib import Path

import pytest

from pacekeeper.trainer.checkpoint.storage import open_storage
from support.power_loss import Disk
from support.trainees import Lone, State, assert_all_same


@pytest.mark.parametrize("luck", [0.0, 0.5, 1.0])
def test_what_was_complete_outlives_the_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, luck: float
) -> None:
    """Two of four stay, so some are swept, too; `luck`: of what was not synced."""
    base, left, draw = tmp_path / "disk", tmp_path / "left", random.Random(0)
    base.mkdir()
    left.mkdir()
    wanted: dict[int, State] = {}
    cuts: list[int] = []  # the newest step that was complete at each cut

    def cut() -> None:
        disk.after_power_loss(left / str(len(cuts)), draw, luck)
        cuts.append(max(wanted, default=0))

    disk = Disk(base=base, before_each=cut)
    lone = Lone(base / "made" / "here")
    with monkeypatch.context() as patch:
        disk.watch(patch)
        for _ in range(4):
            lone.train()
            state = lone.state()
            lone.save()
            wanted[lone.step] = state
    disk.release()
    assert {0, 1, 2, 3} == set(cuts)
    seen = tmp_path / "seen"
    other = Lone(seen / "made" / "here")
    for number, newest in enumerate(cuts):
        shutil.rmtree(seen, ignore_errors=True)
        (left / str(number)).rename(seen)
        if newest == 0 and not other.checkpoints.candidates():
            continue
        other.restore()
        assert other.step >= newest
        assert_all_same(other.state(), wanted[other.step])


def test_a_checkpoint_that_is_removed_is_never_seen_half_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "left").mkdir()
    cuts: list[list[str]] = []

    def cut() -> None:
        for seed in range(40):
            at = tmp_path / "left" / str(len(cuts))
            disk.after_power_loss(at, random.Random(seed), 0.5)
            cuts.append(open_storage(str(at)).names("a"))

    disk = Disk(base=tmp_path / "disk", before_each=cut)
    with monkeypatch.context() as patch:
        disk.watch(patch)
        storage = open_storage(str(tmp_path / "disk"))
        for name in ("file", "manifest.json"):
            storage.publish(f"a/{name}", b"x")
        first = len(cuts)
        storage.remove("a")
        cut()
    disk.release()
    cuts = cuts[first:]
    assert any("manifest.json" not in names for names in cuts)
    assert all("file" in names for names in cuts if "manifest.json" in names)
