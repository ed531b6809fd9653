"""What is done beside the training is done in order, by one thread, which holds on to nothing."""

import gc
import threading
import weakref
from functools import partial

import pytest

from pacekeeper.trainer.groups.waiting import BackgroundWorker


class Held:
    """What a task holds."""


def test_things_are_done_in_order_and_by_one_thread() -> None:
    beside, done = BackgroundWorker("test"), list[tuple[int, int]]()
    for number in range(3):
        beside.begin(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]
    assert beside.wait() and not beside.is_busy
    assert [number for number, _ in done] == [0, 1, 2]
    assert len({thread for _, thread in done}) == 1 and done[0][1] != threading.get_ident()


def test_nothing_was_begun_is_nothing_to_wait_for() -> None:
    beside = BackgroundWorker("test")
    assert beside.wait(0.0) and not beside.is_busy


def test_who_waits_waits_for_all_that_was_begun() -> None:
    beside, gates = BackgroundWorker("test"), (threading.Event(), threading.Event())
    for gate in gates:
        beside.begin(partial(_through, gate))
    gates[0].set()
    assert not beside.wait(0.05) and beside.is_busy
    gates[1].set()
    assert beside.wait(60.0) and not beside.is_busy


def test_an_error_is_told_and_the_next_one_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    beside, done = BackgroundWorker("test"), threading.Event()
    beside.begin(lambda: 1 / 0)  # type: ignore[arg-type]
    beside.begin(done.set)
    assert beside.wait(60.0) and done.is_set()
    assert [one.exc_type for one in told] == [ZeroDivisionError]


def test_what_is_over_is_let_go() -> None:
    """A copy of the state must not stay in memory until the next one."""
    beside, held = BackgroundWorker("test"), Held()
    seen = weakref.ref(held)
    beside.begin(partial(_look_at, held))
    del held
    assert beside.wait(60.0)
    gc.collect()
    assert seen() is None


def test_the_thread_ends_with_its_owner() -> None:
    threads: list[threading.Thread] = []
    beside = BackgroundWorker("test")
    beside.begin(lambda: threads.append(threading.current_thread()))
    assert beside.wait(60.0)
    del beside
    gc.collect()
    threads[0].join(60.0)
    assert not threads[0].is_alive()


def _through(gate: threading.Event) -> None:
    assert gate.wait(60.0)


def _look_at(_: object) -> None:
    """Holds it while it is done."""
