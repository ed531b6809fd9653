"""Allowances run out, come back with time, and are each caller's own."""

from pacekeeper.controller.api.auth.rate_limit import (
    Bucket,
    Limit,
    LogRateLimiter,
    RateLimiter,
    charge,
    full_bucket,
    report_cost,
    try_take,
)

LIMIT = Limit(per_s=2.0, at_once=3)


def test_what_is_left_is_granted_and_comes_back() -> None:
    bucket, granted = full_bucket(LIMIT, 0.0), list[bool]()
    for now_s in (0.0, 0.0, 0.0, 0.0, 0.4, 0.6, 0.6):
        bucket, is_granted = try_take(bucket, LIMIT, now_s)
        granted.append(is_granted)
    assert granted == [True, True, True, False, False, True, False]


def test_what_is_owed_is_waited_for() -> None:
    bucket, waits_s = charge(full_bucket(LIMIT, 0.0), LIMIT, 0.0)
    assert (bucket, waits_s) == (Bucket(2.0, 0.0), 0.0)
    bucket, waits_s = charge(bucket, LIMIT, 0.0, cost=10.0)
    assert (bucket, waits_s) == (Bucket(-8.0, 0.0), 4.0)


def test_a_large_report_counts_as_several() -> None:
    assert [report_cost(size) for size in (0, 8192, 64 << 20)] == [1.0, 1.0, 8192.0]


def test_one_caller_takes_nothing_of_another() -> None:
    buckets = RateLimiter(limit=LIMIT, capacity=2)
    assert [buckets.is_granted("a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert buckets.is_granted("b", 0.0)
    assert buckets.is_granted("c", 0.0), "a is forgotten: so many at most are known"
    assert buckets.is_granted("a", 0.0)


def test_lines_of_one_and_of_all_run_out_and_the_rest_is_counted() -> None:
    seldom = LogRateLimiter(Limit(per_s=1.0, at_once=2), Limit(per_s=1.0, at_once=4))
    found = [seldom.suffix(who, 0.0) for who in "aaabbcd"]
    assert [one is None for one in found] == [False, False, True, False, False, True, True]
    assert found[:2] == ["", ""] and "1" in (found[3] or "") and found[4] == ""
    assert "2" in (seldom.suffix("e", 1.0) or "")
