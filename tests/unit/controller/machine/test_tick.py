"""A tick looks at all jobs of a small fleet; of a large one at some, in turn, none left out."""

from collections import Counter

from pacekeeper.controller.machine.tick import RANKS_PER_S, next_jobs
from pacekeeper.controller.state.state import JobState, RankState, State
from pacekeeper.core.telemetry.attachment import Attachment


def job(name: str, num_ranks: int) -> JobState:
    rank = RankState(attachment=Attachment(job=name, rank=0, world_size=1, pid=1), node="n")
    return JobState(name=name, ranks=dict.fromkeys(range(num_ranks), rank))


def fleet(num_jobs: int, num_ranks: int) -> State:
    names = [f"job-{i:03d}" for i in range(num_jobs)]
    return State(jobs={name: job(name, num_ranks) for name in names})


def looked_at(state: State, *, ticks: int, period_s: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    for i in range(ticks):
        state, turn = next_jobs(state, 100.0 + i * period_s)
        seen.update(turn)
    return seen


def test_a_small_fleet_is_looked_at_whole_on_every_tick() -> None:
    seen = looked_at(fleet(8, 64), ticks=50, period_s=0.2)
    assert set(seen.values()) == {50} and len(seen) == 8


def test_of_a_large_fleet_every_job_has_its_turn_and_the_budget_is_kept() -> None:
    seen = looked_at(fleet(100, 800), ticks=100, period_s=0.2)
    assert len(seen) == 100 and max(seen.values()) - min(seen.values()) <= 1
    assert seen.total() * 800 <= RANKS_PER_S * (1.0 + 100 * 0.2) + 800


def test_a_job_larger_than_the_budget_is_looked_at_and_pays_for_it() -> None:
    seen = looked_at(fleet(2, int(4 * RANKS_PER_S)), ticks=100, period_s=0.2)
    assert 4 <= seen.total() <= 7, "some 8 seconds for both"
    assert len(seen) == 2


def test_a_job_that_came_in_between_has_its_turn() -> None:
    state, _ = next_jobs(fleet(3, 4), 1.0)
    _, turn = next_jobs(State(jobs=fleet(4, 4).jobs, looked_at=state.looked_at), 1.2)
    assert turn == tuple(f"job-{i:03d}" for i in range(4))
