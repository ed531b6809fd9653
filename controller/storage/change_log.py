"""A store's connection that remembers what a transaction changed, for those who keep a copy.

Statements with their values: they change the same rows in the same way wherever the copy stands.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_CHANGES = ("REPLACE", "INSERT", "DELETE", "UPDATE")
_ALLOWED = frozenset(
    {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_READ}
    | {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_FUNCTION}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One statement that changed rows, and its values."""

    statement: str
    values: tuple[Any, ...]


class Journal:
    """What a store uses of its connection. `is_kept`: whether anybody wants the changes."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._changes: list[Change] = []  # committed
        self._pending: list[Change] | None = None  # of the open transaction
        self.is_kept = False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all statements of the block or none; their changes count once COMMIT succeeded.

        On some errors (SQLITE_FULL, SQLITE_IOERR) SQLite rolls back by itself.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        self._pending = []
        try:
            yield
            self._connection.execute("COMMIT")
            self._changes += self._pending
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        finally:
            self._pending = None

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement; a change is remembered once it is done.

        Raises sqlite3.OperationalError in a transaction that SQLite has rolled back by itself:
        the statement would be committed alone.
        """
        self._raise_if_rolled_back()
        cursor = self._connection.execute(statement, values)
        if self.is_kept and statement.lstrip().upper().startswith(_CHANGES):
            changes = self._changes if self._pending is None else self._pending
            changes.append(Change(statement=statement, values=tuple(values)))
        return cursor

    def _raise_if_rolled_back(self) -> None:
        if self._pending is not None and not self._connection.in_transaction:
            raise sqlite3.OperationalError("SQLite has rolled the transaction back")

    def taken(self) -> tuple[Change, ...]:
        """The committed changes since the last call."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    def apply(self, changes: Sequence[Change]) -> None:
        """The changes of another store's transaction, which may touch rows and nothing else."""
        self._connection.set_authorizer(_judge)
        try:
            for change in changes:
                self._connection.execute(change.statement, change.values)
        finally:
            self._connection.set_authorizer(None)

    def snapshot(self) -> bytes:
        """The whole database as it is now."""
        return self._connection.serialize()

    def close(self) -> None:
        """As a connection's."""
        self._connection.close()


def _judge(action: int, *names: str | None) -> int:
    """Rows of ordinary tables only: no other file, no setting, no schema."""
    is_schema = bool(names) and str(names[0]).lower().startswith("sqlite_")
    return sqlite3.SQLITE_OK if action in _ALLOWED and not is_schema else sqlite3.SQLITE_DENY
