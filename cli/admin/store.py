"""`pacekeeper store`: back up, check and migrate the store of a controller."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from pacekeeper.cli.common.paths import PathType
from pacekeeper.core.errors import HostError, VersionError

if TYPE_CHECKING:
    import sqlalchemy as sa

    from pacekeeper.controller.storage.postgres import PostgresDatabase
    from pacekeeper.controller.storage.store import Store

PAGES_PER_STEP = 4096  # copied at a time; the controller can write in between
ROWS_AT_ONCE = 256
_STORE = "give the store of a controller"
_REMEDY = f"{_STORE} and the path of a new file"


@click.group()
def command() -> None:
    """Back up, check and migrate the store of a controller.

    A STORE is the path of an SQLite file (or sqlite:///PATH), or postgresql://...
    """


@command.command("backup")
@click.argument("store")
@click.argument("to", type=PathType(path_type=Path))
def backup(store: str, to: Path) -> None:
    """Copy STORE to the new SQLite file TO and check the copy.

    The controller may run. The copy has mode 0600. docs/operations.md describes how to restore it.
    """
    from pacekeeper.controller.storage.store import sqlite_path

    part = Path(f"{to}.part")
    path = sqlite_path(store)
    try:
        if to.exists():
            raise HostError(f"{to} already exists", remedy=_REMEDY)
        part.unlink(missing_ok=True)  # left by an interrupted backup
        if path is not None:
            contents = _copy_file(path, part)
        else:
            with _opened_to_read(store) as source, _opened(str(part)) as target:
                contents = _text(_copy(source, target))
            Path(f"{part}.lock").unlink(missing_ok=True)
        os.link(part, to)  # fails if the file exists
    except (sqlite3.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HostError(f"cannot copy {store} to {to}: {why}", remedy=_REMEDY) from None
    finally:
        with suppress(OSError):
            part.unlink()
    click.echo(f"{to}: {contents}, {to.stat().st_size / 1e6:,.1f} MB")


@command.command("check")
@click.argument("store")
def check(store: str) -> None:
    """Read and decode every row of STORE that a controller would read.

    Nothing in it changes: an SQLite file is copied beside it for this. The controller may run.
    """
    from pacekeeper.controller.observability.timeline_codec import (
        decode_incident_timeline,
        decode_job_timeline,
    )
    from pacekeeper.controller.storage.restore import load_state
    from pacekeeper.controller.storage.rows import incident_of, proposal_of
    from pacekeeper.controller.storage.tables import (
        INCIDENT_TIMELINES,
        INCIDENTS,
        JOB_TIMELINES,
        LAYOUTS,
        PROPOSALS,
    )
    from pacekeeper.core.layout.codec import decode_layout

    decoders = (
        (INCIDENTS, incident_of),
        (PROPOSALS, proposal_of),
        (LAYOUTS, lambda row: decode_layout(row["layout"])),
        (INCIDENT_TIMELINES, lambda row: decode_incident_timeline(row["timeline"])),
        (JOB_TIMELINES, lambda row: decode_job_timeline(row["timeline"])),
    )
    with _opened_to_read(store) as opened:
        load_state(opened, 0.0)
        counts = dict[str, int]()
        for table, decode in decoders:
            for row in _rows(opened, table):
                try:
                    decode(row)
                except (ValueError, TypeError, KeyError) as error:
                    key = ", ".join(str(row[c.name]) for c in table.primary_key)
                    raise opened.database.damaged(f"{table.name} {key}: {error}") from None
                counts[table.name] = counts.get(table.name, 0) + 1
    found = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items())
    click.echo(f"{opened.database.name}: {found or 'nothing stored'}; every row can be read")


@command.command("migrate")
@click.argument("source")
@click.argument("to")
def migrate(source: str, to: str) -> None:
    """Copy all rows of SOURCE into the empty store TO.

    From SQLite to PostgreSQL, or back. Stop all controllers of both first. SOURCE stays as it is,
    also one of an older version; start them with --store TO.
    """
    from pacekeeper.controller.storage import sqlite_file
    from pacekeeper.controller.storage.store import sqlite_path

    path = sqlite_path(source)
    unused = nullcontext() if path is None else sqlite_file.taken(path)
    with unused, _opened_to_read(source) as old, _opened(to) as new:
        _reject_led(old)
        _reject_used(new)
        counts = _copy(old, new)
    click.echo(f"{new.database.name}: {_text(counts)}")


@contextmanager
def _opened(store: str) -> Iterator["Store"]:
    from pacekeeper.controller.storage.store import Store

    with closing(Store.open(store)) as opened:
        yield opened


@contextmanager
def _opened_to_read(store: str) -> Iterator["Store"]:
    """A store of which nothing changes: of an SQLite file a copy is opened, and migrated.

    Raises:
        HostError: There is no store, it does not answer, or it is damaged.
        VersionError: It has another version.
    """
    from pacekeeper.controller.storage import sqlite_file
    from pacekeeper.controller.storage.postgres import PostgresDatabase
    from pacekeeper.controller.storage.store import Store, sqlite_path

    path = sqlite_path(store)
    if path is None:
        database = PostgresDatabase(store)
        with closing(Store(database)) as opened:
            _reject_other_tables(database)
            yield opened
        return
    sqlite_file.look(path)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(
                TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent)
            )
            _copy_file(path, copy := Path(folder) / "copy")
        except (sqlite3.Error, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise HostError(f"cannot copy {path} to read it: {why}", remedy=_STORE) from None
        opened = stack.enter_context(_opened(str(copy)))
        opened.database.name = str(path)
        yield opened


def _reject_other_tables(database: "PostgresDatabase") -> None:
    """Raises HostError for a database without tables, VersionError for another version."""
    from pacekeeper.controller.storage.tables import SCHEMA_VERSION

    name, version = database.name, database.version()
    if version is None:
        raise HostError(f"store {name} has no tables of a controller", remedy=_STORE)
    if version != SCHEMA_VERSION:
        raise VersionError(
            f"store {name} has schema {version}, this command reads {SCHEMA_VERSION}",
            remedy="start a controller of this version, which migrates it once it leads",
        )


def _rows(store: "Store", table: "sa.Table") -> Iterator["sa.RowMapping"]:
    """All rows of a table, some at a time."""
    import sqlalchemy as sa

    with store.connected() as connection:
        what = sa.select(table).execution_options(yield_per=ROWS_AT_ONCE)
        for row in connection.execute(what):
            yield row._mapping


def _copy(source: "Store", target: "Store") -> dict[str, int]:
    """Copy all rows in one transaction, and return the number of rows of each table.

    The lease is copied as released: terms go on above the last one.
    """
    import sqlalchemy as sa

    from pacekeeper.controller.storage.tables import LEASES, METADATA, storable

    counts = dict[str, int]()
    with target.transaction(), target.connected() as connection, source.connected():
        for table in METADATA.sorted_tables:
            batch = list[dict[str, object]]()
            for row in _rows(source, table):
                released = {"run_id": "", "holder": ""} if table is LEASES else {}
                batch.append({**storable(dict(row)), **released})
                if len(batch) == ROWS_AT_ONCE:
                    connection.execute(sa.insert(table), batch)
                    batch.clear()
                counts[table.name] = counts.get(table.name, 0) + 1
            if batch:
                connection.execute(sa.insert(table), batch)
            stored = connection.scalar(sa.select(sa.func.count()).select_from(table))
            if stored != counts.get(table.name, 0):
                raise HostError(f"{table.name}: {stored} rows of {counts.get(table.name, 0)}")
    return counts


def _reject_used(store: "Store") -> None:
    """Raises HostError for a store that has rows."""
    from pacekeeper.controller.storage.tables import METADATA

    for table in METADATA.sorted_tables:
        for _ in _rows(store, table):
            raise HostError(
                f"store {store.database.name} is not empty: it has {table.name}",
                remedy="name a new file or an empty database",
            )


def _reject_led(store: "Store") -> None:
    """Raises HostError for a store whose lease is renewed."""
    from pacekeeper.controller.storage.tables import LEASES

    seen = [dict(row) for row in _rows(store, LEASES)]
    held = [row for row in seen if row["run_id"]]
    if not held:
        return
    time.sleep(max(row["duration_s"] for row in held))
    if [dict(row) for row in _rows(store, LEASES)] != seen:
        raise HostError(
            f"a controller at {held[0]['address']} leads with store {store.database.name}",
            remedy="stop all controllers of this store",
        )


def _text(counts: dict[str, int]) -> str:
    jobs, incidents = counts.get("jobs", 0), counts.get("incidents", 0)
    return f"{sum(counts.values()):,} rows, {jobs:,} jobs, {incidents:,} incidents"


def _copy_file(store: Path, part: Path) -> str:
    """Copy and check the store; return its schema and counts as text.

    Raises:
        HostError, OSError, sqlite3.Error: the store is not one of a controller, damaged, or not
            readable.
    """
    from pacekeeper.controller.storage import sqlite_file
    from pacekeeper.controller.storage.schema import APPLICATION_ID

    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with (
        closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(part, isolation_level=None)) as copy,
    ):
        (application,) = source.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            raise HostError(f"{store} is not the store of a controller", remedy=_STORE)
        source.backup(copy, pages=PAGES_PER_STEP)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file; a controller sets its own
        (schema,) = copy.execute("PRAGMA user_version").fetchone()
        if why := sqlite_file.broken_pages(copy):
            raise sqlite_file.damaged(store, why)
        (jobs,) = copy.execute("SELECT count(*) FROM jobs").fetchone()
        (incidents,) = copy.execute("SELECT count(*) FROM incidents").fetchone()
    return f"schema {schema}, {jobs:,} jobs, {incidents:,} incidents"
