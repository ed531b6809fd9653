"""The lease's record: one row of the table `leases` in the shared PostgreSQL database.

It has a connection of its own, so that no write transaction delays a renewal. A change of the term
ends the sessions that write in the previous term, then waits until they have let go of the row
(`storage/postgres.py`); the server's own limits depend on its clock, which may be set back. A
renewal neither ends nor waits.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import psycopg
from psycopg.rows import class_row

from pacekeeper.controller.ha.lease import Record
from pacekeeper.controller.ha.lease_renewer import AwayError
from pacekeeper.controller.storage.postgres import (
    WRITER,
    PostgresDatabase,
    connect_options,
    shutdown_socket,
)
from pacekeeper.controller.storage.store_thread import deadline
from pacekeeper.controller.storage.tables import LEASE
from pacekeeper.core.errors import HostError

_COLUMNS = "term, holder, run_id, address, duration_s, min_term, renewals"
_READ = f"SELECT {_COLUMNS} FROM leases WHERE name = %(name)s"
_VALUES = ", ".join(f"%({name.strip()})s" for name in _COLUMNS.split(","))
_INSERT = (
    f"INSERT INTO leases (name, {_COLUMNS}) VALUES (%(name)s, {_VALUES}) ON CONFLICT DO NOTHING"
)
_EXPECTED = "name = %(name)s AND term = %(old_term)s AND run_id = %(old_run_id)s"
_EXPECTED += " AND renewals = %(old_renewals)s"
# A session that waits for a lock does not see that its client has gone: the limit ends it, else
# attempts to take over would use up the server's connections.
_UPDATE = (
    f"UPDATE leases SET ({_COLUMNS}) = ({_VALUES})"
    f" FROM (SELECT set_config('lock_timeout', %(limit)s, true)) AS limits WHERE {_EXPECTED}"
)
_END_WRITERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity, leases"
    f" WHERE datname = current_database() AND state <> 'idle'"
    f" AND application_name = %(writer)s AND {_EXPECTED}"
)
LOCK_SHARE = 0.5  # of a call's limit: how long a change of the term waits for write transactions


class NoTablesError(AwayError):
    """The database has no tables: no controller has used it yet."""


class LeaseRow:
    """Reads, compares and swaps the row. Each call ends within `limit_s`, or raises AwayError.

    Args:
        makes_tables: Whether to create the store's tables if there are none.
    """

    def __init__(self, url: str, limit_s: float, *, makes_tables: bool = True) -> None:
        self._url, self._limit_s, self._makes_tables = url, limit_s, makes_tables
        self._connection: psycopg.Connection[Any] | None = None

    def read(self) -> Record | None:
        """The record; None: there is none."""
        with self._connected() as connection, connection.cursor(row_factory=class_row(Record)) as c:
            return c.execute(_READ, {"name": LEASE}).fetchone()

    def write(self, record: Record, expected: Record | None) -> bool:
        """Replace `expected` by `record`; False: the row has another record."""
        limit_ms = str(int(self._limit_s * LOCK_SHARE * 1000))
        values = {"name": LEASE, "limit": limit_ms, **asdict(record)}
        if expected is not None:
            old = ("term", "run_id", "renewals")
            values |= {f"old_{name}": getattr(expected, name) for name in old}
        with self._connected() as connection:
            if expected is not None and expected.term != record.term:
                connection.execute(_END_WRITERS, {"writer": f"{WRITER}{expected.term}", **values})
            done = connection.execute(_INSERT if expected is None else _UPDATE, values)
            return done.rowcount == 1

    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """The connection; after a failure the next call opens a new one."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(
                    self._url, autocommit=True, **connect_options(self._limit_s)
                )
            with deadline(self._limit_s, partial(shutdown_socket, self._connection)):
                yield self._connection
        except psycopg.errors.UndefinedTable:
            if self._makes_tables:
                self._make_tables()
            raise NoTablesError("there are no tables yet") from None
        except BaseException as error:
            self.close()
            if isinstance(error, psycopg.Error):
                raise AwayError(" ".join(str(error).split())) from None
            raise

    def _make_tables(self) -> None:
        database = PostgresDatabase(self._url)
        try:
            with contextlib.closing(database), deadline(self._limit_s, database.cut):
                database.prepare()
        except HostError as error:
            raise AwayError(str(error)) from None
