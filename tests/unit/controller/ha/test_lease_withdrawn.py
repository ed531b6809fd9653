"""Who wins and can not lead gives way to the others that have all; only a whole copy stands."""

from dataclasses import replace

from pacekeeper.controller.ha import lease
from pacekeeper.controller.ha.lease import ElectionMember, Record, Timing, Write

TIMING = Timing(duration_s=5.0, renew_s=1.0, margin_s=1.0)
LED = Record(
    term=4, holder="a", life="a1", address="a:1", duration_s=5.0, copies=("ca", "cb", "cc")
)


def standing(name: str, copy: str) -> ElectionMember:
    member = ElectionMember(name=name, life=f"{name}1", address=f"{name}:1", timing=TIMING)
    return lease.set_eligible(member, copy)


def after(member: ElectionMember, now_s: float) -> tuple[ElectionMember, Record | None]:
    """It does what it wants to do now, and that is done; what it wrote."""
    match lease.next_step(member, now_s):
        case Write() as write:
            return lease.has_written(member, write, f"v{now_s}", now_s), write.record
    return member, None


def winner(record: Record | None = LED) -> tuple[ElectionMember, Record]:
    """`b`, which took the lease of a leader that has died."""
    member = lease.has_read(standing("b", "cb"), record, "v" if record else "", 0.0)
    member, taken = after(replace(member, due_s=9.0), 6.0)
    assert taken is not None and taken.term == member.term
    return member, taken


def test_who_takes_over_names_all_that_have_everything_until_it_wants_its_own_only() -> None:
    member, taken = winner()
    assert taken.copies == ("cb", "ca", "cc")
    _, begun = after(lease.set_wanted_replicas(member, ("cb",)), 6.1)
    assert begun is not None and begun.copies == ("cb",)
    _, left = after(lease.leave(member), 6.1)
    assert left is not None and left.copies == taken.copies, "its own is whole"


def test_who_won_and_can_not_lead_commands_nothing_and_another_may_lead_at_once() -> None:
    member, _ = winner()
    member = lease.set_ineligible(member)
    assert lease.active_term(member, 6.0) == 0
    member, left = after(member, 6.1)
    assert left is not None and (left.life, left.copies) == ("", ("ca", "cc"))
    assert member.term == 0 and after(lease.time_passes(member, 6.2), 6.2)[1] is None

    other = lease.has_read(standing("c", "cc"), left, "w", 6.3)
    assert lease.free_from_s(other) == 6.3
    assert after(other, 6.3)[1] == replace(
        left, term=6, holder="c", life="c1", address="c:1", copies=("cc", "ca"), renewals=3
    )


def test_where_no_other_copy_has_all_nobody_leads() -> None:
    for record in (None, replace(LED, copies=())):
        member, taken = winner(record)
        assert taken.copies == ("cb",)
        _, left = after(lease.set_ineligible(member), 6.1)
        assert left is not None and left.copies == ("cb",)
        for other in (standing("c", "cc"), standing("c", "")):
            assert lease.free_from_s(lease.has_read(other, left, "w", 6.2)) == float("inf")


def test_a_write_that_was_on_its_way_wins_nothing_for_who_withdrew() -> None:
    member = lease.has_read(standing("b", "cb"), LED, "v", 0.0)
    step = lease.next_step(replace(member, due_s=9.0), 6.0)
    assert isinstance(step, Write)
    member = lease.set_ineligible(lease.is_unknown(member, step, 6.5))
    member = lease.has_read(member, step.record, "w", 6.6)
    assert lease.active_term(member, 6.6) == 0
    _, left = after(member, 6.7)
    assert left is not None and left.copies == ("ca", "cc")


def test_who_resigned_with_a_write_on_its_way_lets_go_and_stays_named() -> None:
    """Its copy is whole, and may be the only one whose controller is not lost."""
    member = lease.has_read(standing("b", "cb"), LED, "v", 0.0)
    step = lease.next_step(replace(member, due_s=9.0), 6.0)
    assert isinstance(step, Write)
    member = lease.resign(lease.is_unknown(member, step, 6.5))
    member, left = after(lease.has_read(member, step.record, "w", 6.6), 6.7)
    assert left is not None and (left.life, left.copies) == ("", ("cb", "ca", "cc"))
    member = lease.has_read(lease.set_eligible(member, "cb"), left, "x", 6.8)
    assert lease.free_from_s(member) == 6.8


def test_what_was_won_with_another_store_is_not_led_with_a_fresh_one() -> None:
    member = lease.set_eligible(lease.set_ineligible(winner()[0]), "fresh")
    assert (member.term, lease.active_term(member, 6.0)) == (0, 0)
    assert lease.free_from_s(member) == float("inf"), "the record does not name it"
