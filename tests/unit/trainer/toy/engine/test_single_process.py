"""The trainer alone saves and resumes as any job, and what it saved belongs to any job."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.trainer.checkpoint.reader import complete_ids
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.elastic.rendezvous import MOST_AHEAD_MS, newest_run_id, next_run_id
from pacekeeper.trainer.toy.engine.single_process import train_alone, train_and_save
from support.checkpoints import TINY
from support.thread_ranks import ThreadRanks

Steps = Iterable[tuple[int, float, float]]


def losses(steps: Steps) -> dict[int, float]:
    return {step: loss for step, loss, _ in steps}


def saving(directory: Path, **settings: object) -> TrainConfig:
    return replace(TINY, checkpoint_dir=str(directory), steps=9, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "begins_at"),
    [
        ({"checkpoint_period_steps": 2}, 5),  # what a run ends with is saved
        ({"checkpoint_window_steps": 3, "checkpoints_kept": 5}, 5),
        ({"checkpoint_period_steps": 0}, 5),
    ],
)
def test_it_goes_on_where_it_ended_as_if_it_had_not(
    settings: dict[str, int], begins_at: int, tmp_path: Path
) -> None:
    config = saving(tmp_path, **settings)
    wanted = losses(train_alone(config))
    assert list(wanted) == list(range(9))
    assert losses(train_and_save(replace(config, steps=5))) == {s: wanted[s] for s in range(5)}
    again = losses(train_and_save(config))
    assert again == {step: wanted[step] for step in range(begins_at, 9)}
    assert losses(train_and_save(replace(config, resume="never", steps=1))) == {0: wanted[0]}


def test_who_is_ended_early_leaves_the_checkpoints_of_its_period(tmp_path: Path) -> None:
    config = saving(tmp_path, checkpoint_period_steps=3)
    running = train_and_save(config)
    for _ in range(5):
        next(running)
    running.close()  # type: ignore[attr-defined]
    (one,) = complete_ids(open_storage(str(tmp_path / TINY.job)))
    assert one.step == 3
    wanted = losses(train_alone(config))
    assert losses(train_and_save(config)) == {step: wanted[step] for step in range(3, 9)}


def test_a_jobs_checkpoint_is_gone_on_from_alone(tmp_path: Path) -> None:
    config = saving(tmp_path / "kept", checkpoint_period_steps=4, clock="cpu")
    pair = even_layout(
        ranks=[0, 1], num_layers=1, num_experts=2, replicas=1, num_virtual_shards=2, generation=2
    )
    job = ThreadRanks(config=config, layout=pair, directory=tmp_path)
    job.train(4)
    job.close()
    wanted = losses(train_alone(config))
    assert losses(train_and_save(config)) == pytest.approx({s: wanted[s] for s in range(4, 9)})


def test_a_directory_from_a_time_to_come_makes_no_launch_come_after_it(tmp_path: Path) -> None:
    """Somebody's litter: a number one above it could be none that a vote can carry."""
    config = saving(tmp_path)
    soon = next_run_id(0) + MOST_AHEAD_MS // 2
    for run_id in (soon, 1 << 53):
        name = CheckpointId(run_id=run_id, generation=1, step=4).name
        (tmp_path / config.job / name).mkdir(parents=True)
    assert newest_run_id(config) == soon
    assert next_run_id(soon) == soon + 1 and next_run_id(7) > 7
