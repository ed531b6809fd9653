"""The election: controllers compare and swap one record, whose holder leads. Pure.

The record's store needs no clock and no sessions: a record that has not changed for `duration_s`,
by the observer's clock, is free. The leader counts from before it sent its last renewal and stops
`margin_s` earlier. So it has stopped before another controller leads, whatever their clocks show,
as long as their rates differ by less than margin_s / duration_s. A term has one leader: a candidate
writes a term above that of the record, and only one candidate's swap succeeds.
"""

from dataclasses import dataclass, replace
from math import inf

HIGHEST_TERM = 1 << 53
# An agent may report a wrong term. It is accepted up to FARTHEST_HEARSAY above the known one, as a
# database that lost its last rows explains, and so rarely that a wrong one cannot prevent leading.
HEARSAY_EVERY_S = 300.0
FARTHEST_HEARSAY = 1 << 20  # takeovers of years


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds that a record is valid, between renewals, and that its holder stops earlier."""

    duration_s: float
    renew_s: float
    margin_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.margin_s < self.duration_s:
            raise ValueError("margin_s: expected above 0 and below duration_s")
        if not 0.0 < self.renew_s < self.duration_s - self.margin_s:
            raise ValueError("renew_s: expected above 0 and below duration_s - margin_s")

    @property
    def limit_s(self) -> float:
        """Seconds of one database call: two fit between a renewal and the lease's end."""
        return (self.duration_s - self.margin_s) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The lease's row.

    Attributes:
        term: The term of the last leader.
        holder: Its name; empty: released.
        run_id: Identifies one start of the holder; empty: released.
        address: Its address for commands, shown to callers of other controllers.
        duration_s: How long the record is valid after its last change.
        min_term: The highest term that an agent reported; the next term is above it.
        renewals: Number of writes, so that each write changes the record.
    """

    term: int
    holder: str
    run_id: str
    address: str
    duration_s: float
    min_term: int = 0
    renewals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The record as it was read last (None: there is none), and when it was first read so."""

    record: Record | None
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Replace `expected` by `record`; None: there is no record yet."""

    record: Record
    expected: Record | None
    sent_s: float


@dataclass(frozen=True, slots=True)
class Read:
    """Read the record."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before `until_s`."""

    until_s: float


Step = Read | Write | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ElectionMember:
    """State of one controller in the election.

    Attributes:
        term: The term it leads in; 0: none. `until_s`: until when.
        past: The highest term it ever led.
        reported: The highest accepted term that an agent reported, at `reported_s`.
        pending: A write whose outcome is not known.
        eligible_s: From when on it takes over; infinity: never.
        is_leaving: It shuts down: it releases what it leads and takes over nothing.
    """

    name: str
    run_id: str
    address: str
    timing: Timing
    seen: Seen | None = None
    term: int = 0
    until_s: float = -inf
    past: int = 0
    reported: int = 0
    reported_s: float = -inf
    due_s: float = -inf
    pending: Write | None = None
    is_unsure: bool = True
    eligible_s: float = inf
    is_leaving: bool = False


def active_term(member: ElectionMember, now_s: float) -> int:
    """The term in which it may command now; 0: it may not."""
    is_eligible = now_s >= member.eligible_s
    return member.term if is_eligible and now_s < member.until_s else 0


def next_step(member: ElectionMember, now_s: float) -> Step:
    """The next action on the record; the caller reports its outcome to the functions below.

    A leader renews. A standby reads, and takes over a free record.
    """
    if member.is_unsure or member.seen is None:
        return Read() if now_s >= member.due_s else Wait(member.due_s)
    if member.term:
        return _lead(member, member.seen, now_s)
    if now_s >= member.due_s:
        return Read()
    free_s = inf if member.is_leaving else max(free_from_s(member), member.eligible_s)
    if now_s >= free_s:
        return Write(record=_taken(member), expected=member.seen.record, sent_s=now_s)
    return Wait(min(member.due_s, free_s))


def _lead(member: ElectionMember, seen: Seen, now_s: float) -> Step:
    record = seen.record
    assert record is not None, "a leader has written one"
    renewed = replace(record, renewals=record.renewals + 1)
    is_ending = member.is_leaving or now_s < member.eligible_s
    if is_ending or member.reported > max(member.term, record.min_term):
        # Released, not raised: with a term above all that was seen it begins in a new one.
        min_term = max(record.min_term, member.reported)
        renewed = replace(renewed, holder="", run_id="", min_term=min_term)
    elif now_s < member.due_s:
        return Wait(member.due_s)
    return Write(record=renewed, expected=record, sent_s=now_s)


