"""Whether an open database is a whole store: its pages, its columns, and what stands there.

SQLite reads what it can: of a broken page fewer rows, of a damaged cell a text where a number
belongs. Whoever goes on with that has half a past, and numbers incidents twice.
"""

import sqlite3
from functools import cache

from pacekeeper.controller.storage.rows import LARGE, SMALL
from pacekeeper.controller.storage.schema import TABLES

# SQLITE_ERROR: the tables are not what they were when the store was opened.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_SMALL = frozenset({"newest_generation", "generation", "step", "onset_step", "closed_step", "rank"})
# A job that has not ended a step yet is at step -1.
_FROM_MINUS_1 = frozenset({("jobs", "step"), ("decisions", "step"), ("incidents", "closed_step")})
_KINDS = {"TEXT": "text", "INTEGER": "integer", "REAL": "real", "BLOB": "blob"}
Column = tuple[str, str, int, int]  # name, type, whether it must not be null, its place in the key


def is_damage(error: Exception) -> bool:
    """Does it say that the file is no whole store? A full, locked or unreadable disk may mend."""
    # The low byte is the kind of error, what is above it where it was met.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGE


def broken_pages(connection: sqlite3.Connection) -> str:
    """What is wrong with its pages; empty: nothing. Raises sqlite3.DatabaseError for much damage.

    Reads all of it once.
    """
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if verdict == "ok" else " ".join(str(verdict).split())


def wrong_rows(connection: sqlite3.Connection) -> str:
    """What is wrong with the tables of a store of this version. Raises as `broken_pages` does."""
    for table, columns in tables().items():
        if _columns(connection, table) != columns:
            return f"table {table} has not the columns of this version"
        if (place := _misfit(connection, table, columns)) is not None:
            return place
    (copies,) = connection.execute("SELECT count(*) FROM copy").fetchone()
    return "" if copies == 1 else f"it is {copies} copies at once"


@cache
def tables() -> dict[str, tuple[Column, ...]]:
    """Those of a new store."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(TABLES)
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: _columns(connection, name) for (name,) in names}
    finally:
        connection.close()


def _columns(connection: sqlite3.Connection, table: str) -> tuple[Column, ...]:
    rows = connection.execute(f"PRAGMA table_info({table})")
    return tuple((name, kind, needed, key) for _, name, kind, needed, _, key in rows)


def _misfit(connection: sqlite3.Connection, table: str, columns: tuple[Column, ...]) -> str | None:
    """A value of another type than its column's, a number of no use, a text that is none."""
    wrong = " OR ".join(
        f"typeof({name}) NOT IN ('{_KINDS[kind]}'{'' if needed or key else ', ' + repr('null')})"
        for name, kind, needed, key in columns
    )
    wrong += "".join(
        f" OR {name} NOT BETWEEN {-1 if (table, name) in _FROM_MINUS_1 else 0}"
        f" AND {(SMALL if name in _SMALL else LARGE) - 1}"
        for name, kind, *_ in columns
        if kind == "INTEGER"
    )
    row = connection.execute(f"SELECT rowid FROM {table} WHERE {wrong} LIMIT 1").fetchone()
    if row is not None:
        return f"row {row[0]} of {table} holds a value that can not be there"
    texts = ", ".join(name for name, kind, *_ in columns if kind == "TEXT")
    try:
        for _ in connection.execute(f"SELECT {texts} FROM {table}") if texts else ():
            pass
    except (sqlite3.OperationalError, UnicodeDecodeError) as error:
        return f"a text of {table} is none: {error!r:.100}"
    return None
