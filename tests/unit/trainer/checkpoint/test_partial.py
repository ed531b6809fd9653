"""Partial checkpoints of one rank: smaller, restored block by block, and what is lost is said."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Manifest, Piece
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.policies.partial_experts import PartialSaves
from pacekeeper.trainer.checkpoint.reader import damages, read_manifest
from pacekeeper.trainer.checkpoint.retention import lent_out, sweep
from pacekeeper.trainer.checkpoint.storage import LocalStorage, open_storage
from support.trainees import TINY, Lone, State, assert_steps, same

FOUR = replace(TINY, experts_per_checkpoint=1, lost_tokens_limit=0.0, steps=100)


def four(directory: Path, config: JobConfig = FOUR, run_id: int = 1) -> Lone:
    """A rank with four experts."""
    return Lone(directory, config, run_id=run_id, num_experts=4)


def saved(lone: Lone, step: int) -> Manifest:
    storage = open_storage(str(lone.root))
    return read_manifest(storage, CheckpointId(run_id=1, generation=1, step=step))


def grown(directory: Path, config: JobConfig, steps: int) -> tuple[Lone, list[State]]:
    """A checkpoint after each step; the states then, by step (none of step 0)."""
    lone = four(directory, config)
    return lone, lone.grow(steps)


def expert(index: int) -> Block:
    return Block(BlockKind.EXPERT, 0, index)


def test_each_block_comes_from_where_it_was_saved_last(tmp_path: Path) -> None:
    """The first is full; then 2, 3, 0 by turns. After the fourth, expert 1 is of the first."""
    _, states = grown(tmp_path, FOUR, 4)
    other = four(tmp_path, run_id=2)
    other.restore()
    assert other.step == 4
    of_step = {expert(2): 2, expert(3): 3, expert(0): 4, expert(1): 1}
    assert_steps(other.state(), states, dict.fromkeys(states[4], 4) | of_step)
    assert not same(states[3][expert(3)], states[4][expert(3)]), "the test can tell steps apart"


def test_several_experts_of_a_layer_are_not_mixed_up(tmp_path: Path) -> None:
    """Two each time: 0 and 1, then 2 and 3; neither pair is all that the rank holds."""
    _, states = grown(tmp_path, replace(FOUR, experts_per_checkpoint=2), 3)
    other = four(tmp_path, run_id=2)
    other.restore()
    of_step = {expert(index): step for index, step in enumerate([2, 2, 3, 3])}
    assert_steps(other.state(), states, dict.fromkeys(states[3], 3) | of_step)


def test_a_partial_one_writes_what_is_dense_and_the_chosen_experts_only(tmp_path: Path) -> None:
    lone, _ = grown(tmp_path, FOUR, 2)
    full, part = saved(lone, 1), saved(lone, 2)
    assert full.older == () and full.own_bytes == full.size_bytes
    left_out = {entry.piece.block for entry in part.older}
    assert left_out == {expert(0), expert(1), expert(3)}
    bytes_left_out = sum(e.size_bytes for e in full.pieces if e.piece.block in left_out)
    headers = 4 * 1024  # of both; there are no tensors in them
    assert abs(full.own_bytes - bytes_left_out - part.own_bytes) < headers
    written = sum(p.stat().st_size for p in (lone.root / part.id.name).glob("*.safetensors"))
    assert written == part.own_bytes


def test_what_is_lost_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now: list[tuple[int, ...]] = []
    lone = four(tmp_path)
    for step in range(1, 5):
        lone.train()
        lone.save()
        now.append(saved(lone, step).account.routed[0])
    of_step = {2: 2, 3: 3, 0: 4, 1: 1}
    wanted = sum(now[3][e] - now[step - 1][e] for e, step in of_step.items())
    assert wanted > 0 and sum(now[3]) > wanted
    assert saved(lone, 4).lost_tokens == (wanted,)
    other = four(tmp_path, run_id=2)
    other.restore()
    (said,) = other.notes
    assert (said["event"], said["lost_tokens"], said["oldest_step"]) == ("lossy", wanted, 1)
    assert said["turns_ratio"] >= 1.0 and 0.0 < said["least_loss_tokens"] < wanted  # type: ignore[operator]
    assert said["plt"] == pytest.approx(wanted / (sum(now[3]) * FOUR.steps / 4))
    assert (
        f"restored with loss: 3 experts are as at earlier steps, back to 1; {wanted}" in caplog.text
    )
    assert other.checkpoints.partial.account.lost == (wanted,)


def test_going_back_to_a_full_one_loses_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lone, _ = grown(tmp_path, FOUR, 1)
    lone.restore()
    assert "loss" not in caplog.text
    assert lone.checkpoints.partial.account.num_faults == 0


def test_after_going_back_all_is_saved_again_and_the_loss_stays_in_the_books(
    tmp_path: Path,
) -> None:
    grown(tmp_path, FOUR, 3)
    other = four(tmp_path, run_id=2)
    other.restore()
    lost = other.checkpoints.partial.account.lost
    other.train()
    other.save()
    storage = open_storage(str(other.root))
    manifest = read_manifest(storage, CheckpointId(run_id=2, generation=1, step=4))
    assert manifest.older == () and manifest.lost_tokens == (0,)
    assert manifest.account.lost == lost and manifest.account.num_faults == 1


def test_after_one_that_failed_all_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone, _ = grown(tmp_path, FOUR, 2)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        lone.train()
        lone.save()
    lone.train()
    lone.save()
    assert saved(lone, 4).older == ()


def test_what_a_run_ends_with_is_whole(tmp_path: Path) -> None:
    lone, _ = grown(tmp_path, FOUR, 3)
    lone.train()
    lone.checkpoints.receive_votes([lone.checkpoints.own_vote(lone.step, lone.layout)])
    lone.checkpoints.save_if_due(lone.position, is_storing=False, is_last=True)
    lone.checkpoints.close()
    assert saved(lone, 4).older == ()


@pytest.mark.parametrize(("kept", "kind"), [("weights", ""), ("moments", "optimizer")])
def test_a_part_of_the_state_may_be_left_out_only(tmp_path: Path, kept: str, kind: str) -> None:
    lone, states = grown(tmp_path, replace(FOUR, partial_state=kept), 2)
    kinds = {entry.piece.kind for entry in saved(lone, 2).older}
    assert (kind in kinds) and (kinds == {""} if kept == "weights" else "" not in kinds)
    lone.restore()
    for name, tensor in lone.state()[expert(1)].items():
        is_weight = "." not in name
        step = 1 if is_weight == (kept == "weights") else 2
        assert torch.equal(tensor, states[step][expert(1)][name]), name


def test_files_stay_as_long_as_a_checkpoint_lives_from_them(tmp_path: Path) -> None:
    """Two are kept, and one with no file in common with the newest."""
    lone, _ = grown(tmp_path, FOUR, 1)
    storage = open_storage(str(lone.root))
    for step in range(2, 16):
        lone.train()
        lone.save()
        names = {one for one in lone.names() if (lone.root / one / "manifest.json").exists()}
        for name in names:
            one = CheckpointId.of_name(name)
            assert one is not None
            assert list(damages(storage, read_manifest(storage, one))) == [], (step, name)
        newest = saved(lone, step)
        assert {saved(lone, s).id.name for s in (step, step - 1)} <= names
        apart = [
            name
            for name in names
            if (one := CheckpointId.of_name(name)) and not shared(newest, saved(lone, one.step))
        ]
        assert step < 5 or apart, "what breaks one leaves another"
        assert len(lone.names()) <= 12
    assert lent_out(storage), "some directories are there for their files only"
    assert lone.names()[0] != CheckpointId(run_id=1, generation=1, step=1).name


def shared(one: Manifest, other: Manifest) -> set[str]:
    return {f.name for f in one.files} & {f.name for f in other.files}


def test_old_dense_parts_go_though_their_experts_stay(tmp_path: Path) -> None:
    lone, _ = grown(tmp_path, FOUR, 6)
    lenders = [lone.root / one.name for one in lent_out(open_storage(str(lone.root)))]
    assert lenders
    for folder in lenders:
        assert [path.name for path in folder.iterdir()] == ["rank-0-experts.safetensors"]


def test_a_file_that_breaks_does_not_take_all(tmp_path: Path) -> None:
    """An old expert file, which several checkpoints live from, is damaged."""
    lone, states = grown(tmp_path, FOUR, 9)
    newest = saved(lone, 9)
    oldest = min(newest.older, key=lambda entry: entry.file)
    path = lone.root / oldest.file
    data = bytearray(path.read_bytes())
    data[oldest.first_byte] ^= 1
    path.write_bytes(data)
    assert any(oldest.file in line for line in damages(open_storage(str(lone.root)), newest))
    lone.restore()
    assert 0 < lone.step < 9
    dense = Block(BlockKind.HEAD)
    assert same(lone.state()[dense], states[lone.step][dense])


def test_manifests_go_before_any_file_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any moment of a sweep, what has a manifest is whole."""
    lone, _ = grown(tmp_path, replace(FOUR, checkpoints_kept=9), 9)
    storage = open_storage(str(lone.root))
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        for name in lone.names():
            one = CheckpointId.of_name(name)
            if one and (lone.root / name / "manifest.json").exists():
                manifest = read_manifest(storage, one)
                assert all((lone.root / file.name).exists() for file in manifest.files), name

    unlink = Path.unlink

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        look()

    monkeypatch.setattr(Path, "unlink", unlinked)
    sweep(storage, saved(lone, 9).id, 2)
    assert looks > 5 and len(lone.names()) < 9


