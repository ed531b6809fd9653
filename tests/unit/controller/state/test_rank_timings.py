"""What was measured of a rank last is told of it, whoever the newest step judged."""

from dataclasses import replace
from math import nan

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.state.rank_timings import RankTiming, RankTimings
from pacekeeper.predictor.detector.state import Judgement

FIRST = Judgement(
    step=1,
    ranks=(0, 2, 5),
    observed_s=(1.0, 2.0, 3.0),
    expected_s=(1.0, 1.0, nan),
    slowdown=(1.0, 2.0, nan),
    suspicion=(0.0, 0.9, nan),
)


def test_nothing_is_known_of_anybody_at_first() -> None:
    assert RankTimings().of(0) == RankTiming()
    assert RankTimings().at_least(0.0) == []


def test_each_rank_is_told_with_its_own_column() -> None:
    measured = RankTimings().by(FIRST)
    slow = RankTiming(observed_s=2.0, expected_s=1.0, slowdown=2.0, suspicion=0.9)
    assert measured.of(2) == slow
    assert [measured.of(rank) for rank in (-1, 1, 3, 6)] == [RankTiming()] * 4
    assert measured.at_least(1.05) == [(2, 2.0)]


def test_a_role_in_its_warm_up_is_observed_and_no_more() -> None:
    assert RankTimings().by(FIRST).of(5) == RankTiming(observed_s=3.0)
    warming = replace(FIRST, expected_s=(), slowdown=(), suspicion=())
    assert RankTimings().by(warming).of(2) == RankTiming(observed_s=2.0)
    assert RankTimings().by(warming).at_least(0.0) == []


def test_who_rests_keeps_what_was_said_and_who_is_judged_again_does_not() -> None:
    rested = RankTimings().by(FIRST).by(replace(FIRST, step=2, ranks=(0, 1, 5)))
    assert rested.of(2) == RankTimings().by(FIRST).of(2)
    assert sorted(rested.at_least(1.5)) == [(1, 2.0), (2, 2.0)]
    well = rested.by(replace(FIRST, step=3, slowdown=(1.0, 1.0, nan)))
    assert well.of(2).slowdown == 1.0
    assert well.at_least(1.5) == [(1, 2.0)]


@given(st.lists(st.sets(st.integers(0, 6), min_size=1), max_size=8))
def test_it_is_the_newest_that_judged_a_rank(steps: list[set[int]]) -> None:
    measured, newest = RankTimings(), dict[int, float]()
    for step, judged in enumerate(steps):
        times = (float(step),) * len(judged)
        measured = measured.by(
            Judgement(
                step=step, ranks=tuple(sorted(judged)),
                observed_s=times, expected_s=times, slowdown=times, suspicion=times,
            )
        )  # fmt: skip
        newest |= dict.fromkeys(judged, float(step))
    assert {rank: measured.of(rank).slowdown for rank in newest} == newest
    assert dict(measured.at_least(2.0)) == {rank: s for rank, s in newest.items() if s >= 2.0}
