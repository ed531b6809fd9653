"""Which rows of the store are of the past, the oldest first, and how they are dropped.

What is open is no row of the past, nor is what numbers go on from. Rows are read by indexes that
hold all that is asked for, and dropped by their keys: a copy of the store drops the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from pacekeeper.controller.ha.change_log import Journal
from pacekeeper.core.incidents.proposals import Answer

Key = tuple[Any, ...]
_OPEN = f"('{Answer.WAITING.value}', '{Answer.APPROVED.value}')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """One kind of rows. `may_go`: which of them are over; `batch`: rows dropped at once."""

    table: str
    keys: tuple[str, ...]
    age: str
    may_go: str = "true"
    also: tuple[str, ...] = ()  # tables with rows of the same key
    batch: int = 64

    def older(self, journal: Journal, unix_s: float) -> list[Key]:
        """The oldest, as many as go at once, from before this time."""
        return journal.execute(
            f"SELECT {', '.join(self.keys)} FROM {self.table} WHERE {self.age} < ?"
            f" AND {self.may_go} ORDER BY {self.age} LIMIT ?",
            (unix_s, self.batch),
        ).fetchall()

    def oldest(self, journal: Journal) -> float:
        """The time of the oldest; infinity: there is none."""
        row = journal.execute(
            f"SELECT {self.age} FROM {self.table} WHERE {self.age} IS NOT NULL AND {self.may_go}"
            f" ORDER BY {self.age} LIMIT 1"
        ).fetchone()
        return inf if row is None else float(row[0])

    def beyond(self, journal: Journal, kept: int) -> list[Key]:
        """As many as go at once of those that come after the newest `kept`."""
        order = ", ".join(f"{column} DESC" for column in (self.age, *self.keys))
        return journal.execute(
            f"SELECT {', '.join(self.keys)} FROM {self.table} WHERE {self.age} IS NOT NULL"
            f" AND {self.may_go} ORDER BY {order} LIMIT ? OFFSET ?",
            (self.batch, kept),
        ).fetchall()

    def drop(self, journal: Journal, keys: Sequence[Key]) -> None:
        """These, for good."""
        where = " AND ".join(f"{column} = ?" for column in self.keys)
        for table in (self.table, *self.also):
            for key in keys:
                journal.execute(f"DELETE FROM {table} WHERE {where}", key)


# The newest number stays: it is what the next one is counted from.
INCIDENTS = Past(
    table="incidents",
    keys=("incident_id",),
    age="closed_unix_s",
    may_go="incident_id < (SELECT max(incident_id) FROM incidents)",
    also=("courses",),
)
DECISIONS = Past(table="decisions", keys=("decision_id",), age="unix_s")
PROPOSALS = Past(
    table="proposals",
    keys=("proposal_id",),
    age="made_unix_s",
    may_go=f"answer NOT IN {_OPEN} AND proposal_id < (SELECT max(proposal_id) FROM proposals)",
)
LAYOUTS = Past(  # megabytes each, of a large job
    table="layouts", keys=("job", "generation"), age="unix_s", batch=4
)
PACES = Past(table="paces", keys=("job",), age="newest_unix_s")
ALL = (LAYOUTS, INCIDENTS, DECISIONS, PROPOSALS, PACES)
