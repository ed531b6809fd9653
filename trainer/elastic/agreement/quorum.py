"""Which side of a broken network goes on: never more than one, whatever each side knows. Pure.

A side needs a strict majority of the group that stood last, or half of it with its lowest rank.
Who is dead for certain is not counted, if it died on this side: a dead rank may have helped another
side to its majority first. So a notice of death names the last group its rank belonged to.
Where ranks joined, and not all members may know yet that their group stood, a side needs both: that
of the group before them, and that with them.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.telemetry.shm_ring import MAX_RANKS

Count = Annotated[int, Field(ge=0, le=2**62)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]  # or a node: a job has no more of them

FIRST_GROUP = "first"
NO_GROUP = "none"  # of a rank that died before it belonged to any: it has helped nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that are, or want to be, in one fabric.

    `name`: unlike that of any other group of the job; two sides may choose the same generation.
    `electorates`: members of the last group that stood for certain, and of those with newcomers
    that may have stood since; `line`: the name of the first of these, and of all that were tried
    since, this one the last. `has_stood`: this rank has committed something in it.
    """

    generation: Count
    members: tuple[Rank, ...]
    name: str
    electorates: tuple[tuple[Rank, ...], ...]
    line: tuple[str, ...]
    has_stood: bool = False

    @classmethod
    def first(cls, generation: int, members: tuple[int, ...]) -> "Group":
        """The group every job begins with."""
        return cls(
            generation=generation,
            members=members,
            name=FIRST_GROUP,
            electorates=(members,),
            line=(FIRST_GROUP,),
            has_stood=True,
        )

    def followed_by(self, generation: int, members: tuple[int, ...], verdict: str) -> "Group":
        """The group that `verdict`, the text of an agreement of this one, asks for."""
        name = f"{generation}-{zlib.crc32(f'{self.name} {verdict}'.encode()):08x}"
        return replace(
            self,
            generation=generation,
            members=members,
            name=name,
            line=(*self.line, name),
            has_stood=False,
        )

    def standing(self) -> "Group":
        """This group, once more was committed in it: all its members have belonged to it.

        If it has newcomers, others may not know that it stood: until the second commit, which no
        rank sees before all have seen the first, the electorates from before must agree, too.
        """
        if self.electorates == (self.members,) and self.line == (self.name,):
            return self
        members = set(self.members)
        is_narrower = all(members <= set(electorate) for electorate in self.electorates)
        if self.has_stood or is_narrower:
            return replace(self, electorates=(self.members,), line=(self.name,), has_stood=True)
        return replace(self, electorates=(*self.electorates, self.members), has_stood=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumDecision:
    """May this side go on, and why."""

    may_continue: bool
    reason: str


def decide_quorum(
    group: Group, present: Collection[int], deaths: Mapping[int, str]
) -> QuorumDecision:
    """May the `present` ranks of `group` go on without the others?

    `deaths`: who will certainly never act again, with the last group each belonged to. Views may
    differ between sides, and may be old; they may not be wrong.
    """
    certain = {rank for rank, last in deaths.items() if last in (*group.line, NO_GROUP)}
    voters = [[rank for rank in one if rank not in certain] for one in group.electorates]
    # Of one that is dead to the last rank, nobody can have helped another side.
    rulings = [_rule(one, present) for one in voters if one] or [_rule([], present)]
    return next((ruling for ruling in rulings if not ruling.may_continue), rulings[-1])


def _rule(voters: Collection[int], present: Collection[int]) -> QuorumDecision:
    here = [rank for rank in voters if rank in present]
    ours = format_ranks(here)
    count = f"{len(here)} of {len(voters)} that may live"
    if 2 * len(here) > len(voters):
        return QuorumDecision(may_continue=True, reason=f"ranks {ours} are a majority: {count}")
    if here and 2 * len(here) == len(voters) and here[0] == min(voters):
        return QuorumDecision(
            may_continue=True, reason=f"ranks {ours} are half, with the lowest: {count}"
        )
    away = format_ranks(rank for rank in voters if rank not in present)
    return QuorumDecision(
        may_continue=False,
        reason=f"ranks {ours} are no quorum: {count}; nobody confirms that {away} are dead",
    )
