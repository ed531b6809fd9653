"""Snapshots in memory and partial checkpoints of the engine; checkpoints of other models."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointId,
    RunFingerprint,
    checkpoint_of_file,
)
from pacekeeper.core.checkpoint.manifest_codec import FORMAT, encode_manifest
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint.reader import REJECTED_FILE, complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.restore import MEMORY
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from support.engine_saves import (
    SETTINGS,
    SavingEngine,
    State,
    adamw,
    assert_all_close,
    assert_all_same,
    layout_of,
    together,
    trained,
    two,
)
from support.rank_threads import ThreadGroup, run_ranks
from support.trainees import TINY, Lone

NODES = {0: 0, 1: 0, 2: 1, 3: 1}
FOUR = layout_of(range(4))  # each expert on one rank


def gone_back(
    jobs: Sequence[SavingEngine], living: Sequence[int], until: int
) -> tuple[State, State]:
    """Without the others, from what memory holds: the state then, and after `until` steps."""
    layout = replace(layout_of(living), generation=2)

    def work(group: ThreadGroup) -> tuple[State, State]:
        one = jobs[group.rank]
        one.checkpoints.snapshots.leave()
        assert one.checkpoints.sources() == (MEMORY,)
        one.go_back((MEMORY,), layout, group)
        back = one.state()
        one.train(until)
        return back, one.state()

    found = run_ranks(living, work)
    return together([back for back, _ in found]), together([end for _, end in found])


@pytest.mark.parametrize("living", [[0, 1], [1, 2, 3]])
def test_a_node_that_is_gone_left_its_state_with_its_keepers(living: list[int]) -> None:
    config = replace(SETTINGS, snapshot_period_steps=2)

    def work(group: ThreadGroup) -> tuple[SavingEngine, State]:
        one = SavingEngine(group, config, FOUR, node_of=NODES, optimizers=two)
        one.train(2)
        kept = one.state()
        one.train(3)  # past the snapshot
        return one, kept

    found = run_ranks(4, work)
    back, end = gone_back([one for one, _ in found], living, 4)
    assert_all_same(back, together([state for _, state in found]))
    assert_all_close(end, trained(FOUR, 4, optimizers=two)[1])


def test_partial_checkpoints_hold_some_experts_of_each_layer_and_say_what_is_older(
    tmp_path: Path,
) -> None:
    config = replace(
        SETTINGS, experts_per_checkpoint=1, lost_tokens_limit=0.0, checkpoint_dir=str(tmp_path)
    )
    layout = layout_of([0, 1])

    def work(group: ThreadGroup) -> list[State]:
        one, states = SavingEngine(group, config, layout), []
        for step in range(1, 4):
            one.train(step)
            states.append(one.state())
        return states

    steps = [together(states) for states in zip(*run_ranks(2, work), strict=True)]
    storage = open_storage(str(tmp_path / SETTINGS.job))
    manifest = read_manifest(storage, complete_ids(storage)[0])
    assert manifest.id.step == 3 and sum(manifest.lost_tokens) > 0
    assert sum(map(sum, manifest.account.routed)) == 3 * 2 * 2 * 7 * 10  # top 2, 2 layers

    def again(group: ThreadGroup) -> tuple[State, int]:
        one = SavingEngine(group, config, layout, run_id=2)
        return one.state(), sum(one.checkpoints.partial.account.lost)

    found = run_ranks(2, again)
    state = together([state for state, _ in found])
    of_step = {e.piece.block: checkpoint_of_file(e.file) for e in manifest.pieces}
    older = set()
    for block, one in of_step.items():
        assert one is not None
        wanted = dict(steps[one.step - 1][block])
        if block.kind is BlockKind.EXPERT:  # one count for the stack: that of the newest
            wanted |= {n: t for n, t in steps[2][block].items() if n.endswith(".step")}
        assert_all_same({block: state[block]}, {block: wanted})
        older |= {block} if one.step < 3 else set()
    assert {block.kind for block in older} == {BlockKind.EXPERT}
    assert [len([b for b in older if b.layer == layer]) for layer in (0, 1)] == [3, 3]
    assert {lost for _, lost in found} == {sum(manifest.lost_tokens)}


@pytest.mark.parametrize("experts_per_snapshot", [0, 2])
def test_lost_experts_alone_come_from_the_newest_copy_while_the_others_stay(
    tmp_path: Path, experts_per_snapshot: int
) -> None:
    """Rank 3 dies: its experts return from memory, or from storage where that is newer."""
    config = replace(
        SETTINGS,
        experts_per_checkpoint=1,
        experts_per_snapshot=experts_per_snapshot,
        snapshot_period_steps=1,
        lost_tokens_limit=0.0,
        checkpoint_dir=str(tmp_path),
    )

    def work(group: ThreadGroup) -> tuple[SavingEngine, list[State]]:
        one, states = SavingEngine(group, config, FOUR, node_of=NODES), []
        for step in range(1, 4):
            one.train(step)
            states.append(one.state())
        return one, states

    found = run_ranks(4, work)
    steps = [together(states) for states in zip(*(s for _, s in found), strict=True)]
    lost = {block for block in FOUR.blocks() if FOUR.holders(block) == (3,)}
    layout = replace(layout_of([0, 1, 2]), generation=2)

    def go_on(group: ThreadGroup) -> tuple[dict[Block, int], State]:
        one = found[group.rank][0]
        one.checkpoints.snapshots.leave()
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        refill = one.checkpoints.stage_lost(
            one.checkpoints.sources(), FOUR, layout, group, one.engine.num_steps
        )
        assert refill is not None
        one.engine.commit_move(one.engine.prepare_move(layout, groups, refill.state))
        one.checkpoints.count_lost(refill)
        one.group = group
        state = one.state()
        one.train(4)
        return dict(refill.steps), state

    after = run_ranks([0, 1, 2], go_on)
    (of_step,) = {tuple(sorted(of_step.items())) for of_step, _ in after}
    saved = dict(of_step)
    assert saved.keys() == lost
    state = together([one for _, one in after])
    for block in steps[2]:
        wanted = dict(steps[saved.get(block, 3) - 1][block])
        if block in lost:  # the count of steps is that of the experts that stayed
            wanted |= {n: t for n, t in steps[2][block].items() if n.endswith(".step")}
        assert_all_same({block: state[block]}, {block: wanted})
    if experts_per_snapshot:
        assert set(saved.values()) > {3}, "some are older than the newest snapshot"
    else:
        assert set(saved.values()) == {3}, "the newest snapshot has all"


# Of the byte model, which the engine followed: what its checkpoints name.
BYTE_MODEL: RunFingerprint = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "expert_hidden_size": 64, "num_experts": 4,
    "experts_per_token": 2, "row_tokens": 128, "dtype": "float32", "seed": 0, "rows_per_step": 8,
    "learning_rate": 0.003, "weight_decay": 0.01, "warmup_steps": 20, "balance_loss": 0.01,
    "corpus": 2401363114,
}  # fmt: skip


@pytest.mark.parametrize("is_named", [True, False])
def test_a_checkpoint_of_the_byte_model_is_refused_in_a_sentence(
    tmp_path: Path, is_named: bool
) -> None:
    """By its path, or where the job saves. Blocks and checksum are right: its format tells."""
    lone = Lone(tmp_path, replace(TINY, job=SETTINGS.job), num_layers=2, num_experts=4)
    lone.grow(1)
    storage = open_storage(str(lone.root))
    one = CheckpointId(run_id=1, generation=1, step=1)
    manifest = replace(read_manifest(storage, one), identity=BYTE_MODEL)
    now, then = (b'{"format":%d' % number for number in (FORMAT, FORMAT - 1))
    path = f"{one.name}/{MANIFEST_FILE}"
    storage.publish(path, encode_manifest(manifest).replace(now, then))
    config = replace(SETTINGS, resume=str(lone.root / one.name) if is_named else "auto")
    directory = tmp_path / "own" if is_named else tmp_path
    with pytest.raises(DataError) as caught:
        trained(layout_of([0]), 2, directory=directory, config=config, run_id=2)
    assert f"{lone.root}/{path}: format 4, of the byte model" in caught.value.what
    assert not [*tmp_path.rglob(REJECTED_FILE)], "it is not damaged"


def test_a_checkpoint_of_another_optimizer_is_of_another_model(tmp_path: Path) -> None:
    trained(layout_of([0]), 1, directory=tmp_path, optimizers=two)
    with pytest.raises(DataError):
        trained(layout_of([0]), 2, directory=tmp_path, optimizers=adamw, run_id=2)
    assert not [*tmp_path.rglob(REJECTED_FILE)]
