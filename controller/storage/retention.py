"""Deletes old rows from the store, one batch per tick.

Rows go by age, then by number, then, if the file exceeds `store_bytes`, the oldest of all kinds.
Open incidents, waiting proposals, standing orders and running jobs stay. A batch is one transaction
of some milliseconds. Free pages then return to the disk (incremental vacuum). Once a minute a new
pass begins.
"""

import logging
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import sqlalchemy as sa

from pacekeeper.controller.storage import sqlite_file
from pacekeeper.controller.storage.postgres import FencedError
from pacekeeper.controller.storage.store import Store
from pacekeeper.controller.storage.tables import (
    DECISIONS,
    INCIDENT_TIMELINES,
    INCIDENTS,
    JOB_TIMELINES,
    LAYOUTS,
    PROPOSALS,
)
from pacekeeper.core.config.controller import RetentionConfig
from pacekeeper.core.incidents.proposals import ProposalState

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """How rows of one table are deleted.

    Attributes:
        table: The table.
        age: Its column with the time that counts, in Unix seconds.
        may_go: Condition of rows that may be deleted.
        also: Tables whose rows of the same key are deleted, too.
        batch: Rows deleted in one transaction.
    """

    table: sa.Table
    age: str
    may_go: sa.ColumnElement[bool] = field(default_factory=sa.true)
    also: tuple[sa.Table, ...] = ()
    batch: int = 64

    def older(self, store: Store, unix_s: float) -> list[Key]:
        """Keys of the oldest batch of rows from before `unix_s`."""
        age = self.table.c[self.age]
        what = sa.select(*self._keys).where(age < unix_s, self.may_go).order_by(age)
        return self._found(store, what.limit(self.batch))

    def oldest(self, store: Store) -> float:
        """The time of the oldest row; infinity: there is none."""
        age = self.table.c[self.age]
        what = sa.select(age).where(age.is_not(None), self.may_go).order_by(age).limit(1)
        with store.connected() as connection:
            found = connection.scalar(what)
        return inf if found is None else float(found)

    def beyond(self, store: Store, kept: int) -> list[Key]:
        """Keys of one batch of the rows beyond the newest `kept`."""
        age = self.table.c[self.age]
        order = [column.desc() for column in (age, *self._keys)]
        what = sa.select(*self._keys).where(age.is_not(None), self.may_go).order_by(*order)
        return self._found(store, what.limit(self.batch).offset(kept))

    def drop(self, store: Store, keys: Sequence[Key]) -> None:
        """Delete the rows of these keys."""
        with store.transaction(), store.connected() as connection:
            for table in (self.table, *self.also):
                columns = [table.c[column.name] for column in self._keys]
                connection.execute(sa.delete(table).where(sa.tuple_(*columns).in_(keys)))

    @property
    def _keys(self) -> list[sa.Column[Any]]:
        return list(self.table.primary_key.columns)

    def _found(self, store: Store, what: sa.Select[Any]) -> list[Key]:
        with store.connected() as connection:
            return [tuple(row) for row in connection.execute(what)]


# The newest number stays: it is what the next one is counted from.
INCIDENT_RULE = RetentionRule(
    table=INCIDENTS,
    age="closed_unix_s",
    may_go=INCIDENTS.c.incident_id
    < sa.select(sa.func.max(INCIDENTS.alias().c.incident_id)).scalar_subquery(),
    also=(INCIDENT_TIMELINES,),
)
DECISION_RULE = RetentionRule(table=DECISIONS, age="unix_s")
PROPOSAL_RULE = RetentionRule(
    table=PROPOSALS,
    age="made_unix_s",
    may_go=sa.and_(
        PROPOSALS.c.answer.not_in((ProposalState.WAITING.value, ProposalState.APPROVED.value)),
        PROPOSALS.c.proposal_id
        < sa.select(sa.func.max(PROPOSALS.alias().c.proposal_id)).scalar_subquery(),
    ),
)
LAYOUT_RULE = RetentionRule(table=LAYOUTS, age="unix_s", batch=4)  # megabytes each, of a large job
JOB_TIMELINE_RULE = RetentionRule(table=JOB_TIMELINES, age="newest_unix_s")
ALL = (LAYOUT_RULE, INCIDENT_RULE, DECISION_RULE, PROPOSAL_RULE, JOB_TIMELINE_RULE)

LOOK_EVERY_S = 60.0
DAY_S = 86_400.0
LONG_LOG_BYTES = 4 * sqlite_file.LOG_BYTES
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Retention:
    """Retention of one store; use from its thread."""

    store: Store
    config: RetentionConfig
    used_bytes: int = 0  # as last looked at
    log_bytes: int = 0
    _looked_s: float = -inf
    _is_within: bool = False  # its size, since the last look
    _rules: deque[tuple[RetentionRule, Callable[[], list[Key]]]] = field(
        default_factory=deque
    )  # to follow
    _troubles: dict[str, str] = field(default_factory=dict)  # logged, by subject

    def on_tick(self, now_s: float, unix_s: float) -> None:
        """Delete one batch of rows, or return some free pages to the file system."""
        try:
            if not self._rules and now_s - self._looked_s >= LOOK_EVERY_S:
                self._looked_s, self._is_within = now_s, False
                self._rules.extend(self._due(unix_s))
                self._watch_log()
            if not self._drop():
                self.store.database.give_back()
        except FencedError:
            self._rules.clear()  # another controller's work now
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            self._rules.clear()  # the next time
            self._log_trouble("past", f"old rows cannot be deleted: {error}")
        else:
            self._log_trouble("past", "")

    def _due(self, unix_s: float) -> list[tuple[RetentionRule, Callable[[], list[Key]]]]:
        """The rules of a new pass with the searches for their rows: by age, then by number."""
        before = unix_s - self.config.history_days * DAY_S
        kept = (
            (LAYOUT_RULE, self.config.layouts),
            (INCIDENT_RULE, self.config.incidents),
            (DECISION_RULE, self.config.decisions),
            (PROPOSAL_RULE, self.config.proposals),
        )
        old = [(past, partial(past.older, self.store, before)) for past in ALL]
        return [*old, *((past, partial(past.beyond, self.store, most)) for past, most in kept)]

    def _drop(self) -> bool:
        """Delete one batch; False: there is nothing (more) to delete."""
        while self._rules:
            past, find = self._rules[0]
            if keys := find():
                past.drop(self.store, keys)
                return True
            self._rules.popleft()
        return self._drop_the_oldest()

    def _drop_the_oldest(self) -> bool:
        """If the store is too large, delete a batch from the table that has the oldest row."""
        if self._is_within:
            return False
        self.used_bytes = self.store.database.used_bytes
        if self.used_bytes <= self.config.store_bytes:
            self._is_within = True
            self._log_trouble("size", "")
            return False
        past = min(ALL, key=lambda past: past.oldest(self.store))
        if keys := past.older(self.store, inf):
            past.drop(self.store, keys)
            return True
        most = self.config.store_bytes
        self._log_trouble(
            "size", f"running jobs and open incidents need more than store_bytes = {most}"
        )
        return False

    def _watch_log(self) -> None:
        self.log_bytes = self.store.database.log_bytes
        trouble = ""
        if self.log_bytes > LONG_LOG_BYTES:
            trouble = "its log cannot be written back: another process has read it for a long time"
        self._log_trouble("log", trouble)

    def _log_trouble(self, what: str, trouble: str) -> None:
        if trouble != self._troubles.get(what, ""):
            self._troubles[what] = trouble
            _log.warning("store: %s", trouble or f"{what}: no error any more")
