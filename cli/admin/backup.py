"""`pacekeeper backup STORE TO`: a copy of a controller's store, also while it is in use."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import click

from pacekeeper.core.errors import HostError

PAGES = 4096  # copied at a time: the controller writes in between
_REMEDY = "name the store of a controller, and a file that is not there yet"


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("to", type=click.Path(path_type=Path))
def command(store: Path, to: Path) -> None:
    """Copy a controller's STORE to the new file TO, whole and checked; the controller runs on.

    The copy is its owner's only. To go back to it: docs/operations.md.
    """
    part = to.with_name(f"{to.name}.part")
    try:
        if to.exists():
            raise HostError(f"{to} is there already", remedy=_REMEDY)
        told = _copied(store, part)
        os.link(part, to)  # never over another one
    except (sqlite3.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HostError(f"no copy of {store} at {to}: {why}", remedy=_REMEDY) from None
    finally:
        part.unlink(missing_ok=True)
    click.echo(f"{to}: {told}, {to.stat().st_size / 1e6:,.1f} MB")


def _copied(store: Path, part: Path) -> str:
    """What is in it. Raises HostError, OSError and sqlite3.Error."""
    from pacekeeper.controller.storage import integrity, sqlite_file
    from pacekeeper.controller.storage.schema import APPLICATION_ID

    part.unlink(missing_ok=True)  # of one that was cut off
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with (
        closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(part, isolation_level=None)) as copy,
    ):
        (application,) = source.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            raise HostError(f"{store} is no store of a controller", remedy=_REMEDY)
        source.backup(copy, pages=PAGES)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file; a controller sets its own
        (schema,) = copy.execute("PRAGMA user_version").fetchone()
        if why := integrity.broken_pages(copy):
            raise sqlite_file.damaged(store, why)
        # It has not all that is told from now on: it must not pass for the copy that has.
        if copy.execute("SELECT 1 FROM sqlite_master WHERE name = 'copy'").fetchone():
            copy.execute("UPDATE copy SET name = lower(hex(randomblob(8)))")
        (jobs,) = copy.execute("SELECT count(*) FROM jobs").fetchone()
        (incidents,) = copy.execute("SELECT count(*) FROM incidents").fetchone()
    return f"schema {schema}, {jobs:,} jobs, {incidents:,} incidents"
