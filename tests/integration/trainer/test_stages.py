"""Stages and tensor groups in real processes: moved by a plan, struck by deaths, exact."""

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun
from pacekeeper.core.layout.shrink import shrink
from pacekeeper.trainer.toy.engine.job_rules import first_layout
from pacekeeper.trainer.toy.engine.single_process import train_alone
from support.fleet import SMALL, Fleet
from support.layouts import groups_of, pipelines_of

# Two pipelines of two stages: ranks (0, 1) and (2, 3).
STAGED = replace(SMALL, num_layers=3, num_stages=2, num_microbatches=2, num_heads=4)


def moved(first: Layout) -> Layout:
    """One stage has all layers, cut into uneven runs in each of the two groups."""
    groups = (
        (ShardRun(0, 0, 3), ShardRun(1, 3, 4)),
        (ShardRun(3, 0, 2), ShardRun(2, 2, 4)),
    )
    hosts = (
        (ExpertReplica(0, 0.5), ExpertReplica(3, 0.5)),
        (ExpertReplica(1, 0.2), ExpertReplica(2, 0.8)),
    )
    experts = tuple(hosts[e % 2] for e in range(STAGED.num_experts))
    return replace(
        first,
        generation=2,
        pipelines=pipelines_of([(0, STAGED.num_layers, groups)], [0.6, 0.4]),
        experts=(experts,) * STAGED.num_layers,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_plan_moves_layers_and_shards_and_a_death_closes_the_gap(
    tmp_path: Path, schedule: str
) -> None:
    """After both: every survivor works, and the losses are those of one process."""
    config = replace(STAGED, schedule=schedule)
    wanted = [loss for _, loss, _ in train_alone(config)]
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    away = moved(first_layout(config, 4))
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(away, base_generation=1)
        fleet.await_step(random.Random(seed).randint(10, 19), 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        for rank in (0, 2, 3):
            steps = fleet.steps(rank)
            assert [line["step"] for line in steps] == list(range(config.steps)), rank
            assert [line["loss"] for line in steps] == pytest.approx(wanted, rel=1e-9), rank
        left = fleet.layout(3)
        assert left.ranks == (0, 2, 3)
        assert left.mesh == shrink(away, dead=[1], generation=3).mesh


def test_who_is_left_of_a_pipeline_helps_the_other(tmp_path: Path) -> None:
    wanted = [loss for _, loss, _ in train_alone(STAGED)]
    with Fleet(directory=tmp_path, config=STAGED) as fleet:
        fleet.await_step(6, 0)
        fleet.signal(1, signal.SIGKILL)
        assert fleet.codes() == [0]
        for rank in (0, 2, 3):
            steps = fleet.steps(rank)
            assert [line["loss"] for line in steps] == pytest.approx(wanted, rel=1e-9), rank
        groups = groups_of(fleet.layout(2))
        assert groups == [[(ShardRun(2, 0, 2), ShardRun(0, 2, 4))], [(ShardRun(3, 0, 4),)]]
