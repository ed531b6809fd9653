"""Optimizer state of dense blocks on two ranks: deaths of owners and mirrors, and of both."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.state_owners import assign_state_owners
from support.exact_jobs import TOLERANCE, exact_job, saving, undisturbed
from support.fleet import Fleet
from support.sabotage import Moment, Sabotage

pytest.importorskip("transformers")


def test_an_owner_dies_with_weights_on_their_way_and_then_another(tmp_path: Path) -> None:
    config = exact_job(tmp_path, steps=14, replicas=3, shard_optimizer_state=True)
    later = Sabotage(moment=Moment.IN_STEP_AFTER_VOTE, victims=(3,), doubters=(1,), step=8)
    body = Sabotage(moment=Moment.IN_SENDING_WEIGHTS, victims=(0,), step=3, then=later)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact((1, 2))
        assert [fleet.redone(rank) for rank in (1, 2)] == [[], []]
        first, second = fleet.layout(1), fleet.layout(2)
        (dead,) = set(first.ranks) - set(second.ranks)
        assert any(owner.owner == dead for owner in first.state_owners)
        for block, owner in first.state_owner_by_block.items():
            if owner.owner == dead:
                assert owner.mirror in second.state_owner_by_block[block].ranks


@pytest.mark.parametrize("source", ["", "storage", "memory"])
def test_with_owner_and_mirror_dead_all_go_back_to_what_is_saved_or_say_why_not(
    tmp_path: Path, source: str
) -> None:
    """A snapshot's copy in memory is on the next rank, so that no two apart take both."""
    config = exact_job(tmp_path, steps=12, replicas=3, shard_optimizer_state=True)
    if source == "storage":
        config = saving(config)
    elif source == "memory":
        config = replace(config, snapshot_period_steps=4)
    from pacekeeper.trainer.engine.job import prepare_job

    owners = prepare_job(config, (0, 1, 2, 3)).layout.state_owners
    victims = next(one.ranks for one in owners if abs(one.ranks[0] - one.ranks[1]) == 2)
    body = Sabotage(moment=Moment.IN_STEP_BEFORE_VOTE, victims=victims, step=6)
    with Fleet(directory=tmp_path, config=config, body=body) as fleet:
        assert fleet.codes() == [0 if source else ExitCode.LOST_STATE]
        for rank in set(fleet.ranks) - set(victims):
            wanted = undisturbed(config, config.steps)
            steps = [line["step"] for line in fleet.steps(rank)]
            again = [*range(4, config.steps)] if source else []
            assert steps == [*range(6), *again]
            losses = [line["loss"] for line in fleet.steps(rank)]
            assert losses == pytest.approx([wanted[step] for step in steps], rel=TOLERANCE)


def test_a_plan_gives_owners_and_takes_them_away(tmp_path: Path) -> None:
    config = exact_job(tmp_path, shard_optimizer_state=True)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        home = fleet.layout(1)
        plain = replace(home, generation=2, state_owners=())
        fleet.offer(plain, base_generation=1)
        fleet.await_(lambda: fleet.generations(0) == [1, 2])
        moved = assign_state_owners(replace(plain, generation=3))
        fleet.offer(moved, base_generation=2)
        assert fleet.codes() == [0], fleet.launchers[0].output()
        fleet.assert_exact(fleet.ranks)
        assert fleet.generations(0) == [1, 2, 3]
