"""Waits for others: whose silence counts, and threads that are left behind."""

import threading
from queue import SimpleQueue

import pytest

from pacekeeper.trainer.groups.waiting import STOPPED_S, Deadline, run_leavable

PATIENCE_S = 60.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def ask(clock: Clock, deadline: Deadline, until_s: float, tick_s: float = 0.1) -> bool:
    """Ask every tick; whether it passed by then."""
    while clock.now_s < until_s - 1e-9:
        clock.now_s += tick_s
        if deadline.has_passed():
            return True
    return False


def test_a_deadline_passes_after_its_limit() -> None:
    clock = Clock()
    deadline = Deadline(30.0, 0.1, clock)
    assert not ask(clock, deadline, 129.9)
    assert ask(clock, deadline, 130.2)


def test_a_stop_of_this_process_does_not_count() -> None:
    clock = Clock()
    deadline = Deadline(30.0, 0.1, clock)
    assert not ask(clock, deadline, 110.0)
    clock.now_s += 600.0  # stopped
    assert not deadline.has_passed()
    assert not ask(clock, deadline, 729.0 - STOPPED_S), "20 s were left of it"
    assert ask(clock, deadline, 733.0)


def test_a_sign_of_life_begins_anew() -> None:
    clock = Clock()
    deadline = Deadline(30.0, 0.1, clock)
    assert not ask(clock, deadline, 125.0)
    deadline.restart()
    assert not ask(clock, deadline, 154.9)
    assert ask(clock, deadline, 155.2)


def test_what_is_returned_or_raised_comes_back() -> None:
    def fail(_: object) -> int:
        raise ValueError("theirs")

    assert run_leavable(lambda _: 3, watch=lambda: None, tick_s=0.01) == 3
    with pytest.raises(ValueError, match="theirs"):
        run_leavable(fail, watch=lambda: None, tick_s=0.01)


def test_a_thread_that_is_left_knows_it_and_its_result_is_discarded() -> None:
    goes_on, told = threading.Event(), SimpleQueue[object]()

    def call(is_left: object) -> str:
        assert callable(is_left) and not is_left()
        goes_on.wait(PATIENCE_S)
        told.put(is_left())
        return "late"

    def watch() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        run_leavable(call, watch=watch, tick_s=0.01, discard=told.put)
    goes_on.set()
    assert told.get(timeout=PATIENCE_S) is True
    assert told.get(timeout=PATIENCE_S) == "late"
