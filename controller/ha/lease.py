"""Who of the controllers may command, by one record that all of them compare and swap. Pure.

The store of that record needs no clock and no sessions: a record that has not changed for its
duration, by the clock of who looks, is nobody's any more. The leader counts from before it sent
its last renewal and stops a margin earlier, so it has stopped before another may begin, whatever
the two clocks say, as long as their rates differ by less than the margin's share. A term has one
leader: each takes a term above the one in the record, and only one of them can swap it in.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from math import inf
from typing import Any

HIGHEST_TERM = 1 << 53
# What an agent says of a term is hearsay: believed for what a forgetful lease's store explains, and
# so seldom that an agent that lies makes leaders change, but never keeps them from leading.
HEARSAY_EVERY_S = 300.0
FARTHEST_HEARSAY = 1 << 20  # takeovers of years


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a record holds, how often it is renewed, and how much earlier its holder stops."""

    duration_s: float
    renew_s: float
    margin_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.margin_s < self.duration_s:
            raise ValueError("margin_s: expected above 0 and below duration_s")
        if not 0.0 < self.renew_s < self.duration_s - self.margin_s:
            raise ValueError("renew_s: expected above 0 and below duration_s - margin_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the lease's store holds. `life` names one start of the `holder`, "" where it let go.

    `copies`: the stores of state that have all that was ever told; who has none of them may not
    lead. `floor`: a term that somebody has seen; the next one is above it. `renewals` makes each
    record another one.
    """

    term: int
    holder: str
    life: str
    address: str
    duration_s: float
    copies: tuple[str, ...] = ()
    floor: int = 0
    renewals: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The record as it was read last, and when it was first read so. `version`: the store's name
    for just this content; record None, version "": there is none.
    """

    record: Record | None
    version: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Put `record` in the place of what has the version `expected`; "": where nothing is."""

    record: Record
    expected: str
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
    """One controller, as far as the lease goes.

    `copy`: the name of its store of state as it is now; "" where it has none. `term` and `until_s`:
    what it leads, and until when; `past`: the highest it ever led. `wanted`: the copies that the
    record shall name while it leads. `heard`: the highest term that was believed of those anybody
    told it of, at `heard_s`. `pending`: a write whose outcome is not known. Only a candidate takes
    over; who is withdrawn is none, for its copy is not whole.
    """

    name: str
    life: str
    address: str
    timing: Timing
    copy: str = ""
    seen: Seen | None = None
    term: int = 0
    until_s: float = -inf
    past: int = 0
    wanted: tuple[str, ...] = ()
    heard: int = 0
    heard_s: float = -inf
    due_s: float = -inf
    pending: Write | None = None
    is_unsure: bool = True
    is_candidate: bool = False
    is_withdrawn: bool = False
    is_leaving: bool = False


def active_term(member: ElectionMember, now_s: float) -> int:
    """The term in which it may command now; 0: it may not."""
    return member.term if member.is_candidate and now_s < member.until_s else 0


def next_step(member: ElectionMember, now_s: float) -> Step:
    """What to do with the lease's store. After a step, say what came of it by the functions below.

    A leader renews; who follows looks, and takes over what nobody holds any more.
    """
    if member.is_unsure or member.seen is None:
        return Read() if now_s >= member.due_s else Wait(member.due_s)
    if member.term:
        return _lead(member, member.seen, now_s)
    if now_s >= member.due_s:
        return Read()
    is_candidate = member.is_candidate and not member.is_leaving
    free_s = free_from_s(member) if is_candidate else inf
    if now_s >= free_s:
        return Write(record=_taken(member), expected=member.seen.version, sent_s=now_s)
    return Wait(min(member.due_s, free_s))


def _lead(member: ElectionMember, seen: Seen, now_s: float) -> Step:
    record = seen.record
    assert record is not None, "who leads has written one"
    is_ending = member.is_leaving or not member.is_candidate
    if is_ending or member.heard > max(member.term, record.floor):
        # Released, not raised: with a term above all that was seen it begins in a new one.
        free = replace(
            record,
            holder="",
            life="",
            # Where no other has all that was told nobody may lead: a person knows what was lost.
            copies=(member.is_withdrawn and record.copies[1:]) or record.copies,
            floor=max(record.floor, member.heard),
            renewals=_next(seen),
        )
        return Write(record=free, expected=seen.version, sent_s=now_s)
    if now_s < member.due_s and record.copies == member.wanted:
        return Wait(member.due_s)
    renewed = replace(record, copies=member.wanted, renewals=_next(seen))
    return Write(record=renewed, expected=seen.version, sent_s=now_s)


def free_from_s(member: ElectionMember) -> float:
    """When this member may take over, if the record stays as it is; infinity: it may not."""
    seen = member.seen
    assert seen is not None, "it has been read"
    record = seen.record
    if record is not None and record.copies and member.copy not in record.copies:
        return inf
    if record is not None and record.life in ("", member.life):
        return seen.since_s
    # The first copy is the leader's own. Who has it open now holds its lock: that leader is dead.
    if record is not None and record.copies[:1] == (member.copy,):
        return seen.since_s
    # Without a record somebody may still lead, under one that was deleted. Where nothing is known
    # to have been told, who has no store comes last: the others would take over its empty one.
    times = 1 if member.copy else 2
    duration_s = member.timing.duration_s if record is None else record.duration_s
    return seen.since_s + times * duration_s


def _taken(member: ElectionMember) -> Record:
    """The other copies stay named until it wants its own only: before, it tells nobody anything."""
    assert member.seen is not None, "it has been read"
    old = member.seen.record
    others = [] if old is None else [copy for copy in old.copies if copy != member.copy]
    before = (0, 0) if old is None else (old.term, old.floor)
    return Record(
        term=max(*before, member.heard) + 1,
        holder=member.name,
        life=member.life,
        address=member.address,
        duration_s=member.timing.duration_s,
        copies=(member.copy, *others) if member.copy else (),
        renewals=_next(member.seen),
    )


def _next(seen: Seen) -> int:
    return 1 if seen.record is None else seen.record.renewals + 1


def has_read(
    member: ElectionMember, record: Record | None, version: str, now_s: float
) -> ElectionMember:
    """The record is so, and of this version; the answer came at `now_s`."""
    if member.seen is None or member.seen.version != version:
        member = replace(member, seen=Seen(record=record, version=version, since_s=now_s))
    sent = member.pending
    member = replace(
        member, is_unsure=False, pending=None, due_s=now_s + member.timing.renew_s / 2.0
    )
    if sent is not None and record == sent.record:
        return _holds(member, sent)
    if member.term and (record is None or (record.life, record.term) != (member.life, member.term)):
        return _steps_down(member)
    if member.term:
        return replace(member, due_s=now_s)  # ours, but not our last words: renew at once
    return member


def has_written(member: ElectionMember, write: Write, version: str, now_s: float) -> ElectionMember:
    """The write was done; the record has this version now."""
    seen = Seen(record=write.record, version=version, since_s=now_s)
    return _holds(replace(member, seen=seen, pending=None), write)


def was_refused(member: ElectionMember, now_s: float) -> ElectionMember:
    """What was there had another version: somebody else wrote, or we did, and were not told."""
    return replace(member, is_unsure=True, due_s=now_s)


def is_unknown(member: ElectionMember, step: Read | Write, now_s: float) -> ElectionMember:
    """No answer: a read is done again, a write may have been done or be done yet."""
    sent = step if isinstance(step, Write) else member.pending
    return replace(member, pending=sent, is_unsure=True, due_s=now_s + member.timing.renew_s / 4.0)


def time_passes(member: ElectionMember, now_s: float) -> ElectionMember:
    """Who could not renew in time leads no more, and has to take a new term."""
    if member.term and now_s >= member.until_s:
        return _steps_down(member)
    return member


def set_wanted_replicas(member: ElectionMember, copies: tuple[str, ...]) -> ElectionMember:
    """The record shall name these copies; of who leads the first one is its own."""
    return replace(member, copy=copies[0], wanted=copies)


def observe_term(member: ElectionMember, term: int, now_s: float) -> ElectionMember:
    """Somebody says that a command of this term was seen; it is believed, or not."""
    record = None if member.seen is None else member.seen.record
    stored = 0 if record is None else max(record.term, record.floor)
    known = max(member.past, member.heard, stored)
    is_plausible = known < term <= min(known + FARTHEST_HEARSAY, HIGHEST_TERM)
    if not is_plausible or now_s < member.heard_s + HEARSAY_EVERY_S:
        return member
    return replace(member, heard=term, heard_s=now_s)


def set_eligible(member: ElectionMember, copy: str) -> ElectionMember:
    """It may lead from now on, with this store of state; "": with an empty one."""
    member = member if member.is_candidate else _steps_down(member)  # won for another store
    return replace(member, copy=copy, is_candidate=True, is_withdrawn=False)


def set_ineligible(member: ElectionMember) -> ElectionMember:
    """Its store is no whole one: what it has won, or wins yet, goes back to the other copies."""
    return replace(member, is_candidate=False, is_withdrawn=True)


def resign(member: ElectionMember) -> ElectionMember:
    """What it led has ended, and it is no candidate until it stands again."""
    return replace(_steps_down(member), is_candidate=False)


def leave(member: ElectionMember) -> ElectionMember:
    """It goes down: what it leads it releases, and takes nothing over any more."""
    return replace(member, is_leaving=True)


def _holds(member: ElectionMember, write: Write) -> ElectionMember:
    """Our write stands. It counts from when it was sent."""
    record, timing = write.record, member.timing
    if record.life != member.life:  # released
        return _steps_down(member)
    if not member.term and record.term <= member.past:
        return member  # renewed too late: that term is given up
    return replace(
        member,
        term=record.term,
        past=record.term,
        wanted=member.wanted if record.term == member.term else record.copies,
        until_s=write.sent_s + timing.duration_s - timing.margin_s,
        due_s=write.sent_s + timing.renew_s,
        is_unsure=False,
    )


def _steps_down(member: ElectionMember) -> ElectionMember:
    return replace(member, term=0, until_s=-inf, wanted=())


MOST_BYTES = 16384


_KINDS: dict[str, type] = {f.name: f.type for f in fields(Record)}  # type: ignore[misc]


def encode_record(record: Record) -> str:
    """One line, keys in order."""
    return json.dumps(asdict(record), sort_keys=True)


def decode_record(text: str) -> Record:
    """Raises ValueError for what is no record of ours."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} characters are no record of a lease")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(found, dict) or found.keys() != _KINDS.keys():
        raise ValueError("not a record of a lease")
    copies = found.pop("copies")
    if not isinstance(copies, list) or not all(isinstance(copy, str) for copy in copies):
        raise ValueError("copies: expected names")
    for name, value in found.items():
        expected = (int, float) if _KINDS[name] is float else (_KINDS[name],)
        if isinstance(value, bool) or not isinstance(value, expected):
            raise ValueError(f"{name}: {value!r}")
        if isinstance(value, int | float) and not 0 <= value <= HIGHEST_TERM:
            raise ValueError(f"{name}: {value!r}")
    return Record(copies=tuple(copies), **found)
