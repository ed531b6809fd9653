"""Snapshots in memory and on a partner: what is left after deaths, and what is taken from where."""

import logging
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind
from pacekeeper.trainer.checkpoint import in_memory as snapshots
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.restore import MEMORY
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.distributed import checked_payload
from pacekeeper.trainer.groups.group import PeerLost
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.toy.engine.worker import Rank
from support.checkpoints import TINY
from support.thread_ranks import State, ThreadRanks

CONFIG = replace(
    TINY,
    steps=100,
    num_layers=2,
    num_experts=4,
    rows_per_step=4,
    replicas=1,
    clock="cpu",
    snapshot_period_steps=1,
    checkpoint_period_steps=99,
)
NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def job_in(directory: Path, config: TrainConfig = CONFIG) -> ThreadRanks:
    """Four ranks on two nodes, each expert on one of them."""
    layout = even_layout(
        ranks=range(4), num_layers=2, num_experts=4, replicas=1,
        num_virtual_shards=config.num_heads, generation=2,
    )  # fmt: skip
    config = replace(config, checkpoint_dir=config.checkpoint_dir and str(directory / "kept"))
    return ThreadRanks(config=config, layout=layout, directory=directory, node_of=NODES)


def trained(job: ThreadRanks, steps: int) -> list[dict[Block, State]]:
    """The blocks after each step; none of step 0."""
    states: list[dict[Block, State]] = [{}]
    for _ in range(steps):
        job.train(1)
        states.append(job.blocks())
    return states


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def newest(job: ThreadRanks) -> list[int]:
    """Of each rank, the step of the newest complete snapshot."""
    return [rank.checkpoints.snapshots.kept[0].id.step for rank in job.ranks.values()]


def experts_on(job: ThreadRanks, ranks: Collection[int]) -> set[Block]:
    return {
        Block(BlockKind.EXPERT, layer, expert)
        for layer in range(2)
        for rank in ranks
        for expert in job.layout.experts_on(rank, layer)
    }


@pytest.mark.parametrize("victims", [(3,), (2, 3), (1,)])
def test_all_go_back_to_the_newest_snapshot_though_a_whole_node_is_gone(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    """Without storage: what the dead had copied lies with their keepers, on the other node."""
    job = job_in(tmp_path, replace(CONFIG, snapshot_period_steps=2))
    states = trained(job, 5)
    chosen = job.die(victims)
    assert chosen.restore == (MEMORY,) and not chosen.only_lost and job.step == 4
    found = job.blocks()
    assert found.keys() == states[4].keys()
    assert all(same(state, states[4][block]) for block, state in found.items())
    assert not same(found[Block(BlockKind.HEAD)], states[5][Block(BlockKind.HEAD)])
    job.close()


def test_it_trains_on_from_there_as_if_nothing_had_been(tmp_path: Path) -> None:
    """On fewer ranks sums have another order: float64, and nearly the same."""
    job, other = job_in(tmp_path / "a"), job_in(tmp_path / "b")
    other.train(5)
    job.train(3)
    job.die([2, 3])
    job.train(2)
    theirs = other.blocks()
    for block, state in job.blocks().items():
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, theirs[block][name], rtol=1e-9, atol=1e-12)
    for one in (job, other):
        one.close()


def test_of_partial_checkpoints_lost_experts_come_from_memory_where_that_is_newer(
    tmp_path: Path,
) -> None:
    config = replace(
        CONFIG, experts_per_checkpoint=1, lost_tokens_limit=0.0, checkpoint_dir="x",
        checkpoint_period_steps=2, snapshot_period_steps=3,
    )  # fmt: skip
    job = job_in(tmp_path, config)
    states = trained(job, 4)
    lost = experts_on(job, [3])
    before = job.ranks[0].checkpoints.partial.account.routed
    chosen = job.die([3])
    assert chosen.only_lost and job.step == 4
    found = job.blocks()
    of_step: dict[Block, int] = {}
    for block, state in found.items():
        (of_step[block],) = (s for s in (4, 3, 2, 1) if same(state, states[s][block]))
    assert {step for block, step in of_step.items() if block not in lost} == {4}
    # Of each the newest: step 4's checkpoint has one expert of each layer, step 3's snapshot all.
    storage = open_storage(f"{job.config.checkpoint_dir}/{job.config.job}")
    older = {e.piece.block for e in read_manifest(storage, complete_ids(storage)[0]).older}
    assert {b: of_step[b] for b in lost} == {b: 3 if b in older else 4 for b in lost}
    assert lost & older and lost - older, "some from either"
    books = job.ranks[0].checkpoints.partial.books
    assert sum(books.lost) > 0 and books.routed == [list(counts) for counts in before]
    job.close()


