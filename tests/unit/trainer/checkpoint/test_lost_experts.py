"""Experts without a living host: of partial checkpoints they alone go back, else everybody does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pacekeeper.core.checkpoint.manifest import Manifest, checkpoint_of_file
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.reader import complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.checkpoints import TINY
from support.thread_ranks import State, ThreadRanks

CONFIG = replace(
    TINY,
    steps=100,
    num_layers=2,
    num_experts=4,
    rows_per_step=4,
    checkpoints_kept=9,
    experts_per_checkpoint=1,
    lost_tokens_limit=0.0,
    clock="cpu",
    replicas=1,
)


def one_host_each(config: TrainConfig = CONFIG) -> Layout:
    return even_layout(
        ranks=range(4),
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        replicas=1,
        num_virtual_shards=config.num_heads,
        num_stages=config.num_stages,
        generation=2,
    )


def newest(job: ThreadRanks) -> Manifest:
    storage = open_storage(f"{job.config.checkpoint_dir}/{job.config.job}")
    return read_manifest(storage, complete_ids(storage)[0])


def job_in(
    directory: Path, config: TrainConfig = CONFIG, layout: Layout | None = None
) -> ThreadRanks:
    config = replace(config, checkpoint_dir=str(directory / "kept"))
    return ThreadRanks(config=config, layout=layout or one_host_each(config), directory=directory)


def trained(job: ThreadRanks, steps: int) -> list[dict[Block, State]]:
    """The blocks after each step; none of step 0."""
    states: list[dict[Block, State]] = [{}]
    for _ in range(steps):
        job.train(1)
        states.append(job.blocks())
    return states


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_lost_experts_alone_come_from_where_they_were_saved_last(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    states = trained(job, 5)
    steps = {
        e.piece.block: of.step for e in newest(job).pieces if (of := checkpoint_of_file(e.file))
    }
    lost = {
        Block(BlockKind.EXPERT, layer, expert)
        for layer in range(2)
        for expert in job.layout.experts_on(3, layer)
    }
    chosen = job.die([3])
    assert chosen.only_lost and job.step == 5
    found = job.blocks()
    assert found.keys() == states[5].keys()
    for block, state in found.items():
        assert same(state, states[steps[block] if block in lost else 5][block]), block
    assert any(steps[block] < 5 for block in lost), "the test can tell steps apart"
    job.close()


def test_what_they_lose_is_counted_alike_on_all_ranks_and_once(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    trained(job, 5)
    manifest = newest(job)
    tokens = {entry.piece.block: entry.tokens for entry in manifest.pieces}
    routed, on_3 = manifest.account.routed, [job.layout.experts_on(3, layer) for layer in (0, 1)]
    wanted = tuple(
        sum(routed[layer][e] - tokens[Block(BlockKind.EXPERT, layer, e)] for e in on_3[layer])
        for layer in (0, 1)
    )
    assert sum(wanted) > 0
    job.die([3])
    accounts = [rank.checkpoints.partial.account for rank in job.ranks.values()]
    assert [(a.lost, a.num_faults) for a in accounts] == [(wanted, 1)] * 3
    job.train(1)
    after = newest(job)
    assert after.older == () and after.account.lost == wanted and sum(after.lost_tokens) == 0
    job.close()


def test_the_others_train_on_from_the_step_they_stand_at(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    trained(job, 3)
    job.die([3])
    job.train(2)
    assert job.step == 5 and newest(job).id.step == 5
    job.close()


def test_in_full_mode_everybody_goes_back_to_one_state(tmp_path: Path) -> None:
    job = job_in(tmp_path, replace(CONFIG, experts_per_checkpoint=0, checkpoint_period_steps=2))
    states = trained(job, 5)
    chosen = job.die([3])
    assert chosen.restore and not chosen.only_lost and job.step == 4
    found = job.blocks()
    assert all(same(state, states[4][block]) for block, state in found.items())
    assert not same(found[Block(BlockKind.HEAD)], states[5][Block(BlockKind.HEAD)])
    job.close()


def test_where_a_dense_block_is_lost_everybody_goes_back(tmp_path: Path) -> None:
    """One pipeline of four stages of a rank each: the layers of the dead lived there only."""
    config = replace(CONFIG, num_layers=4, num_stages=4)
    job = job_in(tmp_path, config, one_host_each(config))
    trained(job, 3)
    job.train(1)
    chosen = job.die([3])
    assert chosen.restore and not chosen.only_lost and job.step == 4
    job.close()


def test_one_that_not_all_can_read_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """Expert 3 of the first layer is saved at step 3 again, and damaged there."""
    job = job_in(tmp_path)
    states = trained(job, 3)
    lost = Block(BlockKind.EXPERT, 0, 3)
    (entry, *_) = (e for e in newest(job).pieces if e.piece.block == lost)
    assert checkpoint_of_file(entry.file) == newest(job).id
    path = tmp_path / "kept" / job.config.job / entry.file
    data = bytearray(path.read_bytes())
    data[entry.first_byte] ^= 1
    path.write_bytes(data)
    job.die(job.layout.holders(lost))
    assert job.step == 3 and same(job.blocks()[lost], states[1][lost])
    job.close()


def test_without_any_checkpoint_lost_state_ends_the_job(tmp_path: Path) -> None:
    job = job_in(tmp_path, replace(CONFIG, checkpoint_period_steps=99))
    trained(job, 1)
    with pytest.raises(LostStateError, match="expert 3"):
        job.die([3])
    job.close()
