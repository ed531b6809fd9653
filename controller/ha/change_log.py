"""A store's connection that remembers what a transaction changed, for those who keep a copy.

Statements with their values: they change the same rows in the same way wherever the copy stands.
"""

import sqlite3
from collections.abc import Sequence
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
        self._changes: list[Change] = []
        self.is_kept = False

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def execute(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Run one statement; a change is remembered once it is done."""
        cursor = self._connection.execute(statement, values)
        if statement == "ROLLBACK":
            self._changes.clear()
        elif self.is_kept and statement.lstrip().upper().startswith(_CHANGES):
            self._changes.append(Change(statement=statement, values=tuple(values)))
        return cursor

    def taken(self) -> tuple[Change, ...]:
        """What has changed since it was last asked."""
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
