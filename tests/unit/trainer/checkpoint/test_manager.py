"""Checkpoints of one rank: exact, one at a time, kept in number, skipped or failed with a word."""

import logging
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Piece
from pacekeeper.core.errors import DataError, HostError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint import async_writer
from pacekeeper.trainer.checkpoint.async_writer import SaveStatus
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.checkpoint.reader import REJECTED_FILE, damages, read_manifest
from pacekeeper.trainer.checkpoint.retention import sweep
from pacekeeper.trainer.checkpoint.storage import LocalStorage, open_storage
from pacekeeper.trainer.groups.group import SingleProcess
from support.trainees import TINY, Lone, assert_all_same


def test_what_is_restored_is_bit_by_bit_what_was_saved_and_trains_on_alike(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.train(2)
    lone.save()
    saved = lone.state()
    lone.train(2)
    later = lone.state()
    other = Lone(tmp_path)
    other.restore()
    assert other.step == 2
    assert_all_same(other.state(), saved)
    other.train(2)
    assert_all_same(other.state(), later)


def test_before_the_first_update_there_are_no_moments_to_restore(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.save()
    fresh = lone.state()
    lone.train(1)
    lone.restore()
    assert lone.states.num_updates == 0
    assert_all_same(lone.state(), fresh)


def test_a_manifest_says_what_lies_where_and_all_is_whole(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.train(3)
    lone.save()
    storage = open_storage(str(lone.root))
    manifest = read_manifest(storage, CheckpointId(run_id=1, generation=1, step=3))
    assert (manifest.job, manifest.num_updates, manifest.last_loss) == ("tiny", 3, 1.5)
    assert list(damages(storage, manifest)) == []
    expert = 8 * 16 * 8  # float64, one matrix
    sizes = {entry.piece: entry.size_bytes for entry in manifest.pieces}
    block = Block(BlockKind.EXPERT, 0, 1)
    assert [sizes[Piece(block, kind)] for kind in ("", "optimizer")] == [expert, 2 * expert]


def test_the_newest_complete_ones_stay_and_what_was_broken_off_goes(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    for _ in range(4):
        lone.train()
        lone.save()
        if lone.step == 2:
            (lone.root / CheckpointId(run_id=1, generation=1, step=2).name / MANIFEST_FILE).unlink()
    assert [CheckpointId.of_name(name).step for name in lone.names()] == [3, 4]  # type: ignore[union-attr]


def test_what_can_not_be_removed_keeps_no_checkpoint_from_being_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = Lone(tmp_path)
    lone.save()
    (lone.root / lone.names()[0] / "somebody's").mkdir()  # a directory in it is not ours
    for _ in range(4):
        lone.train()
        lone.save()
    assert lone.checkpoints.counts[SaveStatus.COMPLETE] == 5
    assert [CheckpointId.of_name(name).step for name in lone.names()] == [0, 3, 4]  # type: ignore[union-attr]
    assert "an older checkpoint in" in caplog.text and "can not be removed" in caplog.text
    assert "is not written" not in caplog.text


def test_a_part_that_never_came_is_said_with_its_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a node that does not see the directory: it wrote elsewhere, and found nothing wrong."""
    lone = Lone(tmp_path)
    one = lone.checkpoints._snapshot(lone.position, False)
    saver = async_writer.Saver(open_storage(str(lone.root)), rank=0, keep=2)
    for step, writers in enumerate(({0, 1, 5}, {0}, {0})):
        own = CheckpointId(run_id=1, generation=1, step=step)
        saver.save(
            replace(one, id=own, writers=frozenset(writers), manifest=partial(one.manifest, id=own))
        )
        assert saver.wait()
    said = [line for line in caplog.messages if "never became whole" in line]
    assert len(said) == 1 and "step00000000 never" in said[0] and "ranks [1, 5]" in said[0]


def test_strangers_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    (lone.root / "notes").mkdir(parents=True)
    for _ in range(3):
        lone.train()
        lone.save()
    assert "notes" in lone.names() and len(lone.names()) == 3


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = Lone(tmp_path)
    lone.train()
    lone.save()
    saved = lone.state()
    lone.train()
    lone.save()
    file = lone.root / lone.names()[-1] / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    lone.restore()
    assert lone.step == 1
    assert_all_same(lone.state(), saved)
    assert "its bytes are not those that were saved" in caplog.text


def test_what_could_not_be_read_pushes_nothing_out_that_can(tmp_path: Path) -> None:
    """Two are kept, the newest is damaged: after the next one, the whole one before is there."""
    lone = Lone(tmp_path)
    for _ in range(2):
        lone.train()
        lone.save()
    (lone.root / lone.names()[-1] / "rank-0.safetensors").write_bytes(b"")
    other = Lone(tmp_path, run_id=2)
    other.restore()
    other.train()
    other.save()
    assert [name[-2:] for name in other.names()] == ["01", "02", "02"]
    other.train()
    other.save()
    assert [name[-2:] for name in other.names()] == ["02", "03"]


def test_what_a_life_before_could_not_read_pushes_nothing_out_either(tmp_path: Path) -> None:
    """Steps 1 and 3 are whole, 2 is not: the life that found that out is over."""
    first = Lone(tmp_path)
    for _ in range(2):
        first.train()
        first.save()
    (first.root / first.names()[-1] / "rank-0.safetensors").write_bytes(b"")
    second = Lone(tmp_path, run_id=2)
    second.restore()
    second.train(2)
    second.save()
    third = Lone(tmp_path, run_id=3)
    third.restore()
    assert third.step == 3
    third.train()
    storage = open_storage(str(third.root))
    # It is about to write step 4, and is killed.
    sweep(storage, CheckpointId(run_id=3, generation=1, step=4), keep=2)
    assert [name[-2:] for name in third.names()] == ["01", "02", "03"]


def test_what_can_be_read_again_counts_again(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.save()
    file = lone.root / lone.names()[0] / "rank-0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(b"")
    with pytest.raises(DataError):
        lone.restore()
    assert (file.parent / REJECTED_FILE).read_text().endswith(f"instead of {len(whole)}")
    file.write_bytes(whole)
    lone.restore()
    assert not (file.parent / REJECTED_FILE).exists()


def test_another_model_does_not_spoil_what_is_not_its_own(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.save()
    with pytest.raises(DataError, match="another model"):
        Lone(tmp_path, width=16).restore()
    assert not list(lone.root.glob(f"*/{REJECTED_FILE}"))


def test_where_none_is_whole_that_is_said_with_the_way_out(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.save()
    shutil.rmtree(lone.root / lone.names()[0])
    with pytest.raises(DataError, match=r"can be read by all ranks: .*No such file.*--resume"):
        lone.restore(str(lone.root / CheckpointId(run_id=1, generation=1, step=0).name))


def test_another_course_is_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Lone(tmp_path).save()
    Lone(tmp_path, replace(TINY, seed=5)).restore()
    assert "not be the run that was saved: settings.seed: 0 there, 5 here" in caplog.text


def test_a_slow_disk_skips_a_checkpoint_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone = Lone(tmp_path)
    lone.train()
    news = lone.checkpoints.save_if_due(lone.position, is_storing=True)
    assert [one.outcome for one in news] == [SaveStatus.SKIPPED]
    assert not lone.root.exists()
    assert lone.checkpoints.counts[SaveStatus.SKIPPED] == 1
    assert "step=1 checkpoint skipped: the one before is still being written" in caplog.text


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = Lone(tmp_path)
    gate, write = threading.Event(), LocalStorage.write

    def slow(self: LocalStorage, path: str, parts: object) -> None:
        assert gate.wait(60.0)
        write(self, path, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStorage, "write", slow)
    assert lone.checkpoints.save_if_due(lone.position, is_storing=False) == []
    saved = lone.state()
    assert lone.checkpoints.is_storing
    lone.train(2)  # the copy is another one
    gate.set()
    lone.checkpoints.close()
    lone.restore()
    assert_all_same(lone.state(), saved)


def test_a_disk_that_hangs_keeps_nobody_from_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lone = Lone(tmp_path, replace(TINY, peer_timeout_s=2.0))
    lone.save()
    lone.train()
    gate = threading.Event()

    def hang(self: LocalStorage, path: str, parts: object) -> None:
        gate.wait(60.0)

    monkeypatch.setattr(LocalStorage, "write", hang)
    lone.checkpoints.save_if_due(lone.position, is_storing=False)
    lone.restore()
    assert lone.step == 0
    assert lone.checkpoints.is_storing and "still being written" in caplog.text
    gate.set()
    lone.checkpoints.close()


def test_a_disk_that_refuses_is_a_warning_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lone = Lone(tmp_path)
    lone.save()

    def full(self: LocalStorage, path: str, parts: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", full)
        lone.train()
        lone.save()
    assert "No space left on device; the one before stays" in caplog.text
    lone.train()
    lone.save()
    news = lone.checkpoints.save_if_due(lone.position, is_storing=False)
    assert news == [], "a step is saved once"
    assert lone.checkpoints.counts == {
        SaveStatus.COMPLETE: 2,
        SaveStatus.WRITTEN: 0,
        SaveStatus.SKIPPED: 0,
        SaveStatus.FAILED: 1,
    }
    assert [CheckpointId.of_name(name).step for name in lone.names()] == [0, 2]  # type: ignore[union-attr]


def test_who_is_not_the_last_leaves_the_manifest_to_who_is(tmp_path: Path) -> None:
    """Two writers of a checkpoint, in any order: it counts when both parts are there."""
    lone = Lone(tmp_path)
    whole = lone.checkpoints._snapshot(lone.position, False)
    cut = list(whole.pieces.items())
    halves = [dict(cut[:3]), dict(cut[3:])]
    storage = open_storage(str(lone.root))
    outcomes = []
    for rank in (1, 0):
        saver = async_writer.Saver(storage, rank=rank, keep=2)
        saver.save(
            replace(whole, pieces=halves[rank], writers=frozenset({0, 1}), is_sweeper=rank == 0)
        )
        assert saver.wait()
        outcomes += [news.outcome for news in saver.take_news()]
        assert (MANIFEST_FILE in storage.names(whole.id.name)) == (rank == 0)
    assert outcomes == [SaveStatus.WRITTEN, SaveStatus.COMPLETE]
    lone.restore()


@pytest.mark.parametrize(
    ("resume", "run_id", "first_run_id", "steps"),
    [
        ("auto", 9, 9, [2, 1]),
        ("never", 9, 9, []),
        ("never", 2, 2, [2]),
        ("never", 3, 2, [2]),  # its launchers started it again
    ],
)
def test_which_checkpoints_may_be_gone_back_to(
    tmp_path: Path, resume: str, run_id: int, first_run_id: int, steps: list[int]
) -> None:
    for number in (1, 2):
        lone = Lone(tmp_path, run_id=number)
        lone.train(number)
        lone.save()
    other = Lone(tmp_path, replace(TINY, resume=resume), run_id=run_id, first_run_id=first_run_id)
    paths = other.checkpoints.candidates()
    assert [CheckpointId.of_name(Path(p).name).step for p in paths] == steps  # type: ignore[union-attr]
    is_new = resume == "never" and run_id == first_run_id  # it begins at step 0
    assert other.checkpoints.agree_on_start(other.group) == (() if is_new else paths)


def test_to_begin_anew_needs_no_storage_that_says_what_it_has(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    lone = Lone(tmp_path, replace(TINY, checkpoint_dir=str(loop)), run_id=2)
    with pytest.raises(HostError, match=r"can not look for checkpoints .*--resume never"):
        lone.checkpoints.agree_on_start(lone.group)
    never = replace(TINY, checkpoint_dir=str(loop), resume="never")
    assert Lone(tmp_path, never, run_id=2).checkpoints.agree_on_start(lone.group) == ()
    with pytest.raises(HostError, match="can not look"):  # it may have saved before it fell
        Lone(tmp_path, never, run_id=3, first_run_id=2).checkpoints.agree_on_start(lone.group)


def test_a_checkpoint_by_its_path_needs_no_directory_of_its_own(tmp_path: Path) -> None:
    lone = Lone(tmp_path)
    lone.train()
    lone.save()
    path = str(lone.root / lone.names()[0])
    other = Lone(tmp_path, replace(TINY, checkpoint_dir=str(tmp_path / "b"), resume=path), run_id=2)
    assert other.checkpoints.agree_on_start(other.group) == (path,)
    other.restore()
    assert other.step == 1
    silent = Checkpoints(
        replace(TINY, resume=path), rank=0, run_id=1, first_run_id=1, identity={},
        states=other.states,
    )  # fmt: skip
    assert silent.candidates() == (path,) and not silent.is_storing
    assert silent.save_if_due(other.position, is_storing=False, is_last=True) == []


def test_the_last_one_is_saved_at_any_step_and_after_a_regroup_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lone = Lone(tmp_path, replace(TINY, checkpoint_period_steps=100))
    lone.train()
    for generation in (1, 1, 2):
        layout = replace(lone.layout, generation=generation)
        at = Position(layout=layout, step=1, ticket=1, last_loss=1.0)
        lone.checkpoints.save_if_due(at, is_storing=True, is_last=True)
        lone.checkpoints.close()
    assert [CheckpointId.of_name(name).generation for name in lone.names()] == [1, 2]  # type: ignore[union-attr]
    assert caplog.text.count("complete after") == 2


def test_after_going_back_nothing_later_is_a_candidate_though_it_was_still_being_written(
    tmp_path: Path,
) -> None:
    lone = Lone(tmp_path, replace(TINY, checkpoints_kept=9))
    lone.grow(2)
    paths = lone.checkpoints.agree_on_earlier(1, 1, SingleProcess())
    assert [path.rpartition("-step")[2] for path in paths] == ["00000001"]
    lone.grow(1)  # of the course that was left
    assert lone.checkpoints.candidates() == paths
