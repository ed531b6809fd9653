"""The group of a generation: exact while it stands, left at once when it breaks, nothing kept."""

from functools import partial
from pathlib import Path

import pytest
import torch

from pacekeeper.trainer.distributed.collectives import LocalFabric
from support.gloo_ranks import (
    JUDGED,
    Notes,
    end_with_the_tick,
    exchange_uneven,
    fail_alone,
    leave_while_connecting,
    lose_a_peer,
    outlive_a_frozen_store,
    run_ranks,
    wait_for_nobody,
)


def test_rows_arrive_in_the_order_of_ranks_and_votes_are_the_same_everywhere(
    tmp_path: Path,
) -> None:
    seen = run_ranks(exchange_uneven, tmp_path)
    assert seen[0]["rows"] == seen[2]["rows"] == [[2.0, 2.0], [5.0, 5.0], [5.0, 5.0]]
    assert seen[5]["rows"] == []
    for result in seen.values():
        assert result["votes"] == [[0.0, 0.5], [2.0, 0.5], [5.0, 0.5]]
        assert result["calls"] == ["pause", "resume"] * 3, "waiting never counts as compute"


def test_survivors_leave_and_meet_again_without_leaving_anything_behind(tmp_path: Path) -> None:
    seen = run_ranks(lose_a_peer, tmp_path)
    assert sorted(seen) == [0, 2], "the third was killed"
    for result in seen.values():
        assert result["votes"] == [[0.0], [2.0]]
        resources = result["resources"]
        grown = [b - a for a, b in zip(resources[1], resources[JUDGED], strict=True)]
        assert max(grown) <= 0, "descriptors and threads, over all generations"


def test_nobody_waits_for_the_dead_or_for_ever(tmp_path: Path) -> None:
    seen = run_ranks(wait_for_nobody, tmp_path)
    for rank in (2, 5):
        # [was the group formed, was it silence]: told of a death, time up; with a group, without.
        # Who lost the group second may have seen the first one's connections break.
        formed = {number: result[0] for number, result in seen[rank].items()}
        assert formed == {"1": True, "2": True, "3": False, "4": False}
        assert seen[rank]["1"] == [True, False]
        assert seen[rank]["3"] == [False, False]
        assert seen[rank]["4"] == [False, True]
    assert any(seen[rank]["2"][1] for rank in (2, 5))


def test_who_failed_to_connect_alone_finds_the_others_afterwards(tmp_path: Path) -> None:
    seen = run_ranks(fail_alone, tmp_path, (0, 1))
    assert seen[0]["votes"] == seen[1]["votes"] == [[1.0], [0.0]]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_group_is_left_as_soon_as_a_member_dies_in_its_forming(
    tmp_path: Path, is_told: bool
) -> None:
    """Without a time-out that anybody would wait for."""
    seen = run_ranks(partial(leave_while_connecting, is_told=is_told), tmp_path)
    assert sorted(seen) == [0, 2], "the third was killed"
    for result in seen.values():
        assert "generation 1" in result["why"]
        assert result["votes"] == [[0.0], [2.0]]


def test_a_collective_that_ends_as_its_tick_does_is_no_broken_group(tmp_path: Path) -> None:
    seen = run_ranks(end_with_the_tick, tmp_path, (0, 1))
    assert seen[0]["votes"] == seen[1]["votes"] == [[0.0], [1.0]]
    assert seen[1]["is_lost"], "and one that ended badly still is"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_frozen_host_of_the_store_holds_nobody_for_ever(tmp_path: Path, is_late: bool) -> None:
    """Neither while a rank waits for the others, nor when they exchange addresses."""
    seen = run_ranks(partial(outlive_a_frozen_store, is_late=is_late), tmp_path, (0,))
    assert seen == {0: {"is_silence": True, "answer": None, "gone": [0]}}


def test_a_group_of_one_hands_over_what_it_gets() -> None:
    clock = Notes()
    fabric = LocalFabric(3, clock)
    output = torch.empty(2, 2)
    fabric.all_to_all(output, torch.ones(2, 2), [2], [2])
    assert output.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert fabric.exchange([1.5, 2.5]).tolist() == [[1.5, 2.5]]
    assert fabric.ranks == (3,)
    assert clock.calls == ["pause", "resume"]