def test_storage_is_taken_where_it_is_newer_than_memory(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_dir="x", checkpoint_period_steps=4, snapshot_period_steps=3)
    job = job_in(tmp_path, config)
    states = trained(job, 5)
    chosen = job.die([3])
    assert chosen.restore[1:] == (MEMORY,) and job.step == 4
    assert all(same(state, states[4][block]) for block, state in job.blocks().items())
    assert job.ranks[0].checkpoints.snapshots.kept == (), (
        "what is older than where the run is, is let go"
    )
    job.close()


def test_where_owner_and_keeper_died_nothing_is_left_of_it(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.train(2)
    with pytest.raises(LostStateError, match="snapshot"):
        job.die([1, 3])
    job.close()


def test_a_snapshot_that_broke_on_its_way_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On two ranks the newest is complete, on two it is not: the one before is, everywhere."""
    job = job_in(tmp_path)
    states = trained(job, 2)
    travel = checked_payload.all_to_all_bytes

    def cut(outgoing: object, lengths: object, fabric: object) -> object:
        came = travel(outgoing, lengths, fabric)  # type: ignore[arg-type]
        if fabric.rank in (0, 2):  # type: ignore[attr-defined]
            raise PeerLost("cut")
        return came

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "all_to_all_bytes", cut)
        job.train(1)
    assert "snapshot of step=3 is given up: cut" in caplog.text
    assert newest(job) == [2, 3, 2, 3]
    job.train(1)
    assert set(newest(job)) == {2, 3}, "no more"
    job.die([3])
    assert job.step == 2
    assert all(same(state, states[2][block]) for block, state in job.blocks().items())
    job.train(2)
    assert set(newest(job)) == {4}
    job.close()


def test_training_goes_on_while_a_snapshot_is_on_its_way_and_skips_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    job = job_in(tmp_path)
    gate, travel = threading.Event(), checked_payload.all_to_all_bytes

    def slow(*arguments: object) -> object:
        assert gate.wait(60.0)
        return travel(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshots, "all_to_all_bytes", slow)

    def go_on(rank: Rank) -> tuple[int, ...]:
        rank.take_place()
        for _ in range(3):
            ballot = rank.do_step()
            rank.save(is_storing=ballot.is_storing, is_copying=ballot.is_copying)
        rank.fabric.exchange([1.0])
        gate.set()
        rank.end_saves()
        return tuple(kept.id.step for kept in rank.checkpoints.snapshots.kept)

    told: list[tuple[int, str, bool]] = []

    def tell(self: object, *, step: int, outcome: str, in_memory: bool, **_: object) -> None:
        told.append((step, outcome, in_memory))

    monkeypatch.setattr(hooks.Hooks, "report_checkpoint", tell)
    assert set(job.together(go_on).values()) == {(1,)}
    seen = [(1, "complete", True), (2, "skipped", True), (3, "skipped", True)]
    assert sorted(told) == sorted(seen * 4), "what a controller shows"
    assert job.step == 3 and "step=2 snapshot skipped" in caplog.text
    job.close()


def test_three_are_in_memory_at_most(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.train(4)
    for rank in job.ranks.values():
        assert [kept.id.step for kept in rank.checkpoints.snapshots.kept] == [4, 3]
    job.close()


def test_a_rank_alone_keeps_its_own_only(tmp_path: Path) -> None:
    layout = even_layout(
        ranks=[0], num_layers=2, num_experts=4, replicas=1, num_virtual_shards=2, generation=2
    )
    job = ThreadRanks(config=replace(CONFIG, checkpoint_dir=""), layout=layout, directory=tmp_path)
    job.train(2)
    (newest, _) = job.ranks[0].checkpoints.snapshots.kept
    assert {piece.block for piece in newest.pieces} == set(layout.blocks())
    job.close()
