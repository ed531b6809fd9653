"""The store in a PostgreSQL database, which several controllers share.

Every write transaction of a leader begins with the fence: it locks the lease's row in the leader's
term (FOR KEY SHARE), so a transaction commits before the next term begins, or never. The limits of
a transaction are set in the same statement: one round trip, also behind a transaction pooler.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import sqlalchemy as sa

from pacekeeper.controller.storage.schema import POSTGRES_UPGRADES
from pacekeeper.controller.storage.sqlite_file import DamagedError
from pacekeeper.controller.storage.tables import LEASE, METADATA, SCHEMA_VERSION
from pacekeeper.core.errors import ConfigError, HostError, VersionError

SCHEMES = ("postgresql://", "postgres://")
CONNECT_WITHIN_S = 2
MIGRATE_WITHIN_S = 600.0  # with a copy of all tables
WRITER = "pacekeeper-term-"  # begins the application name of a leader's connection; then its term
_MIGRATION_LOCK = 0x70616365  # of pg_advisory_xact_lock
_FENCE = sa.text(
    "SELECT set_config('statement_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
    " FROM leases WHERE name = :name AND term = :term AND run_id = :run_id FOR KEY SHARE"
)
_log = logging.getLogger(__name__)


class FencedError(Exception):
    """Another controller leads: nothing of the transaction was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The term in which a controller may write.

    Attributes:
        term: The term.
        run_id: The start of the controller that leads in it.
        limit_s: Seconds that the server allows a statement, and an idle transaction.
    """

    term: int
    run_id: str
    limit_s: float


def database_url(url: str) -> sa.URL:
    """Parse `postgresql://...`. Raises ConfigError."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ConfigError(
            f"store: {error}", remedy="as in postgresql://user@host:5432/database"
        ) from None
    return parsed.set(drivername="postgresql+psycopg")


def connect_options(limit_s: float) -> dict[str, Any]:
    """Options of a connection that ends by itself when its peer is gone or frozen."""
    return {
        "connect_timeout": CONNECT_WITHIN_S,
        "prepare_threshold": None,  # a transaction pooler gives each transaction another session
        "keepalives_idle": 1,
        "keepalives_interval": 1,
        "keepalives_count": 2,
        "tcp_user_timeout": int(limit_s * 1000),
    }


def shutdown_socket(connection: "psycopg.Connection[Any] | None") -> None:
    """Break a connection from any thread: a call that waits for its answer fails."""
    with contextlib.suppress(psycopg.Error, OSError, ValueError):
        if connection is not None and not connection.closed:
            with socket.socket(fileno=os.dup(connection.pgconn.socket)) as found:
                found.shutdown(socket.SHUT_RDWR)