def test_storage_that_does_not_answer_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that can not be read now may name any of them."""
    lone, _ = grown(tmp_path, FOUR, 6)
    newest = saved(lone, 6)
    before = sorted(lone.root.rglob("*"))

    def stale(storage: LocalStorage, path: str, first: int = 0, size: int | None = None) -> bytes:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(LocalStorage, "read", stale)
    with pytest.raises(OSError, match="Stale"):
        sweep(open_storage(str(lone.root)), newest.id, 2)
    assert sorted(lone.root.rglob("*")) == before


def test_the_order_of_risk_saves_a_lone_copy_on_a_slow_rank_first() -> None:
    layout = replace(
        even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1), speeds=((3, 0.5),)
    )
    partial = PartialSaves(replace(FOUR, expert_order="risk"), [4])
    partial.count({0: [900, 900, 900, 100]})
    partial._begun = CheckpointId(run_id=1, generation=1, step=1)
    word = partial.own_vote(layout, has_failed=False)
    partial.receive_votes([word] * 4)
    choice = partial.choose(layout, 5, [Piece(block) for block in layout.blocks()])
    (sole,) = layout.experts_on(3, 0)
    experts = {p.block.index for p in choice.pieces if p.block.kind is BlockKind.EXPERT}
    assert experts == {sole}


def test_a_rank_that_came_late_does_not_take_back_how_many_experts_are_saved() -> None:
    """Dynamic-K rose before it came; the lowest rank's word alone would lower it again."""
    layout = even_layout(ranks=range(2), num_layers=1, num_experts=4, replicas=1)
    words = []
    for num_saved in (1, 2):
        partial = PartialSaves(FOUR, [4])
        partial._begun = CheckpointId(run_id=1, generation=1, step=1)
        partial.num_saved = num_saved
        words.append(partial.own_vote(layout, has_failed=False))
    partial.receive_votes(words)
    choice = partial.choose(layout, 5, [Piece(block) for block in layout.blocks()])
    assert partial.num_saved == 2
    assert sum(piece.block.kind is BlockKind.EXPERT for piece in choice.pieces) == 2


