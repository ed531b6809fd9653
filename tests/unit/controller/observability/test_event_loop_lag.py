"""How late the controller's loop is: the longest wait of a minute, also one that goes on."""

import asyncio
import time

from pacekeeper.controller.observability.event_loop_lag import (
    BEAT_S,
    WINDOW_S,
    LoopLag,
    run_heartbeat,
)


def beaten(*beats_s: float) -> LoopLag:
    lag = LoopLag(0.0)
    for now_s in beats_s:
        lag.beat(now_s)
    return lag


def test_a_loop_that_keeps_time_is_not_late() -> None:
    lag = beaten(*(i * BEAT_S for i in range(1, 50)))
    assert lag.worst_s(49 * BEAT_S) < 1e-9


def test_the_longest_wait_is_told_for_a_minute_and_then_the_next_longest() -> None:
    lag = beaten(3.0 + BEAT_S, 4.0 + 2 * BEAT_S)
    assert round(lag.worst_s(4.3), 6) == 3.0
    for i in range(1, 588):
        lag.beat(4.2 + i * BEAT_S)
    assert round(lag.worst_s(3.0 + WINDOW_S), 6) == 3.0
    for i in range(588, 602):
        lag.beat(4.2 + i * BEAT_S)
        if i == 592:
            assert round(lag.worst_s(4.2 + i * BEAT_S), 6) == 1.0
    assert lag.worst_s(4.2 + 601 * BEAT_S) < 1e-6


def test_a_wait_that_goes_on_counts_before_it_is_over() -> None:
    lag = beaten(BEAT_S)
    assert round(lag.worst_s(BEAT_S + BEAT_S + 7.0), 6) == 7.0
    lag.beat(2 * BEAT_S + 9.0)
    assert round(lag.worst_s(2 * BEAT_S + 9.0), 6) == 9.0


def test_who_holds_the_loop_is_seen() -> None:
    async def held() -> float:
        lag = LoopLag(time.monotonic())
        beats = asyncio.create_task(run_heartbeat(lag))
        await asyncio.sleep(0)
        time.sleep(0.5)
        worst_s = lag.worst_s(time.monotonic())
        beats.cancel()
        return worst_s

    assert asyncio.run(held()) >= 0.5 - BEAT_S - 1e-3
