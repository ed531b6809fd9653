"""Deletes old rows from the store, one batch per tick.

Rows go by age, then by number, then, if the file exceeds `store_bytes`, the oldest of all kinds.
Open incidents, waiting proposals, standing orders and running jobs stay. A batch is one transaction
of some milliseconds; rows are deleted by key, so that replicas drop the same rows. Free pages then
return to the disk (incremental vacuum). Once a minute a new pass begins.
"""

import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from pacekeeper.controller.storage import sqlite_file
from pacekeeper.controller.storage.change_log import Journal
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import RetentionConfig
from pacekeeper.core.incidents.proposals import ProposalState

Key = tuple[Any, ...]


_OPEN = f"('{ProposalState.WAITING.value}', '{ProposalState.APPROVED.value}')"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
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
INCIDENTS = RetentionRule(
    table="incidents",
    keys=("incident_id",),
    age="closed_unix_s",
    may_go="incident_id < (SELECT max(incident_id) FROM incidents)",
    also=("courses",),
)


DECISIONS = RetentionRule(table="decisions", keys=("decision_id",), age="unix_s")


PROPOSALS = RetentionRule(
    table="proposals",
    keys=("proposal_id",),
    age="made_unix_s",
    may_go=f"answer NOT IN {_OPEN} AND proposal_id < (SELECT max(proposal_id) FROM proposals)",
)


LAYOUTS = RetentionRule(  # megabytes each, of a large job
    table="layouts", keys=("job", "generation"), age="unix_s", batch=4
)


PACES = RetentionRule(table="paces", keys=("job",), age="newest_unix_s")


ALL = (LAYOUTS, INCIDENTS, DECISIONS, PROPOSALS, PACES)


LOOK_EVERY_S = 60.0
DAY_S = 86_400.0
LONG_LOG_BYTES = 4 * sqlite_file.LOG_BYTES
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Retention:
    """Of one store. Use from its thread."""

    store: Store
    config: RetentionConfig
    _looked_s: float = -inf
    _rules: deque[tuple[RetentionRule, Callable[[], list[Key]]]] = field(
        default_factory=deque
    )  # to follow
    _said: dict[str, str] = field(default_factory=dict)  # troubles that were told

    def on_tick(self, now_s: float, unix_s: float) -> None:
        """On a tick: one batch of rows, or one piece of the file."""
        if not self._rules and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._rules.extend(self._due(unix_s))
            self._watch_log()
        try:
            if not self._drop():
                self.store.give_back()
        except sqlite3.Error as error:
            self._rules.clear()  # the next time
            self._say("past", f"what is too old can not be dropped: {error}")
        else:
            self._say("past", "")

    def _due(self, unix_s: float) -> list[tuple[RetentionRule, Callable[[], list[Key]]]]:
        """By age, then by number."""
        journal, before = self.store.journal, unix_s - self.config.history_days * DAY_S
        kept = {
            LAYOUTS: self.config.layouts,
            INCIDENTS: self.config.incidents,
            DECISIONS: self.config.decisions,
            PROPOSALS: self.config.proposals,
        }
        old = [(past, partial(past.older, journal, before)) for past in ALL]
        return [*old, *((past, partial(past.beyond, journal, kept[past])) for past in kept)]

    def _drop(self) -> bool:
        """One batch; False: nothing (more) has to go."""
        while self._rules:
            past, find = self._rules[0]
            if keys := find():
                self._drop_these(past, keys)
                return True
            self._rules.popleft()
        return self._drop_the_oldest()

    def _drop_the_oldest(self) -> bool:
        """Where the store is too large: of the kind that has the oldest."""
        if self.store.used_bytes <= self.config.store_bytes:
            self._say("size", "")
            return False
        journal = self.store.journal
        past = min(ALL, key=lambda past: past.oldest(journal))
        if keys := past.older(journal, inf):
            self._drop_these(past, keys)
            return True
        most = self.config.store_bytes
        self._say("size", f"what runs or is open is more than store_bytes = {most} allow")
        return False

    def _drop_these(self, past: RetentionRule, keys: list[Key]) -> None:
        with self.store.transaction():
            past.drop(self.store.journal, keys)

    def _watch_log(self) -> None:
        size = self.store.log_bytes
        trouble = ""
        if size > LONG_LOG_BYTES:
            trouble = "its log can not be written back: another process reads it since long"
        self._say("log", trouble)

    def _say(self, what: str, trouble: str) -> None:
        if trouble != self._said.get(what, ""):
            self._said[what] = trouble
            _log.warning("store: %s", trouble or f"{what} is well again")
