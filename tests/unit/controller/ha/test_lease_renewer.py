"""A member that is told to end at an unlucky moment holds nothing back from the others."""

import threading
import time
from collections.abc import Callable

import pytest

from pacekeeper.controller.ha.lease import ElectionMember, Record, Timing
from pacekeeper.controller.ha.lease_renewer import HUNG_DURATIONS, LeaseRenewer

PATIENCE_S = 30.0
TIMING = Timing(duration_s=5.0, renew_s=1.0, margin_s=1.0)


FREE = Record(term=1, holder="", run_id="", address="", duration_s=5.0)


class Slow:
    """A lease's store in which a write takes until the test says so."""

    def __init__(self) -> None:
        self.record = FREE
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def read(self) -> Record:
        return self.record

    def close(self) -> None:
        """Nothing is open."""

    def write(self, record: Record, expected: Record | None) -> bool:
        self.is_asked.set()
        self.may_answer.wait(PATIENCE_S)
        self.record = record
        return True


def test_a_term_that_begins_as_its_member_ends_is_let_go() -> None:
    store = Slow()
    member = ElectionMember(name="a", run_id="a1", address="a:1", timing=TIMING)
    keeper = LeaseRenewer(member, store)
    keeper.start()
    keeper.set_eligible()
    assert store.is_asked.wait(PATIENCE_S)
    ending = threading.Thread(target=keeper.close)
    ending.start()
    give_up_s = time.monotonic() + PATIENCE_S
    while not keeper._member.is_leaving:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    store.may_answer.set()
    ending.join(PATIENCE_S)
    assert (store.record.term, store.record.run_id) == (2, "")


class Row:
    """A lease's store that answers at once."""

    def __init__(self) -> None:
        self.record = FREE

    def read(self) -> Record:
        return self.record

    def write(self, record: Record, expected: Record | None) -> bool:
        if self.record != expected:
            return False
        self.record = record
        return True

    def close(self) -> None:
        """Nothing is open."""


def wait_until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_leader_whose_loop_hangs_resigns(is_alive: bool) -> None:
    now_s, row, hung_s = 1000.0, Row(), HUNG_DURATIONS * TIMING.duration_s
    member = ElectionMember(name="a", run_id="a1", address="a:1", timing=TIMING)
    renewer = LeaseRenewer(member, row, lambda: now_s)
    renewer.start()
    renewer.set_eligible()
    wait_until(lambda: renewer.term() == 2)
    end_s = now_s + hung_s + 10.0
    while now_s < end_s and renewer.term() is not None:
        if is_alive:
            renewer.show_alive()
        renewals = row.record.renewals
        now_s += TIMING.renew_s
        with renewer._news:
            renewer._news.notify_all()  # the clock of the test does not wake it
        wait_until(lambda: row.record.renewals > renewals)  # noqa: B023
    assert (renewer.term() == 2) == is_alive
    assert row.record.run_id == ("a1" if is_alive else "")
    assert (now_s > 1000.0 + hung_s) or is_alive
    assert renewer.has_resigned(2) == (not is_alive)
    renewer.close()
    assert row.record.run_id == ""
