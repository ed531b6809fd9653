"""Whether an open database is an undamaged store: SQLite's own check of pages and values.

Called when a store is opened, backed up or received as a replica. Rows are validated where they are
decoded (`rows.py`).
"""

import sqlite3

# SQLITE_ERROR: the tables are not what they were when the store was opened.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def is_damage(error: Exception) -> bool:
    """Whether an SQLite error means a damaged file, and not a full, locked or slow disk."""
    # The low byte is the kind of error, the rest says where it occurred.
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _DAMAGE


def broken_pages(connection: sqlite3.Connection) -> str:
    """The first fault that `PRAGMA quick_check` reports; empty: none. Reads the whole file once.

    Raises:
        sqlite3.DatabaseError: the file is damaged too much to be checked.
    """
    (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    return "" if result == "ok" else " ".join(str(result).split())
