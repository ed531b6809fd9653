"""Survivors that lost an expert go back to a window as real ranks do, also from within it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.checkpoint.restore import MEMORY
from support.thread_ranks import ThreadRanks
from support.trainees import trained

CONFIG = TrainConfig(
    job="deaths",
    steps=20,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    expert_hidden_size=16,
    num_experts=4,
    rows_per_step=6,
    row_tokens=32,
    clock="cpu",
    dtype="float64",
    checkpoint_period_steps=1,
    checkpoint_window_steps=3,
)
# Each expert on one rank only.
LONELY = even_layout(
    ranks=range(3), num_layers=2, num_experts=4, replicas=1, num_virtual_shards=2, generation=2
)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[ThreadRanks]:
    config = replace(CONFIG, checkpoint_dir=str(tmp_path / "kept"))
    found = ThreadRanks(config=config, layout=LONELY, directory=tmp_path)
    yield found
    found.close()


def is_replaying(ranks: ThreadRanks) -> set[bool]:
    return {rank.checkpoints.is_replaying() for rank in ranks.ranks.values()}


def test_who_lost_an_expert_replays_and_who_loses_one_more_meanwhile_begins_it_again(
    ranks: ThreadRanks,
) -> None:
    ranks.train(5)
    assert is_replaying(ranks) == {False}
    chosen = ranks.die({2})
    assert chosen.restore and not chosen.only_lost
    assert ranks.step == 1 and is_replaying(ranks) == {True}
    ranks.train(1)
    assert ranks.step == 2 and is_replaying(ranks) == {True}
    again = ranks.die({1})
    assert again.restore and ranks.step == 1, "nobody holds a whole state"
    ranks.train(2)
    assert ranks.step == 3 and is_replaying(ranks) == {False}
    ranks.train(3)
    assert_undisturbed(ranks, 6)


def test_where_every_block_has_a_holder_a_death_costs_no_step_unless_some_are_frozen(
    tmp_path: Path,
) -> None:
    config = replace(CONFIG, checkpoint_dir=str(tmp_path / "kept"))
    pairs = even_layout(
        ranks=range(5), num_layers=2, num_experts=4, replicas=2, num_virtual_shards=2, generation=2
    )
    ranks = ThreadRanks(config=config, layout=pairs, directory=tmp_path)
    ranks.train(4)
    assert not ranks.die({4}, hosts=2).restore and ranks.step == 4
    hosts = {host.rank for host in ranks.layout.experts[0][0]}
    assert ranks.die(hosts, hosts=2).restore and is_replaying(ranks) == {True}
    first, last = sorted(ranks.ranks)
    assert all({h.rank for h in on} == {first, last} for on in ranks.layout.experts[0])
    again = ranks.die({last})
    assert again.restore and is_replaying(ranks) == {True}, "what is held is not whole"
    ranks.close()


@pytest.mark.parametrize("snapshot_every", [1, 4])
def test_snapshots_are_taken_where_a_window_would_have_more_done_again(
    tmp_path: Path, snapshot_every: int
) -> None:
    """After 6 steps the newest whole window is of steps 4 to 6: going back to it begins at 4. So
    does the snapshot of step 4, and nothing of it has to be replayed.
    """
    config = replace(
        CONFIG, checkpoint_dir=str(tmp_path / "kept"), snapshot_period_steps=snapshot_every
    )
    ranks = ThreadRanks(config=config, layout=LONELY, directory=tmp_path)
    ranks.train(6)
    chosen = ranks.die({2})
    assert chosen.restore[0] == MEMORY and is_replaying(ranks) == {False}
    assert ranks.step == (6 if snapshot_every == 1 else 4)
    ranks.train(9 - ranks.step)
    assert not ranks.die({1}).only_lost and is_replaying(ranks) == {False}, "windows go on, too"
    ranks.train(10 - ranks.step)
    assert_undisturbed(ranks, 10)
    ranks.close()


def test_where_memory_has_too_little_the_window_is_replayed_and_snapshots_wait_for_its_end(
    tmp_path: Path,
) -> None:
    """Who died, and who kept a copy for it."""
    config = replace(CONFIG, checkpoint_dir=str(tmp_path / "kept"), snapshot_period_steps=1)
    ranks = ThreadRanks(config=config, layout=LONELY, directory=tmp_path)
    ranks.train(6)
    assert ranks.die({1, 2}).restore[0] == MEMORY
    assert ranks.step == 4 and is_replaying(ranks) == {True}
    (left,) = ranks.ranks.values()
    ranks.train(1)
    assert not left.checkpoints.snapshots.kept, "some blocks are frozen"
    ranks.train(1)
    assert is_replaying(ranks) == {False}
    ranks.train(1)
    assert [kept.id.step for kept in left.checkpoints.snapshots.kept] == [7, 6]
    assert_undisturbed(ranks, 7)
    ranks.close()


def assert_undisturbed(ranks: ThreadRanks, steps: int) -> None:
    """All is as one rank alone would have it, up to the order of sums."""
    alone = even_layout(ranks=[0], num_layers=2, num_experts=4, replicas=1, num_virtual_shards=2)
    _, wanted = trained(replace(CONFIG, checkpoint_window_steps=1), alone, steps)
    found = ranks.blocks()
    assert found.keys() == wanted.keys()
    for block, tensors in wanted.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[block][name], tensor, rtol=1e-9, atol=1e-12)
