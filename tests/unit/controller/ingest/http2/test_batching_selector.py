"""Sockets gather between two looks; who is late looks at once."""

import socket
import time
from collections.abc import Iterator

import pytest

from pacekeeper.controller.ingest.http2 import batching_selector
from pacekeeper.controller.ingest.http2.batching_selector import CoalescingSelector


class Clock:
    """Time that passes only in naps, which it writes down."""

    def __init__(self) -> None:
        self.now_s, self.naps = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, for_s: float) -> None:
        self.naps.append(for_s)
        self.now_s += for_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(batching_selector, "time", made)
    return made


@pytest.fixture
def looks() -> Iterator[CoalescingSelector]:
    made = CoalescingSelector()
    yield made
    made.close()


def test_between_two_looks_lies_a_rest(looks: CoalescingSelector, clock: Clock) -> None:
    looks.rest_s = 0.005
    ours, theirs = socket.socketpair()
    with ours, theirs:
        looks.register(ours, 1)
        theirs.send(b"x")
        for _ in range(3):
            assert [key.fileobj for key, _ in looks.select(None)] == [ours]
    assert clock.naps == [pytest.approx(0.005)] * 2


def test_who_is_late_or_has_more_to_do_does_not_rest(
    looks: CoalescingSelector, clock: Clock
) -> None:
    looks.rest_s = 0.005
    looks.select(0)
    looks.select(0)  # something else is due
    clock.now_s += 0.006
    looks.select(0.0001)
    assert clock.naps == []


def test_a_rest_ends_with_what_is_due_next(looks: CoalescingSelector, clock: Clock) -> None:
    looks.rest_s = 0.005
    looks.select(0)
    assert looks.select(0.002) == []
    assert clock.naps == [0.002]


def test_it_does_not_rest_unless_told(looks: CoalescingSelector, clock: Clock) -> None:
    began_s = time.monotonic()
    for _ in range(3):
        looks.select(0.001)
    assert clock.naps == [] and time.monotonic() > began_s
