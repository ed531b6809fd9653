"""The store's SQLite file: opened by one controller, verified, migrated, kept small.

Write-ahead log with synchronous FULL, so acknowledged data survives a kill at any moment. A damaged
file is rejected. A store of an older version is migrated in one transaction, after a copy of it was
made in the same directory.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pacekeeper.controller.storage.schema import APPLICATION_ID, OLDEST_VERSION, UPGRADES
from pacekeeper.controller.storage.tables import SCHEMA_VERSION, create_statements
from pacekeeper.core.errors import HostError, VersionError

# SQLITE_ERROR: the tables are not what they were when the store was opened.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


BUSY_S = 0.1  # that SQLite waits for a lock; then the caller tries again
LOG_BYTES = 16 << 20  # that the write-ahead log keeps on disk once it was written back
SLACK_BYTES = 4 << 20  # free inside the file that are kept for what comes next
RETURNED_PAGES = 256  # to the file system at once: some milliseconds
HEADER_BYTES = 100  # of every SQLite database
_log = logging.getLogger(__name__)


class DamagedError(HostError):
    """The store is damaged."""


class SqliteDatabase:
    """An open SQLite store; use from one thread at a time."""

    dialect = "sqlite"

    def __init__(self, connection: sqlite3.Connection, path: Path, lock: int) -> None:
        self._raw, self._path, self._lock = connection, path, lock
        self.name = str(path)
        self._engine = sa.create_engine(
            "sqlite://", creator=lambda: connection, poolclass=StaticPool
        )

    @classmethod
    def open(cls, path: Path) -> "SqliteDatabase":
        """Open or make the store. Raises HostError (no access, not ours, in use), VersionError."""
        held = lock(path)
        try:
            return cls(connect(path), path, held)
        except BaseException:
            os.close(held)
            raise

    @contextlib.contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """One write transaction: all of it is stored, or nothing.

        Raises:
            sqlalchemy.exc.DBAPIError: It was not stored. On some errors (SQLITE_FULL, SQLITE_IOERR)
                SQLite rolls back by itself.
        """
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
                if not self._raw.in_transaction:
                    why = sqlite3.OperationalError("SQLite has rolled the transaction back")
                    raise sa.exc.OperationalError("COMMIT", None, why)
                connection.commit()
            except BaseException:
                connection.rollback()
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection for reads."""
        with self._engine.connect() as connection:
            yield connection

    def cut(self) -> None:
        """Nothing: a file answers in the end."""

    def close(self) -> None:
        """Close the file, which writes the log back into it, and release its lock."""
        self._engine.dispose()
        self._raw.close()
        os.close(self._lock)

    @property
    def used_bytes(self) -> int:
        """Bytes used in the file, without free pages and without the log."""
        return used_bytes(self._raw)

    @property
    def log_bytes(self) -> int:
        """The write-ahead log, which grows while another process reads the store for long."""
        try:
            return os.stat(f"{self._path}-wal").st_size
        except FileNotFoundError:
            return 0

    def give_back(self) -> bool:
        """Return some free pages to the file system; True: there are more."""
        return give_back(self._raw)

    def is_damage(self, error: Exception) -> bool:
        """Whether the error means a damaged store."""
        return is_damage(_cause(error))

    def is_temporary(self, error: Exception) -> bool:
        """Whether the disk is full, locked or unreadable for now."""
        return isinstance(_cause(error), sqlite3.OperationalError)

    def damaged(self, error: object) -> "DamagedError":
        """The error to raise for a damaged store."""
        return damaged(Path(self.name), error)

    def refused(self, error: object) -> HostError:
        """The error to raise for a file that cannot be read now."""
        return _refused(Path(self.name), str(error))


def _cause(error: Exception) -> Exception:
    found = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return found if isinstance(found, Exception) else error