@pytest.mark.parametrize("order", ["turn", "load", "risk"])
def test_what_only_suspects_hold_is_saved_first_whatever_the_order(order: str) -> None:
    """Rank 3 alone holds an expert with few tokens; one rank was told of the finding, the others
    were not yet.
    """
    layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1)
    partial = PartialSaves(replace(FOUR, expert_order=order), [4])
    partial.count({0: [900, 900, 900, 100]})
    partial._begun = CheckpointId(run_id=1, generation=1, step=1)
    calm = partial.own_vote(layout, has_failed=False)
    (sole,) = layout.experts_on(3, 0)
    for number in range(4):
        partial.receive_votes(
            [calm, partial.own_vote(layout, has_failed=False, suspects={3}), calm]
        )
        choice = partial.choose(layout, number, [Piece(block) for block in layout.blocks()])
        experts = {p.block.index for p in choice.pieces if p.block.kind is BlockKind.EXPERT}
        assert experts == {sole}, number


def test_where_no_expert_is_left_out_no_order_loses_anything() -> None:
    layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1)
    partial = PartialSaves(replace(FOUR, experts_per_checkpoint=0, checkpoint_period_steps=0), [4])
    partial.count({0: [9, 9, 9, 1]})
    assert partial.order_bound(layout, 10) == (0.0, 1.0)


def test_a_manifest_that_can_not_go_keeps_its_files_and_holds_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone, _ = grown(tmp_path, replace(FOUR, checkpoints_kept=99), 6)
    storage = open_storage(str(lone.root))
    stuck, newest = saved(lone, 4), saved(lone, 6)
    assert stuck.older, "it lives from files of others, too"
    discard = LocalStorage.discard

    def refused(self: LocalStorage, path: str) -> None:
        if path == f"{stuck.id.name}/{MANIFEST_FILE}":
            raise OSError(1, "Operation not permitted")
        discard(self, path)

    broken = replace(stuck.id, step=2, generation=0)
    (lone.root / broken.name).mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "discard", refused)
        with pytest.raises(OSError, match="not permitted"):
            sweep(storage, newest.id, keep=2)
    assert list(damages(storage, stuck)) == list(damages(storage, newest)) == []
    assert broken.name not in lone.names()
    sweep(storage, newest.id, keep=2)
    assert list(damages(storage, newest)) == [] and list(damages(storage, stuck)) != []
