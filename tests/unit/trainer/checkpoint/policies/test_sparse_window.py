"""Windows of one rank: all go on or all begin anew, what fails is broken off, nothing good goes."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointId,
    Manifest,
    Piece,
    WindowStart,
)
from pacekeeper.core.checkpoint.manifest_codec import decode_manifest, encode_manifest
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.async_writer import Saver, SaveStatus
from pacekeeper.trainer.checkpoint.policies.sparse_window import Save, WindowSaves, WindowVote
from pacekeeper.trainer.checkpoint.reader import complete_ids, damages, read_manifest
from pacekeeper.trainer.checkpoint.retention import sweep
from pacekeeper.trainer.checkpoint.storage import SAY_AFTER_S, LocalStorage, open_storage
from support.trainees import TINY, Lone

THREE = replace(TINY, checkpoint_window_steps=3, steps=100)
PAIR = even_layout(ranks=[0, 1], num_layers=1, num_experts=2, replicas=2)
SIZES = {Piece(b, kind): 8 for b in PAIR.blocks() for kind in ("", "optimizer")}
ROWS = dict.fromkeys(SIZES, 4)


def grown(directory: Path, steps: int) -> Lone:
    lone = Lone(directory, THREE)
    lone.grow(steps)
    return lone


def whole(lone: Lone) -> list[int]:
    """Steps of complete checkpoints, newest first."""
    return [one.step for one in complete_ids(open_storage(str(lone.root)))]


def manifest_of(lone: Lone, step: int, run_id: int = 1) -> Manifest:
    storage = open_storage(str(lone.root))
    return read_manifest(storage, CheckpointId(run_id=run_id, generation=1, step=step))


CLOSED = WindowVote(is_open=False, first_step=0, last_step=0, budget_bytes=0.0)


def next_of(
    saves: WindowSaves, step: int, *others: WindowVote, layout: Layout = PAIR, failed: bool = False
) -> Save | None:
    """What one rank writes after `step`, given what the others say."""
    own = saves.own_vote(layout, step, has_failed=failed, budget_bytes=0.0)
    saves.receive_votes([own, *others])
    return saves.next(layout, step, SIZES, ROWS, step, is_storing=False)


def test_a_window_counts_with_its_last_step_and_says_what_it_is(tmp_path: Path) -> None:
    lone = grown(tmp_path, 2)
    assert whole(lone) == [] and lone.checkpoints.counts[SaveStatus.COMPLETE] == 0
    lone.train()
    lone.save()
    assert whole(lone) == [3] and lone.checkpoints.counts[SaveStatus.COMPLETE] == 1
    manifest = manifest_of(lone, 3)
    assert manifest.window == WindowStart(step=1, num_updates=1)
    assert (manifest.steps_again, manifest.num_updates, manifest.older) == (2, 3, ())
    assert {entry.step for entry in manifest.pieces} == {1, 2, 3}
    head = Block(BlockKind.HEAD)
    assert [e.step for e in manifest.frozen if e.piece.block == head] == [1, 2]
    assert sum(manifest.lost_tokens) == 0


def test_weights_make_it_larger_than_a_checkpoint_of_one_step_by_a_sixth_per_step(
    tmp_path: Path,
) -> None:
    """1 + (W - 1) / 6 where weights are a third of the state; blocks are no points, so about."""
    spread = manifest_of(grown(tmp_path / "a", 3), 3)
    states = sum(entry.size_bytes for entry in spread.pieces)
    weights = sum(entry.size_bytes for entry in spread.frozen)
    assert weights / states == pytest.approx(2 / 6, abs=0.12)


def test_damage_anywhere_in_a_window_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    lone = grown(tmp_path, 6)
    storage = open_storage(str(lone.root))
    newest = manifest_of(lone, 6)
    assert list(damages(storage, newest)) == []
    entry = newest.frozen[-1]
    path = lone.root / entry.file
    data = bytearray(path.read_bytes())
    data[entry.first_byte] ^= 1
    path.write_bytes(data)
    (named,) = damages(storage, newest)
    assert f"step-{entry.step}-rank-0" in named and "not those that were saved" in named
    lone.restore()
    assert lone.step == 1 and lone.checkpoints.is_replaying()


def test_a_manifest_of_a_window_lacks_no_weights(tmp_path: Path) -> None:
    manifest = manifest_of(grown(tmp_path, 3), 3)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    assert manifest.window is not None
    first = manifest.frozen[0]
    for wrong in (
        {"frozen": manifest.frozen[1:]},
        {"frozen": manifest.frozen[::-1]},
        {"frozen": (replace(first, piece=replace(first.piece, strips=2)), *manifest.frozen[1:])},
        {"window": None},
        {"window": replace(manifest.window, step=2)},
        {"window": replace(manifest.window, num_updates=4)},
        {"pieces": tuple(replace(e, step=4) for e in manifest.pieces)},
        {"pieces": (replace(manifest.pieces[0], step=1), *manifest.pieces[1:])},
    ):
        with pytest.raises(ValueError, match=r"step|window|fill|lie"):
            replace(manifest, **wrong)


def test_while_blocks_are_frozen_nothing_is_saved_not_even_at_the_end(tmp_path: Path) -> None:
    grown(tmp_path, 3)
    other = Lone(tmp_path, THREE, run_id=2)
    found = other.checkpoints.stage(other.checkpoints.candidates(), other.layout, other.group)
    assert other.checkpoints.is_replaying(commits=True), "it would be, once it is in force"
    assert not other.checkpoints.is_replaying()
    other.checkpoints.apply(found)
    other.step = found.step
    assert other.step == 1 and other.checkpoints.is_replaying()
    other.train()
    assert other.checkpoints.save_if_due(other.position, is_storing=False, is_last=True) == []
    assert not other.checkpoints.is_storing and whole(other) == [3]
    other.train()
    assert other.step == 3 and not other.checkpoints.is_replaying(commits=True)
    other.save()
    assert other.checkpoints.partial.account == manifest_of(other, 3).account


def test_the_account_of_tokens_counts_no_step_twice(tmp_path: Path) -> None:
    lone = grown(tmp_path, 3)
    other = Lone(tmp_path, THREE, run_id=2)
    other.restore()
    other.train(2)
    assert other.checkpoints.partial.account == lone.checkpoints.partial.account
    assert sum(map(sum, lone.checkpoints.partial.account.routed)) > 0


def test_a_step_that_storage_refuses_breaks_the_window_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lone = grown(tmp_path, 3)

    def full(self: LocalStorage, path: str, parts: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", full)
        lone.train()
        lone.save()
    assert lone.checkpoints.counts[SaveStatus.FAILED] == 1
    for _ in range(3):
        lone.train()
        lone.save()
    assert "No space left on device; the one before stays" in caplog.text
    assert "step=5 the window from step 4 is broken off" in caplog.text
    assert whole(lone) == [7, 3] and manifest_of(lone, 7).window == WindowStart(
        step=5, num_updates=5
    )


def test_nothing_of_the_newest_whole_window_goes_while_the_next_is_written(tmp_path: Path) -> None:
    lone = grown(tmp_path, 8)
    storage = open_storage(str(lone.root))
    for step in range(9, 24):
        lone.train()
        lone.save()
        newest = complete_ids(storage)[0]
        assert newest.step == step - step % 3
        assert list(damages(storage, read_manifest(storage, newest))) == []
        sweep(storage, newest, keep=2)
        assert list(damages(storage, read_manifest(storage, newest))) == []
    kept = [CheckpointId.of_name(name) for name in lone.names()]
    assert [one.step for one in kept if one] == [18, 21, 24], "two, and the one under way"


def test_a_window_that_was_broken_off_goes_with_the_next(tmp_path: Path) -> None:
    lone = grown(tmp_path, 4)
    other = Lone(tmp_path, THREE, run_id=2)
    other.restore()
    other.train(2)
    for _ in range(3):
        other.train()
        other.save()
    assert [name[-2:] for name in other.names()] == ["03", "06"]
    assert not (lone.root / CheckpointId(run_id=1, generation=1, step=6).name).exists()


def test_all_ranks_go_on_or_all_begin_another(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(THREE, checkpoint_dir="x")
    for failed, stranger in ((True, False), (False, True), (False, False)):
        pair = [WindowSaves(config, rank=rank, run_id=1) for rank in (0, 1)]
        first = [next_of(one, 1, CLOSED) for one in pair]
        assert all(save and save.turn and save.turn.is_first for save in first)
        if stranger:  # it came later, in the place of the second
            pair[1] = WindowSaves(config, rank=1, run_id=1)
        words = [
            one.own_vote(PAIR, 2, has_failed=failed and rank == 1, budget_bytes=0.0)
            for rank, one in enumerate(pair)
        ]
        second = []
        for one in pair:
            one.receive_votes(words)
            second.append(one.next(PAIR, 2, SIZES, ROWS, 2, is_storing=False))
        starts = [save.start.step for save in second if save and save.start]
        assert starts == ([2, 2] if failed or stranger else [1, 1])
    assert caplog.text.count("broken off") == 3


def test_another_layout_begins_another_window() -> None:
    saves = WindowSaves(THREE, rank=0, run_id=1)
    one = next_of(saves, 1)
    assert one is not None and one.id.generation == 1
    two = next_of(saves, 2, layout=replace(PAIR, generation=2))
    assert two is not None and two.turn is not None and two.turn.is_first
    assert two.id == CheckpointId(run_id=1, generation=2, step=4)


def test_a_window_begins_with_the_period_and_never_beyond_the_end_of_the_run() -> None:
    saves = WindowSaves(replace(THREE, checkpoint_period_steps=5, steps=14), rank=0, run_id=1)
    begun = [
        step
        for step in range(1, 15)
        if (save := next_of(saves, step)) is not None and save.turn and save.turn.is_first
    ]
    assert begun == [5, 10]
    saves = WindowSaves(replace(THREE, checkpoint_period_steps=5, steps=12), rank=0, run_id=1)
    assert [step for step in range(1, 13) if next_of(saves, step)] == [5, 6, 7]


def test_while_storage_is_busy_the_next_window_waits_which_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saves = WindowSaves(THREE, rank=0, run_id=1)
    for step in (1, 2, 3):
        assert saves.next(PAIR, step, SIZES, ROWS, step, is_storing=True) is None
    assert caplog.text.count("the next window waits") == 1
    save = saves.next(PAIR, 4, SIZES, ROWS, 4, is_storing=False)
    assert save is not None and save.turn is not None
    saves.receive_votes([saves.own_vote(PAIR, 5, has_failed=False, budget_bytes=0.0)])
    going_on = saves.next(PAIR, 5, SIZES, ROWS, 5, is_storing=True)
    assert going_on is not None, "its own steps follow each other whatever storage does"


def test_large_weights_are_cut_among_their_holders_after_each_step(tmp_path: Path) -> None:
    """Of what waits for its turn, too: no rank copies much more than another."""
    sizes = {piece: 1 << 20 for piece in SIZES} | {
        Piece(Block(BlockKind.HEAD), kind): 8 << 20 for kind in ("", "optimizer")
    }
    rows = dict.fromkeys(sizes, 64)
    pair = [WindowSaves(THREE, rank=rank, run_id=1) for rank in (0, 1)]
    waiting: set[Piece] = set()
    for step in (1, 2, 3):
        saves = []
        for one in pair:
            own = one.own_vote(PAIR, step, has_failed=False, budget_bytes=0.0)
            one.receive_votes([own, own])
            save = one.next(PAIR, step, sizes, rows, step, is_storing=False)
            assert save is not None and save.turn is not None
            saves.append(save)
            waiting.update(p for p in save.pieces if p.block in save.turn.frozen)
        copied = [sum(sizes[p.whole] // p.strips for p in save.pieces) for save in saves]
        assert max(copied) - min(copied) <= max(copied) / 4
    assert min(p.strips for p in waiting if p.block.kind is BlockKind.HEAD) > 1


def test_a_window_that_is_late_is_told_with_the_period_or_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = Lone(tmp_path, replace(THREE, checkpoint_period_steps=2))
    lone.train(2)
    assert missed(lone) == [2]
    lone.train()
    assert missed(lone) == [], "none is due"
    lone = Lone(tmp_path, THREE)
    lone.train()
    assert missed(lone) == [], "it begins as soon as the one before is written"
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "storing_s", SAY_AFTER_S)
        lone.train()
        assert missed(lone) == [2]


def missed(lone: Lone) -> list[int]:
    """Steps of checkpoints that did not come about now that another rank still writes."""
    lone.checkpoints.receive_votes([lone.checkpoints.own_vote(lone.step, lone.layout)])
    news = lone.checkpoints.save_if_due(lone.position, is_storing=True)
    assert {one.outcome for one in news} <= {SaveStatus.SKIPPED}
    return [one.step for one in news]


def test_the_length_follows_what_is_measured_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    saves = WindowSaves(replace(THREE, checkpoint_window_steps=0), rank=0, run_id=1)
    first = next_of(saves, 1)
    assert first is not None and first.turn is None, "all at once, to measure it"
    everything = sum(SIZES.values()) / 2
    budgets = (everything, everything / 2)
    saves.receive_votes([replace(CLOSED, budget_bytes=budget) for budget in budgets])
    second = saves.next(PAIR, 2, SIZES, ROWS, 2, is_storing=False)
    assert second is not None and second.turn is not None, "the slowest rank counts"
    assert "windows of 1 steps" in caplog.text
    assert "does up to 0 steps again" in caplog.text
    assert f"windows of {second.id.step - 1} steps" in caplog.text


def test_manifests_are_last_also_of_windows(tmp_path: Path) -> None:
    lone = grown(tmp_path, 3)
    folder = lone.root / lone.names()[0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        MANIFEST_FILE,
        "part-0.json",
        *(f"step-{step}-rank-0.safetensors" for step in (1, 2, 3)),
    ]
