"""Batch shares in torchtitan: who reads what, and the settings that exclude them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.adapters.batch_shares import ShareSchedule
from pacekeeper.trainer.adapters.batch_shares.torchtitan import SharedStreams, require_settings

RANKS, PER_RANK, LENGTH = 3, 2, 7


class Numbers:
    """A rank's loader: (rank, number)."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < LENGTH:
            self.next += 1
            yield self.rank, self.next - 1

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.next, "world_size": RANKS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state[f"dp_rank_{self.rank}"]


def streams(rank: int, *, is_shared: bool = True) -> Any:
    settings = SimpleNamespace(build=lambda *, dp_world_size, dp_rank: Numbers(dp_rank))
    found = SharedStreams(SimpleNamespace(inner=settings), dp_world_size=RANKS, dp_rank=rank)
    if is_shared:
        found.schedule = ShareSchedule(
            rank=rank, num_ranks=RANKS, micro_batches_per_step=RANKS * PER_RANK
        )
    return found


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("rank", range(RANKS))
def test_with_even_shares_each_rank_reads_its_own_data(rank: int, is_shared: bool) -> None:
    end = LENGTH // PER_RANK * PER_RANK if is_shared else LENGTH
    assert [*streams(rank, is_shared=is_shared)] == [(rank, number) for number in range(end)]


def test_each_micro_batch_of_a_step_goes_to_one_rank() -> None:
    found = []
    for rank in range(RANKS):
        loader = streams(rank)
        loader.schedule.change(1, (1, 4, 1))
        found.append([*loader])
    assert [len(own) for own in found] == [4, 10, 4]
    every = [(rank, number) for rank in range(RANKS) for number in range(LENGTH - 1)]
    assert sorted(batch for own in found for batch in own) == every
    assert found[1][2:6] == [(0, 3), (1, 2), (1, 3), (2, 2)]


def test_between_steps_all_ranks_have_the_state_of_a_run_without_shares() -> None:
    for rank in range(RANKS):
        loader = streams(rank)
        loader.schedule.change(0, (1, 4, 1))
        batches = iter(loader)
        own = [next(batches) for _ in range((1, 4, 1)[rank])]
        state = {**{f"dp_rank_{one}": PER_RANK for one in range(RANKS)}, "world_size": RANKS}
        assert loader.state_dict() == state
        resumed = streams(rank)
        resumed.load_state_dict(state)
        assert next(iter(resumed)) == (rank, PER_RANK)
        assert len(own) == (1, 4, 1)[rank]


def trainer(**changes: Any) -> Any:
    degrees = {"pp": 1, "dp_replicate": 1, "cp": 1, "tp": 1, "ep": 1}
    return SimpleNamespace(
        parallel_dims=SimpleNamespace(**degrees | changes.get("degrees", {})),
        loss_fn=changes.get("loss_fn", object()),
        config=SimpleNamespace(
            training=SimpleNamespace(disable_cuda_graphs=changes.get("no_graphs", True))
        ),
        dataloader=changes.get("dataloader", streams(0)),
    )


@pytest.mark.parametrize(
    "changes",
    [
        *({"degrees": {name: 2}} for name in ("pp", "dp_replicate", "cp", "tp", "ep")),
        {"loss_fn": SimpleNamespace(set_lm_head=None)},
        {"no_graphs": False},
        {"dataloader": Numbers(0)},
    ],
)
def test_settings_under_which_ranks_meet_in_each_pass_are_refused(changes: dict[str, Any]) -> None:
    require_settings(trainer())
    with pytest.raises(ConfigError) as refused:
        require_settings(trainer(**changes))
    assert refused.value.remedy
