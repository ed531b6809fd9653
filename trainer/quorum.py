"""Which side of a broken network goes on: never more than one, whatever each side knows. Pure.

A side needs a strict majority of the group that stood last, or half of it with its lowest rank.
Who is dead for certain is not counted, if it died on this side: a dead rank may have helped another
side to its majority first. So a notice of death names the last group its rank belonged to.
"""

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

FIRST_GROUP = "first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that are, or want to be, in one fabric.

    `name`: unlike that of any other group of the job; two sides may choose the same generation.
    `electorate`: members of the last group that stood for certain; `line`: its name, and of those
    that were tried since, this one the last. Members only become fewer along a line.
    """

    generation: int
    members: tuple[int, ...]
    name: str
    electorate: tuple[int, ...]
    line: tuple[str, ...]

    @classmethod
    def first(cls, generation: int, members: tuple[int, ...]) -> "Group":
        """The group every job begins with."""
        return cls(
            generation=generation,
            members=members,
            name=FIRST_GROUP,
            electorate=members,
            line=(FIRST_GROUP,),
        )

    def followed_by(self, generation: int, members: tuple[int, ...], verdict: str) -> "Group":
        """The group that `verdict`, the text of an agreement of this one, asks for."""
        name = f"{generation}-{zlib.crc32(f'{self.name} {verdict}'.encode()):08x}"
        return replace(
            self, generation=generation, members=members, name=name, line=(*self.line, name)
        )

    def standing(self) -> "Group":
        """This group, once a move was committed in it: all its members have belonged to it."""
        return replace(self, electorate=self.members, line=(self.name,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """May this side go on, and why."""

    goes_on: bool
    reason: str


def rule(group: Group, present: Collection[int], deaths: Mapping[int, str]) -> Ruling:
    """May the `present` ranks of `group` go on without the others?

    `deaths`: who will certainly never act again, with the last group each belonged to. Views may
    differ between sides, and may be old; they may not be wrong.
    """
    voters = [rank for rank in group.electorate if deaths.get(rank) not in group.line]
    here = [rank for rank in voters if rank in present]
    count = f"{len(here)} of {len(voters)} that may live"
    if 2 * len(here) > len(voters):
        return Ruling(goes_on=True, reason=f"ranks {here} are a majority: {count}")
    if here and 2 * len(here) == len(voters) and here[0] == min(voters):
        return Ruling(goes_on=True, reason=f"ranks {here} are half, with the lowest: {count}")
    away = [rank for rank in voters if rank not in present]
    return Ruling(
        goes_on=False,
        reason=f"ranks {here} are no quorum: {count}; nobody confirms that {away} are dead",
    )
