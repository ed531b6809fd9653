"""The rules of the lease, one by one; `tests/property` plays them against clocks and losses."""

from dataclasses import replace
from math import inf

import pytest

from pacekeeper.controller.ha import lease
from pacekeeper.controller.ha.lease import ElectionMember, Read, Record, Timing, Wait, Write

TIMING = Timing(duration_s=4.0, renew_s=1.0, margin_s=1.0)
MEMBER = ElectionMember(name="a", run_id="a1", address="a:1", timing=TIMING, eligible_s=0.0)
OTHER = Record(term=3, holder="b", run_id="b1", address="b:1", duration_s=4.0, renewals=7)


def leading(term: int = 4, sent_s: float = 100.0) -> ElectionMember:
    record = Record(term=term, holder="a", run_id="a1", address="a:1", duration_s=4.0)
    write = Write(record=record, expected=OTHER, sent_s=sent_s)
    return lease.has_written(MEMBER, write, sent_s)


@pytest.mark.parametrize(
    ("record", "free_s"),
    [
        (OTHER, 104.0),  # its own duration
        (replace(OTHER, duration_s=9.0), 109.0),
        (replace(OTHER, run_id=""), 100.0),  # released
        (None, 104.0),  # one may still lead under a record that was deleted
    ],
)
def test_a_record_is_free_when_it_has_not_changed_for_its_duration(
    record: Record | None, free_s: float
) -> None:
    member = lease.has_read(MEMBER, record, 100.0)
    assert lease.free_from_s(member) == free_s
    before = lease.has_read(member, record, free_s - 0.1)
    assert isinstance(lease.next_step(before, free_s - 0.1), Wait)
    taking = lease.next_step(before, free_s)
    assert isinstance(taking, Write) and taking.expected == record
    assert taking.record.term == (1 if record is None else 4), "terms only ascend"


def test_a_renewal_makes_the_record_another_one() -> None:
    member = lease.has_read(MEMBER, OTHER, 100.0)
    member = lease.has_read(member, replace(OTHER, renewals=8), 103.0)
    assert lease.free_from_s(member) == 107.0


def test_a_leader_counts_from_before_its_renewal_and_stops_a_margin_earlier() -> None:
    member = leading(sent_s=100.0)
    assert lease.active_term(member, 102.9) == 4
    assert lease.active_term(member, 103.0) == 0
    assert lease.time_passes(member, 103.0).term == 0, "it has to take a new term"


def test_a_term_that_was_left_is_not_led_again() -> None:
    member = lease.time_passes(leading(), 200.0)
    late = Write(record=replace(OTHER, term=4, run_id="a1"), expected=None, sent_s=199.0)
    assert lease.has_written(member, late, 200.0).term == 0


def test_a_write_without_an_answer_is_read_again_and_counts_from_when_it_was_sent() -> None:
    member = lease.has_read(MEMBER, OTHER, 100.0)
    step = lease.next_step(lease.has_read(member, OTHER, 104.0), 104.0)
    assert isinstance(step, Write)
    member = lease.is_unknown(member, step, 105.0)
    assert isinstance(lease.next_step(member, member.due_s), Read)
    member = lease.has_read(member, step.record, 105.5)
    assert (member.term, member.until_s) == (4, 104.0 + 3.0)


class TestResigning:
    def test_it_releases_and_leaves_the_record_to_others(self) -> None:
        member = lease.resign(leading())
        assert lease.active_term(member, 100.0) == 0
        member = lease.time_passes(member, 100.0)  # as the renewer does before each step
        step = lease.next_step(member, 100.0)
        assert isinstance(step, Write) and (step.record.run_id, step.record.term) == ("", 4)
        member = lease.has_written(member, step, 100.1)
        member = lease.set_eligible(member, 108.0)
        member = lease.has_read(member, step.record, 105.0)
        assert isinstance(lease.next_step(member, 105.0), Wait)
        assert isinstance(lease.next_step(lease.has_read(member, step.record, 108.0), 108.0), Write)

    def test_it_may_lead_as_any_other_once_another_has_led(self) -> None:
        member = lease.set_eligible(lease.time_passes(lease.resign(leading()), 200.0), 208.0)
        released = replace(OTHER, term=5, run_id="")
        member = lease.has_read(member, released, 201.0)
        assert isinstance(lease.next_step(member, 201.0), Write)

    def test_not_before_it_has_ended_its_own_term(self) -> None:
        member = lease.time_passes(lease.resign(leading()), 200.0)
        member = lease.has_read(member, replace(OTHER, term=5, run_id=""), 201.0)
        assert member.eligible_s == inf


@pytest.mark.parametrize(
    ("seen", "is_believed"),
    [(5, True), (4, False), (4 + lease.FARTHEST_HEARSAY, True), (5 + (1 << 20), False)],
)
def test_an_agents_term_is_believed_where_lost_rows_explain_it(
    seen: int, is_believed: bool
) -> None:
    member = lease.observe_term(leading(), seen, 1000.0)
    assert (member.reported == seen) is is_believed
    if is_believed:
        step = lease.next_step(member, 101.0)
        assert isinstance(step, Write) and (step.record.run_id, step.record.min_term) == ("", seen)
        later = lease.observe_term(member, seen + 1, 1000.0 + lease.HEARSAY_EVERY_S - 1.0)
        assert later.reported == seen, "once in five minutes"
