"""Plans of any trainer: voted on by all ranks, applied by all or none, refused with the reason."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout, with_batch_shares
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import PlanAppliedRecord, PlanRefusedRecord, Record
from pacekeeper.trainer.hooks import hooks
from pacekeeper.trainer.plans.consumer import PlanSession, flat_layout
from pacekeeper.trainer.plans.offers import PlanVote, agreed_generation
from support.controllers import until
from support.plan_offers import offer
from support.rings import records_in
from support.tree import ROOT

FIRST = flat_layout(2)
PLAN = replace(FIRST, generation=2, pipelines=with_batch_shares(FIRST.pipelines, (0.25, 0.75)))


class Trainer:
    """Applies what it is given; one that is `full` can take no larger share."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full, self.applied = is_full, list[Layout]()

    def check(self, layout: Layout) -> None:
        if self.is_full:
            raise ValueError("no memory for another micro-batch")

    def apply(self, layout: Layout) -> int:
        self.applied.append(layout)
        return 12


class Rank:
    def __init__(self, directory: Path, rank: int, *, is_full: bool = False) -> None:
        self.pace = hooks.attach(
            job="job", rank=rank, world_size=2, ring_dir=str(directory), run_id=1
        )
        self.trainer = Trainer(is_full=is_full)
        self.session = PlanSession(self.pace, self.trainer, FIRST)

    @property
    def ring(self) -> Path:
        assert self.pace.ring.path is not None
        return self.pace.ring.path

    @property
    def told(self) -> list[Record]:
        return records_in(self.ring)


def meet(ranks: list[Rank], step: int) -> list[bool]:
    votes = [rank.session.vote() for rank in ranks]

    def gather(own: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(vote) for vote in votes]

    return [rank.session.at_boundary(step=step, gather=gather) for rank in ranks]


def test_a_plan_is_applied_by_all_ranks_at_once_and_reported(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1)]
    assert meet(ranks, 1) == [False, False]
    offer(ranks[0].ring, PLAN, base=1)
    assert meet(ranks, 2) == [False, False]  # the other one has not read it yet
    offer(ranks[1].ring, PLAN, base=1)
    assert meet(ranks, 3) == [True, True]
    assert meet(ranks, 4) == [False, False]
    for rank in ranks:
        assert rank.trainer.applied == [PLAN] and rank.session.layout == PLAN
        first, second = rank.told
        assert isinstance(first, PlanAppliedRecord) and isinstance(second, PlanAppliedRecord)
        assert (first.step, first.generation, first.layout_crc) == (0, 1, layout_crc(FIRST))
        assert (second.step, second.generation, second.layout_crc) == (3, 2, layout_crc(PLAN))
        assert second.moved_bytes == 12 and rank.pace.generation == 2
    layout = tmp_path / "job" / shm_ring.layout_file_name(1, 1)
    assert layout.read_bytes() == encode_layout(FIRST)


def test_one_rank_that_cannot_is_enough_and_its_reason_goes_home(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1, is_full=True)]
    for rank in ranks:
        offer(rank.ring, PLAN, base=1)
    assert meet(ranks, 1) == meet(ranks, 2) == [False, False]
    assert [rank.trainer.applied for rank in ranks] == [[], []]
    refusals = [record for record in ranks[1].told if isinstance(record, PlanRefusedRecord)]
    assert [(r.plan_generation, r.layout_crc) for r in refusals] == [(2, layout_crc(PLAN))]
    assert refusals[0].reason == "no memory for another micro-batch"
    assert len(ranks[0].told) == 1


def test_plans_of_one_number_and_other_content_are_not_the_same(tmp_path: Path) -> None:
    other = replace(PLAN, pipelines=with_batch_shares(FIRST.pipelines, (0.75, 0.25)))
    ranks = [Rank(tmp_path / "a", 0), Rank(tmp_path / "b", 1)]
    for rank, plan in zip(ranks, (PLAN, other), strict=True):
        offer(rank.ring, plan, base=1)
    assert meet(ranks, 1) == [False, False]


def test_a_plan_for_another_layout_is_left_alone(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1)]
    for rank in ranks:
        offer(rank.ring, replace(PLAN, generation=4), base=3)
    assert meet(ranks, 1) == [False, False]
    assert all(len(rank.told) == 1 for rank in ranks)


@pytest.mark.parametrize(
    ("votes", "agreed"),
    [
        ([(3, 7), (3, 7)], 3),
        ([(3, 7), (3, 8)], None),
        ([(3, 7), (0, 0)], None),
        ([(0, 0), (0, 0)], None),
        ([(2, 7), (2, 7)], None),  # in force already
    ],
)
def test_votes(votes: list[tuple[int, int]], agreed: int | None) -> None:
    assert agreed_generation([PlanVote(*vote) for vote in votes], 2) == agreed


def test_the_example_makes_no_directory_that_no_agent_reads(tmp_path: Path) -> None:
    place = tmp_path / "none"
    command = [sys.executable, str(ROOT / "examples" / "plan_consumer.py"), str(place), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"{place}: no such directory" in done.stderr
    assert not place.exists()


def in_force(ring: Path) -> int:
    """The generation that a rank last said it runs."""
    records = (record for record in records_in(ring) if isinstance(record, PlanAppliedRecord))
    return max((record.generation for record in records), default=0)


@pytest.mark.parametrize(
    ("shares", "is_taken"),
    [
        ((0.25, 0.75), True),
        ((0.125, 0.875), False),  # 14 rows: more than a rank of it has memory for
    ],
)
def test_the_example_takes_a_plan_or_refuses_it(
    tmp_path: Path, shares: tuple[float, float], is_taken: bool
) -> None:
    command = [sys.executable, str(ROOT / "examples" / "plan_consumer.py"), str(tmp_path)]
    trainer = subprocess.Popen([*command, "100000"], stdout=subprocess.DEVNULL)
    rings = [tmp_path / "example" / shm_ring.ring_file_name(rank) for rank in (0, 1)]
    try:
        until(
            "both train", lambda: all(ring.exists() and len(records_in(ring)) > 1 for ring in rings)
        )
        plan = replace(PLAN, pipelines=with_batch_shares(FIRST.pipelines, shares))
        for ring in rings:
            offer(ring, plan, base=1)
        if is_taken:
            until("the plan is in force", lambda: [in_force(ring) for ring in rings] == [2, 2])
        else:
            until(
                "rank 1 refuses",
                lambda: any(isinstance(r, PlanRefusedRecord) for r in records_in(rings[1])),
            )
            assert [in_force(ring) for ring in rings] == [1, 1]
    finally:
        trainer.kill()
        trainer.wait()
