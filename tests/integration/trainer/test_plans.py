"""Plans of running jobs: followed between two steps by all, or by nobody, also when a rank dies."""

import signal
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.layout.resize.grow import resize
from pacekeeper.core.layout.resize.shrink import ReplicationFloor
from pacekeeper.core.telemetry.records import PlanRefusedRecord
from pacekeeper.trainer.parallel.layouts import start_layout
from support.engines import random_layout
from support.exact_jobs import exact_job
from support.examples import stress
from support.fleet import Fleet
from support.rings import records_in
from support.sabotage import Moment, Sabotage

pytest.importorskip("transformers")


def mirrored(layout: Layout, generation: int) -> Layout:
    """Every expert lives elsewhere: what rank r held is on rank (last - r)."""
    last = layout.ranks[-1]
    experts = tuple(
        tuple(
            tuple(sorted(ExpertReplica(last - one.rank, one.share) for one in replicas))
            for replicas in layer
        )
        for layer in layout.experts
    )
    return replace(layout, generation=generation, experts=experts)


def refused(fleet: Fleet, rank: int) -> list[int]:
    """Generations of the plans that a rank has told its agent it refuses."""
    records = records_in(fleet.ring_path(rank))
    return [one.plan_generation for one in records if isinstance(one, PlanRefusedRecord)]


def test_plans_are_followed_by_all_at_the_same_step_if_they_are_for_the_layout_in_force(
    tmp_path: Path,
) -> None:
    """Survivors number theirs after all that were offered, followed or not."""
    chosen, config = Random(2), exact_job(tmp_path, steps=100_000)
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(2, 0)
        plan = fleet.layout(1)
        # Rank 3 has no part in it, and does not stand by either.
        fleet.offer(replace(start_layout([4, 4], (0, 1, 2), 2), generation=2), base_generation=1)
        fleet.await_(lambda: all(refused(fleet, rank) == [2] for rank in range(4)))
        for generation in (1, 3, 4):
            fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
            plan = replace(random_layout(plan, chosen), generation=max(3, generation + 1))
            fleet.offer(plan, generation)
            fleet.await_(lambda: fleet.events(0, "plan")[-1]["generation"] == plan.generation)  # noqa: B023
        fleet.offer(mirrored(plan, 9), base_generation=8)
        fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
        fleet.signal(3, signal.SIGKILL)
        fleet.await_(lambda: bool(fleet.events(0, "regroup")))
        fleet.await_step(fleet.steps(0)[-1]["step"] + 2, 0)
        fleet.launchers[0].terminate()
        assert fleet.codes() == [0]
        fleet.assert_exact((0, 1, 2), end=len(fleet.steps(0)))
        for rank in (0, 1, 2):
            assert fleet.generations(rank) == [1, 3, 4, 5, 10]
        moves = [[event["step"] for event in fleet.events(rank, "plan")] for rank in range(4)]
        assert moves[0] == moves[1] == moves[2] == moves[3]


@pytest.mark.parametrize(
    ("moment", "victim", "doubters", "is_moved"),
    [
        stress(Moment.IN_MOVE_BEFORE_VOTE, 2, (), False),
        (Moment.IN_MOVE_AFTER_VOTE, 3, (0,), True),  # the leader missed it, the others did it
        stress(Moment.IN_MOVE_AFTER_VOTE, 0, (2,), True),
        (Moment.IN_MOVE_AFTER_VOTE, 1, (0, 2, 3), False),  # only the dead one knew
    ],
)
def test_a_death_in_mid_move_leaves_all_in_the_old_layout_or_all_in_the_new_one(
    tmp_path: Path, moment: Moment, victim: int, doubters: tuple[int, ...], is_moved: bool
) -> None:
    body = Sabotage(moment=moment, victims=(victim,), doubters=doubters)
    with Fleet(directory=tmp_path, config=exact_job(tmp_path), body=body) as fleet:
        fleet.await_step(4, 0)
        first = fleet.layout(1)
        fleet.offer(mirrored(first, 2), base_generation=1)
        assert fleet.codes() == [0]
        survivors = tuple(rank for rank in range(4) if rank != victim)
        fleet.assert_exact(survivors)
        for rank in survivors:
            assert fleet.generations(rank) == [1, 3]
        floor = ReplicationFloor(
            replicas=2, domain_of=dict.fromkeys(range(4), 0), slots_per_rank=4, are_slots_fixed=True
        )
        before = mirrored(first, 2) if is_moved else first
        assert fleet.layout(3) == resize(before, survivors, generation=3, floor=floor)
