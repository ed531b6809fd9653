"""Jobs that save checkpoints, for tests: what is there, and whether the losses are right."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.checkpoint.reader import complete_ids
from pacekeeper.trainer.checkpoint.storage import open_storage
from pacekeeper.trainer.toy.engine.single_process import train_alone
from support.fleet import SMALL, Fleet


@cache
def undisturbed() -> tuple[float, ...]:
    return tuple(loss for _, loss, _ in train_alone(SMALL))


def saving(directory: Path, **values: Any) -> TrainConfig:
    return replace(
        SMALL, checkpoint_dir=str(directory / "kept"), checkpoint_period_steps=4, **values
    )


def saved(config: TrainConfig) -> list[CheckpointId]:
    """Complete checkpoints, newest first."""
    return complete_ids(open_storage(f"{config.checkpoint_dir}/{config.job}"))


def assert_losses(fleet: Fleet, ranks: tuple[int, ...], first: int) -> None:
    """Steps from `first` on; of those that were done twice, the later time counts."""
    wanted = dict(enumerate(undisturbed()))
    for rank in ranks:
        found = {line["step"]: line["loss"] for line in fleet.steps(rank)}
        assert sorted(found) == list(range(first, SMALL.steps)), rank
        for step, loss in found.items():
            assert loss == pytest.approx(wanted[step], rel=1e-9), (rank, step)
