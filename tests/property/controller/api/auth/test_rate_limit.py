"""Token buckets: never more than the limit, never less than it once it was earned."""

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.api.auth.rate_limit import (
    Limit,
    RateLimiter,
    charge,
    full_bucket,
    try_take,
)

limits = st.builds(Limit, per_s=st.floats(0.01, 1e3), at_once=st.integers(1, 50))
gaps = st.lists(st.floats(0.0, 3.0), max_size=60)


@given(limits, gaps)
def test_no_more_is_granted_than_the_limit_lets_through(limit: Limit, gaps: list[float]) -> None:
    bucket, now_s, granted = full_bucket(limit, 0.0), 0.0, 0
    for gap in gaps:
        now_s += gap
        bucket, is_granted = try_take(bucket, limit, now_s)
        granted += is_granted
        assert granted <= limit.at_once + limit.per_s * now_s + 1e-6


@given(limits, gaps)
def test_who_rested_long_enough_is_let_in(limit: Limit, gaps: list[float]) -> None:
    bucket, now_s = full_bucket(limit, 0.0), 0.0
    for gap in gaps:
        now_s += gap
        bucket, _ = try_take(bucket, limit, now_s)
    now_s += 1.001 / limit.per_s
    assert try_take(bucket, limit, now_s)[1]


@given(limits, gaps)
def test_what_is_owed_is_waited_for_and_nothing_is_refused(limit: Limit, gaps: list[float]) -> None:
    """Who waits as told never gets ahead of the limit."""
    bucket, now_s = full_bucket(limit, 0.0), 0.0
    for count, gap in enumerate(gaps, 1):
        bucket, wait_s = charge(bucket, limit, now_s + gap)
        now_s += gap + wait_s
        assert count <= limit.at_once + limit.per_s * now_s + 1e-6


@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_callers_do_not_share_and_few_are_remembered(capacity: int, callers: list[int]) -> None:
    buckets = RateLimiter(limit=Limit(per_s=1e-9, at_once=1), capacity=capacity)
    recent: list[int] = []
    for caller in callers:
        assert buckets.is_granted(str(caller), 0.0) == (caller not in recent)
        recent = [*(one for one in recent if one != caller), caller][-capacity:]