def free_from_s(member: ElectionMember) -> float:
    """When this member may take over, if the record does not change."""
    seen = member.seen
    assert seen is not None, "it has been read"
    record = seen.record
    if record is not None and record.run_id in ("", member.run_id):
        return seen.since_s
    # Without a record a controller may still lead, under one that was deleted.
    return seen.since_s + (member.timing.duration_s if record is None else record.duration_s)


def _taken(member: ElectionMember) -> Record:
    assert member.seen is not None, "it has been read"
    old = member.seen.record
    before = (0, 0) if old is None else (old.term, old.min_term)
    return Record(
        term=max(*before, member.reported) + 1,
        holder=member.name,
        run_id=member.run_id,
        address=member.address,
        duration_s=member.timing.duration_s,
        renewals=1 if old is None else old.renewals + 1,
    )


def has_read(member: ElectionMember, record: Record | None, now_s: float) -> ElectionMember:
    """Process a read record; the answer arrived at `now_s`."""
    if member.seen is None or member.seen.record != record:
        member = replace(member, seen=Seen(record=record, since_s=now_s))
    sent = member.pending
    member = replace(
        member, is_unsure=False, pending=None, due_s=now_s + member.timing.renew_s / 2.0
    )
    if sent is not None and record == sent.record:
        return _holds(member, sent)
    ours = (member.run_id, member.term)
    if member.term and (record is None or (record.run_id, record.term) != ours):
        return _steps_down(member)
    if member.term:
        return replace(member, due_s=now_s)  # ours, but not our last write: renew at once
    if record is not None and record.term > member.past and member.eligible_s < inf:
        # Another has led since: the time for which it leaves the record to others is over.
        return replace(member, eligible_s=min(member.eligible_s, now_s))
    return member


def has_written(member: ElectionMember, write: Write, now_s: float) -> ElectionMember:
    """The swap succeeded."""
    seen = Seen(record=write.record, since_s=now_s)
    return _holds(replace(member, seen=seen, pending=None), write)


def was_refused(member: ElectionMember, now_s: float) -> ElectionMember:
    """The swap failed: another member wrote the record, or an unanswered write of ours."""
    return replace(member, is_unsure=True, due_s=now_s)


def is_unknown(member: ElectionMember, step: Read | Write, now_s: float) -> ElectionMember:
    """No answer: repeat a read; a write may be applied already or later."""
    sent = step if isinstance(step, Write) else member.pending
    return replace(member, pending=sent, is_unsure=True, due_s=now_s + member.timing.renew_s / 4.0)


def time_passes(member: ElectionMember, now_s: float) -> ElectionMember:
    """End the term of a leader that did not renew in time; to lead again it takes a new term."""
    if member.term and now_s >= member.until_s:
        return _steps_down(member)
    return member


def observe_term(member: ElectionMember, term: int, now_s: float) -> ElectionMember:
    """Process a term that an agent reports; an implausible one, or one too soon, is ignored."""
    record = None if member.seen is None else member.seen.record
    stored = 0 if record is None else max(record.term, record.min_term)
    known = max(member.past, member.reported, stored)
    is_plausible = known < term <= min(known + FARTHEST_HEARSAY, HIGHEST_TERM)
    if not is_plausible or now_s < member.reported_s + HEARSAY_EVERY_S:
        return member
    return replace(member, reported=term, reported_s=now_s)


def set_eligible(member: ElectionMember, from_s: float) -> ElectionMember:
    """Allow it to take over from `from_s` on."""
    return replace(member, eligible_s=from_s)


def resign(member: ElectionMember) -> ElectionMember:
    """Release the lease; take over nothing until it is eligible again."""
    return replace(member, eligible_s=inf)


def leave(member: ElectionMember) -> ElectionMember:
    """Release the lease and take over nothing any more: it shuts down."""
    return replace(member, is_leaving=True)


def _holds(member: ElectionMember, write: Write) -> ElectionMember:
    """Apply a write of ours that succeeded; the lease counts from when it was sent."""
    record, timing = write.record, member.timing
    if record.run_id != member.run_id:  # released
        return _steps_down(member)
    if not member.term and record.term <= member.past:
        return member  # renewed too late: that term is given up
    return replace(
        member,
        term=record.term,
        past=record.term,
        until_s=write.sent_s + timing.duration_s - timing.margin_s,
        due_s=write.sent_s + timing.renew_s,
        is_unsure=False,
    )


def _steps_down(member: ElectionMember) -> ElectionMember:
    return replace(member, term=0, until_s=-inf)
