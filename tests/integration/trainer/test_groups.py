"""Ranks that are killed or stopped in collectives and while groups form, and those that go on."""

import pytest
from benchmarks.group_recovery import Job, Moment, Strike, abandoned, connectors, run_job

from support.fork_server import server_context

WAYS = [
    pytest.param(
        way,
        marks=pytest.mark.skipif(way not in connectors(), reason="torch cannot reconfigure groups"),
    )
    for way in ("new", "reconfigured")
]
both_signals = pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
both_ways = pytest.mark.parametrize("way", WAYS)


def survive(job: Job, survivors: list[int]) -> list[list[bool]]:
    """Run; all survivors did the same steps, exactly. Who was silent at each loss, by rank."""
    found = run_job(job, server_context())
    assert sorted(found) == survivors
    for one in found.values():
        assert one["is_exact"] and one["members"] == survivors
    assert len({one["ticket"] for one in found.values()}) == 1
    return [one["lost"] for one in found.values()]


@both_ways
@both_signals
@pytest.mark.parametrize("moments", [
    (Moment.ALL_TO_ALL, Moment.ALL_REDUCE),
    (Moment.ALL_REDUCE, Moment.CONNECTING),
    (Moment.ARRIVED, Moment.ALL_TO_ALL),
    (Moment.MESSAGES, Moment.MESSAGES),
])  # fmt: skip
def test_successive_generations_lose_a_rank_each(
    way: str, signal: str, moments: tuple[Moment, Moment]
) -> None:
    strikes = tuple(
        Strike(generation=number, victims=(3 - number,), moment=moment)
        for number, moment in enumerate(moments)
    )
    survive(Job(way=way, signal=signal, strikes=strikes), [0, 1])


@both_ways
@both_signals
def test_two_ranks_at_once(way: str, signal: str) -> None:
    strike = Strike(generation=0, victims=(1, 3), moment=Moment.ALL_TO_ALL)
    survive(Job(way=way, signal=signal, strikes=(strike,)), [0, 2])


@both_ways
def test_collectives_notice_a_dead_rank_that_nobody_reports(way: str) -> None:
    strike = Strike(generation=0, victims=(2,), moment=Moment.ALL_TO_ALL)
    job = Job(way=way, strikes=(strike,), is_told=False, timeout_s=60.0)
    for lost in survive(job, [0, 1, 3]):
        assert lost == [False]


@both_ways
def test_a_stopped_rank_that_nobody_reports_is_silent(way: str) -> None:
    """Whoever is first to find that leaves, and the others see its connections break."""
    strike = Strike(generation=0, victims=(2,), moment=Moment.ALL_REDUCE)
    job = Job(way=way, signal="SIGSTOP", strikes=(strike,), is_told=False, timeout_s=1.0)
    assert [True] in survive(job, [0, 1, 3])


@both_ways
def test_a_message_of_a_stopped_rank_is_not_waited_for_forever(way: str) -> None:
    strike = Strike(generation=0, victims=(2,), moment=Moment.MESSAGES)
    job = Job(way=way, signal="SIGSTOP", strikes=(strike,), is_told=False, timeout_s=1.0)
    assert [True] in survive(job, [0, 1, 3])


@both_ways
def test_what_is_left_of_abandoned_generations_is_bounded(way: str) -> None:
    """Twenty that were left in the middle of an exchange, after gloo's own timeout."""
    before, *during, after = abandoned(way, 20, server_context())
    assert len(during) == 20
    threads, files, kilobytes = (a - b for a, b in zip(after, before, strict=True))
    assert threads <= 20 and files <= 32, "a few groups, that are used again or still referred to"
    assert kilobytes < 150_000, "twenty outputs have 252 MB"