def lock(path: Path) -> int:
    """Open and lock the lock file of a store; the lock ends with the process.

    Raises HostError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            raise
    except BlockingIOError:
        raise HostError(
            f"store {path} is in use by another controller",
            remedy="stop that one, or name another file",
        ) from None
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    return held


@contextlib.contextmanager
def taken(path: Path) -> Iterator[None]:
    """Hold the lock of a store while the block runs. Raises HostError."""
    held = lock(path)
    try:
        yield
    finally:
        os.close(held)


def connect(path: Path) -> sqlite3.Connection:
    """Open a store, or create it; one of an older version is migrated.

    Raises:
        DamagedError: The file is damaged.
        HostError: The file is not accessible, or belongs to another program.
        VersionError: Its version is not readable by this controller.
    """
    connection: sqlite3.Connection | None = None
    is_new = _make(path)
    try:
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        version = _version(connection, path)
        if why := broken_pages(connection):
            raise damaged(path, why)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # takes effect before any table
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        if version is None:
            if not is_new:
                _log.warning("store=%s was an empty file: it begins without a past", path)
            connection.executescript(f"BEGIN; {create_statements()} {_STAMP} COMMIT;")
        elif version < SCHEMA_VERSION:
            _take_over(connection, path, version)
        (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
        if vacuum != _INCREMENTAL:
            connection.execute("VACUUM")
        connection.execute("BEGIN IMMEDIATE")  # a read-only file says so now, not in mid-run
        connection.execute("ROLLBACK")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.DatabaseError | UnicodeDecodeError):  # or in SQLite's words
            is_damaged = isinstance(error, UnicodeDecodeError) or is_damage(error)
            raise _refused(path, str(error), DamagedError if is_damaged else HostError) from None
        raise
    return connection


def _make(path: Path) -> bool:
    """Create the file with mode 0600; SQLite would make it and its log readable by others.

    Returns:
        False if the file exists.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        return False
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from None
    return True


def look(path: Path) -> str:
    """Describe a store by its first bytes, without opening it as a store.

    Raises HostError and VersionError.
    """
    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise _refused(path, f"{folder} is no directory that this user may write")
        return f"{path}: a new one"
    if not path.is_file() or not os.access(path, os.R_OK | os.W_OK):
        raise _refused(path, "no file that this user may read and write")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if not head:
        return f"{path}: a new one"
    version, application = (int.from_bytes(head[at : at + 4], "big") for at in (60, 68))
    if head.startswith(b"SQLite format 3\0") and application == version == 0:
        return f"{path}: a new one"  # or all of it is in its log
    if not head.startswith(b"SQLite format 3\0") or application != APPLICATION_ID:
        raise _refused(path, "a file of another program")
    if not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise _other_version(path, version)
    if version < SCHEMA_VERSION:
        return f"{path}: schema {version}, taken over at the start, with a copy kept beside it"
    return f"{path}: {path.stat().st_size / 1e6:.1f} MB"


_INCREMENTAL = 2  # of PRAGMA auto_vacuum
_STAMP = f"PRAGMA user_version = {SCHEMA_VERSION}; PRAGMA application_id = {APPLICATION_ID};"


def _version(connection: sqlite3.Connection, path: Path) -> int | None:
    """The version of the tables; None: the file is empty. Raises HostError and VersionError."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application != APPLICATION_ID:
        if application or version or tables:
            raise _refused(path, "a database of another program")
        return None
    if not OLDEST_VERSION <= version <= SCHEMA_VERSION:
        raise _other_version(path, version)
    return int(version)


def _other_version(path: Path, version: int) -> VersionError:
    return VersionError(
        f"store {path} has schema {version}, this controller reads {OLDEST_VERSION} to "
        f"{SCHEMA_VERSION}",
        remedy="install the pacekeeper that wrote it, or name another store",
    )


def _take_over(connection: sqlite3.Connection, path: Path, version: int) -> None:
    kept = path.with_name(f"{path.name}.schema-{version}")
    kept.unlink(missing_ok=True)  # of a take-over that was cut off
    before = os.umask(0o077)
    try:
        connection.execute("VACUUM INTO ?", (str(kept),))
    finally:
        os.umask(before)
    steps = "".join(UPGRADES[older] for older in range(version, SCHEMA_VERSION))
    try:
        connection.executescript(f"BEGIN IMMEDIATE; {steps} {_STAMP} COMMIT;")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    _log.info("store=%s schema=%d was=%d kept=%s", path, SCHEMA_VERSION, version, kept)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes used in the file, without free pages and without the log."""
    pages, free, size = _pages(connection)
    return (pages - free) * size


def give_back(connection: sqlite3.Connection) -> bool:
    """Return some free pages beyond SLACK_BYTES to the file system; True: there are more."""
    _, free, size = _pages(connection)
    if free * size <= SLACK_BYTES + RETURNED_PAGES * size:
        return False
    # A row for each page, without a column: `execute` would take the first and stop.
    connection.executescript(f"PRAGMA incremental_vacuum({RETURNED_PAGES})")
    return True


def _pages(connection: sqlite3.Connection) -> tuple[int, int, int]:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    return pages, free, size


def damaged(path: Path, why: object) -> DamagedError:
    """The error for a damaged store at `path`."""
    return DamagedError(
        f"store {path} is damaged: {why}",
        remedy="move it away and start again: running jobs are found anew",
    )


def _refused(path: Path, why: str, kind: type[HostError] = HostError) -> HostError:
    return kind(f"store {path}: {why}", remedy="name a writable file of ours")


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
