"""`pacekeeper backup STORE TO`: copy a controller's store, also while the controller runs."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import click

from pacekeeper.core.errors import HostError

PAGES_PER_STEP = 4096  # copied at a time; the controller can write in between
_REMEDY = "give the store of a controller and the path of a new file"


@click.command()
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("to", type=click.Path(path_type=Path))
def command(store: Path, to: Path) -> None:
    """Copy a controller's STORE to the new file TO and check the copy.

    The controller may run. The copy has mode 0600. docs/operations.md describes how to restore it.
    """
    part = to.with_name(f"{to.name}.part")
    try:
        if to.exists():
            raise HostError(f"{to} already exists", remedy=_REMEDY)
        contents = _copy_store(store, part)
        os.link(part, to)  # fails if the file exists
    except (sqlite3.Error, OSError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HostError(f"cannot copy {store} to {to}: {why}", remedy=_REMEDY) from None
    finally:
        part.unlink(missing_ok=True)
    click.echo(f"{to}: {contents}, {to.stat().st_size / 1e6:,.1f} MB")


def _copy_store(store: Path, part: Path) -> str:
    """Copy and check the store; return its schema and counts as text.

    Raises:
        HostError, OSError, sqlite3.Error: the store is not one of a controller, damaged, or not
            readable.
    """
    from pacekeeper.controller.storage import sqlite_file
    from pacekeeper.controller.storage.schema import APPLICATION_ID

    part.unlink(missing_ok=True)  # left by an interrupted backup
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with (
        closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True)) as source,
        closing(sqlite3.connect(part, isolation_level=None)) as copy,
    ):
        (application,) = source.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            raise HostError(f"{store} is not the store of a controller", remedy=_REMEDY)
        source.backup(copy, pages=PAGES_PER_STEP)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file; a controller sets its own
        (schema,) = copy.execute("PRAGMA user_version").fetchone()
        if why := sqlite_file.broken_pages(copy):
            raise sqlite_file.damaged(store, why)
        # The copy misses all later transactions: it must not pass for an in-sync replica.
        if copy.execute("SELECT 1 FROM sqlite_master WHERE name = 'copy'").fetchone():
            copy.execute("UPDATE copy SET name = lower(hex(randomblob(8)))")
        (jobs,) = copy.execute("SELECT count(*) FROM jobs").fetchone()
        (incidents,) = copy.execute("SELECT count(*) FROM incidents").fetchone()
    return f"schema {schema}, {jobs:,} jobs, {incidents:,} incidents"