class PostgresDatabase:
    """An open PostgreSQL store; use from one thread at a time, except `cut`."""

    dialect = "postgresql"
    log_bytes = 0  # of its server

    def __init__(self, url: str, fence: Fence | None = None) -> None:
        """Create the engine, which connects at first use. Raises ConfigError for a bad URL."""
        parsed = database_url(url)
        self.name = parsed.render_as_string(hide_password=True).replace("+psycopg", "")
        self._fence = fence
        self._live: psycopg.Connection[Any] | None = None
        options = connect_options(10.0 if fence is None else fence.limit_s)
        if fence is not None:
            options["application_name"] = f"{WRITER}{fence.term}"
        try:
            self._engine = sa.create_engine(
                parsed,
                pool_size=1,
                max_overflow=0,
                connect_args=options,
                use_native_hstore=False,
            )
        except (sa.exc.ArgumentError, ValueError, TypeError) as error:
            raise ConfigError(f"store {self.name}: {error}") from None
        sa.event.listen(self._engine, "do_connect", self._do_connect)

    def _do_connect(
        self, _dialect: object, _record: object, args: Any, options: Any
    ) -> "psycopg.Connection[Any]":
        """Connect; SQLAlchemy asks a new connection at once, so `cut` has to know it before."""
        self._live = psycopg.connect(*args, **options)
        return self._live

    @classmethod
    def open(cls, url: str) -> "PostgresDatabase":
        """Connect and create the tables if there are none.

        Raises:
            HostError: The server does not answer, or refuses.
            VersionError: The tables have another version.
            ConfigError: The URL is invalid.
        """
        database = cls(url)
        try:
            database.prepare()
        except BaseException:
            database.close()
            raise
        return database

    def prepare(self) -> None:
        """Connect; create the tables if there are none, and migrate older ones if it leads.

        Raises HostError and VersionError.
        """
        try:
            self._migrate()
        except (sa.exc.DBAPIError, psycopg.Error, FencedError) as error:
            raise self.refused(error) from None

    def needs_migration(self) -> bool:
        """Whether its tables are of an older version. Connects; raises HostError."""
        return self.version() in POSTGRES_UPGRADES

    def version(self) -> int | None:
        """The version of the tables; None: there are none. Connects; raises HostError."""
        try:
            with self._connected() as connection, connection.begin():
                return self._version(connection)
        except (sa.exc.DBAPIError, psycopg.Error) as error:
            raise self.refused(error) from None

    @staticmethod
    def _version(connection: sa.Connection) -> int | None:
        table = connection.exec_driver_sql("SELECT to_regclass('pacekeeper_schema')").scalar()
        if table is None:
            return None
        return connection.exec_driver_sql("SELECT version FROM pacekeeper_schema").scalar()

    def _migrate(self) -> None:
        """Create or migrate the tables, one controller at a time.

        An older leader may still write to older tables, so only a later leader migrates them.

        Raises:
            VersionError: The tables have another version.
            FencedError: Another controller leads.
            HostError: The database's encoding is not UTF-8, or a copy of these tables exists.
            sqlalchemy.exc.DBAPIError, psycopg.Error: The server does not answer, or refuses.
        """
        with self._connected() as connection, connection.begin():
            if self._version(connection) == SCHEMA_VERSION:
                return  # without the lock: who holds it may be frozen
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            if encoding != "UTF8":
                raise HostError(
                    f"store {self.name} has the encoding {encoding}",
                    remedy="create the database with ENCODING 'UTF8'",
                )
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})")
            connection.exec_driver_sql(
                "CREATE TABLE IF NOT EXISTS pacekeeper_schema (version bigint NOT NULL)"
            )
            versions = connection.exec_driver_sql("SELECT version FROM pacekeeper_schema").scalars()
            found = versions.one_or_none()
            if found is None:
                METADATA.create_all(connection)
                connection.exec_driver_sql(
                    f"INSERT INTO pacekeeper_schema VALUES ({SCHEMA_VERSION})"
                )
                _log.info("store=%s schema=%d is new", self.name, SCHEMA_VERSION)
            elif self._fence is not None and found in POSTGRES_UPGRADES:
                self._pass_fence(connection, self._fence, MIGRATE_WITHIN_S)
                self._take_over(connection, found)
            elif found != SCHEMA_VERSION:
                raise VersionError(
                    f"store {self.name} has schema {found}, this controller reads {SCHEMA_VERSION}",
                    remedy="start a controller of this version, which migrates it once it leads"
                    if found in POSTGRES_UPGRADES
                    else "install the pacekeeper that wrote it, or name another store",
                )

    def _take_over(self, connection: sa.Connection, version: int) -> None:
        """Copy all tables into another schema of the database, then migrate them.

        Raises HostError if that schema exists.
        """
        kept = f"pacekeeper_schema_{version}"
        if connection.exec_driver_sql(f"SELECT to_regnamespace('{kept}')").scalar() is not None:
            raise HostError(
                f"store {self.name} has a schema {kept}, the copy of an earlier migration",
                remedy=f"rename it, or DROP SCHEMA {kept} CASCADE if nobody needs it",
            )
        found = connection.exec_driver_sql(
            "SELECT quote_ident(tablename) FROM pg_tables WHERE schemaname = current_schema()"
        )
        copies = [f"CREATE TABLE {kept}.{name} AS TABLE {name}" for name in found.scalars()]
        upgrades = [POSTGRES_UPGRADES[older] for older in range(version, SCHEMA_VERSION)]
        stamp = f"UPDATE pacekeeper_schema SET version = {SCHEMA_VERSION}"
        raw = connection.connection.driver_connection  # takes several statements at once
        assert raw is not None, "it is connected"
        for script in (f"CREATE SCHEMA {kept}", *copies, *upgrades, stamp):
            raw.execute(script)
        _log.info("store=%s schema=%d was=%d kept=%s", self.name, SCHEMA_VERSION, version, kept)

    @contextlib.contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """One write transaction, behind the fence.

        Raises:
            FencedError: Another controller leads.
            sqlalchemy.exc.DBAPIError: It was not stored, or, where COMMIT broke, it is unknown:
                repeat it, as a repetition changes nothing.
        """
        with self._connected() as connection, connection.begin():
            if self._fence is not None:
                self._pass_fence(connection, self._fence, self._fence.limit_s)
            yield connection

    @staticmethod
    def _pass_fence(connection: sa.Connection, fence: Fence, limit_s: float) -> None:
        limits = {
            "limit": str(int(limit_s * 1000)),
            "name": LEASE,
            "term": fence.term,
            "run_id": fence.run_id,
        }
        if connection.execute(_FENCE, limits).one_or_none() is None:
            raise FencedError(f"term {fence.term} is over")

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One consistent read of all tables. Raises sqlalchemy.exc.DBAPIError."""
        with self._connected() as connection, connection.begin():
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield connection

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            self._live = connection.connection.driver_connection
            yield connection

    def cut(self) -> None:
        """Break the connection, from any thread: what waits for the server fails at once."""
        shutdown_socket(self._live)

    def close(self) -> None:
        """Disconnect."""
        self._engine.dispose()

    @property
    def used_bytes(self) -> int:
        """Bytes of all values, as stored: a table's own size does not shrink when rows go."""
        total = 0
        with self.reading() as connection:
            for table in METADATA.sorted_tables:
                sizes = [sa.func.coalesce(sa.func.pg_column_size(c), 0) for c in table.columns]
                total += int(
                    connection.scalar(sa.select(sa.func.sum(sum(sizes[1:], sizes[0])))) or 0
                )
        return total

    def give_back(self) -> bool:
        """Nothing: autovacuum does that."""
        return False

    def is_damage(self, error: Exception) -> bool:
        """Whether the server reports damaged or missing tables."""
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        return isinstance(
            cause,
            psycopg.errors.DataCorrupted
            | psycopg.errors.IndexCorrupted
            | psycopg.errors.UndefinedTable
            | psycopg.errors.UndefinedColumn,
        )

    def is_temporary(self, error: Exception) -> bool:
        """Whether a repetition may succeed: away, full, restarting, promoted or too slow."""
        if not isinstance(error, sa.exc.DBAPIError):
            return False
        ours = psycopg.IntegrityError | psycopg.ProgrammingError | psycopg.DataError
        return error.connection_invalidated or not isinstance(error.orig, ours)

    def damaged(self, error: object) -> DamagedError:
        """The error to raise for a damaged store."""
        return DamagedError(
            f"store {self.name} is damaged: {_line(error)}",
            remedy="restore the database from a backup, or name another store",
        )

    def refused(self, error: object) -> HostError:
        """The error to raise for a server that does not answer, or refuses."""
        return HostError(
            f"store {self.name}: {_line(error)}",
            remedy="start PostgreSQL, or correct the URL and the rights of its user",
        )


def _line(error: object) -> str:
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return " ".join(str(cause).split())
