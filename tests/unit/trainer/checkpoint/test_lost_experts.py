"""Experts without a living host: of partial checkpoints they alone go back, else everybody does."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import Manifest, checkpoint_of_file
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import LostStateError
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_reader import Lost
from pacekeeper.trainer.checkpoint.reader import NotOursError, complete_ids, read_manifest
from pacekeeper.trainer.checkpoint.storage import open_storage
from support.trainees import Job, assert_all_same, assert_steps, same

CONFIG = JobConfig(
    job="lost",
    steps=100,
    checkpoint_period_steps=1,
    checkpoints_kept=9,
    experts_per_checkpoint=1,
    lost_tokens_limit=0.0,
    peer_timeout_s=60.0,
)
ONE_HOST_EACH = even_layout(ranks=range(4), num_layers=2, num_experts=4, replicas=1)
STAGES = even_layout(ranks=range(4), num_layers=4, num_experts=4, replicas=1, num_stages=4)


def newest(job: Job) -> Manifest:
    storage = open_storage(f"{job.config.checkpoint_dir}/{job.config.job}")
    return read_manifest(storage, complete_ids(storage)[0])


def job_in(directory: Path, config: JobConfig = CONFIG, layout: Layout = ONE_HOST_EACH) -> Job:
    return Job(config=replace(config, checkpoint_dir=str(directory)), layout=layout)


def test_lost_experts_alone_come_from_where_they_were_saved_last(tmp_path: Path) -> None:
    """The others train on from the step they stand at."""
    job = job_in(tmp_path)
    states = job.trained(5)
    steps = {
        e.piece.block: of.step for e in newest(job).pieces if (of := checkpoint_of_file(e.file))
    }
    lost = [block for block in job.layout.blocks() if job.layout.holders(block) == (3,)]
    assert {block.kind for block in lost} == {BlockKind.EXPERT}
    assert job.die([3]).only_lost and job.step == 5
    assert_steps(job.state(), states, dict.fromkeys(steps, 5) | {b: steps[b] for b in lost})
    assert any(steps[block] < 5 for block in lost), "the test can tell steps apart"
    job.train(1)
    assert job.step == 6 and newest(job).id.step == 6


def test_what_they_lose_is_counted_alike_on_all_ranks_and_once(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    job.train(5)
    manifest = newest(job)
    tokens = {entry.piece.block: entry.tokens for entry in manifest.pieces}
    routed, on_3 = manifest.account.routed, [job.layout.experts_on(3, layer) for layer in (0, 1)]
    wanted = tuple(
        sum(routed[layer][e] - tokens[Block(BlockKind.EXPERT, layer, e)] for e in on_3[layer])
        for layer in (0, 1)
    )
    assert sum(wanted) > 0
    job.die([3])
    accounts = [one.checkpoints.partial.account for one in job.ranks.values()]
    assert [(a.lost, a.num_faults) for a in accounts] == [(wanted, 1)] * 3
    job.train(1)
    after = newest(job)
    assert after.older == () and after.account.lost == wanted and sum(after.lost_tokens) == 0


def test_in_full_mode_everybody_goes_back_to_one_state(tmp_path: Path) -> None:
    job = job_in(tmp_path, replace(CONFIG, experts_per_checkpoint=0, checkpoint_period_steps=2))
    states = job.trained(5)
    chosen = job.die([3])
    assert chosen.restore and not chosen.only_lost and job.step == 4
    assert_all_same(job.state(), states[4])
    assert not same(states[4][Block(BlockKind.HEAD)], states[5][Block(BlockKind.HEAD)])


def test_where_a_dense_block_is_lost_everybody_goes_back(tmp_path: Path) -> None:
    """Stages of a rank each: the layers of the dead lived there only."""
    job = job_in(tmp_path, layout=STAGES)
    states = job.trained(4)
    chosen = job.die([3])
    assert chosen.restore and not chosen.only_lost and job.step == 4
    assert same(job.state()[Block(BlockKind.HEAD)], states[4][Block(BlockKind.HEAD)])


def test_one_that_not_all_can_read_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """Expert 3 of the first layer is saved at step 3 again, and damaged there."""
    job = job_in(tmp_path)
    states = job.trained(3)
    lost = Block(BlockKind.EXPERT, 0, 3)
    (entry, *_) = (e for e in newest(job).pieces if e.piece.block == lost)
    assert checkpoint_of_file(entry.file) == newest(job).id
    path = tmp_path / job.config.job / entry.file
    data = bytearray(path.read_bytes())
    data[entry.first_byte] ^= 1
    path.write_bytes(data)
    job.die(job.layout.holders(lost))
    assert job.step == 3 and same(job.state()[lost], states[1][lost])


@pytest.mark.parametrize(("window_steps", "at_step"), [(2, 2), (1, 1)])
def test_no_lost_expert_comes_from_a_window_or_from_a_course_that_was_left(
    tmp_path: Path, window_steps: int, at_step: int
) -> None:
    """Of a checkpoint of step 2, when the others stand at `at_step`."""
    config = replace(CONFIG, experts_per_checkpoint=0, checkpoint_window_steps=window_steps)
    job = job_in(tmp_path, config)
    job.train(2)
    path = f"{tmp_path}/{CONFIG.job}/{newest(job).id.name}"
    lost = Lost(blocks=frozenset([Block(BlockKind.EXPERT)]), step=at_step)
    with pytest.raises(NotOursError):
        job.leader.checkpoints._reader.read(path, job.layout, lost)
    assert job.leader.checkpoints._reader.read(path, job.layout, None).manifest.id.step == 2


def test_without_any_checkpoint_lost_state_ends_the_job(tmp_path: Path) -> None:
    job = job_in(tmp_path, replace(CONFIG, checkpoint_period_steps=99))
    job.train(1)
    with pytest.raises(LostStateError, match="expert 3"):
        job.die([3])
