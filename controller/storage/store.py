"""Stores what outlives the controller: jobs, layouts, incidents, decisions, proposals.

In an SQLite file of one controller (`sqlite_file.py`), or in a PostgreSQL database that several
share (`postgres.py`). What was acknowledged survives a kill at any moment. One controller writes a
store at a time: two would give the same numbers to different incidents.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pacekeeper.controller.state.device_history import Strikes
from pacekeeper.controller.state.state import JobRecord
from pacekeeper.controller.storage.history_tables import HistoryTables
from pacekeeper.controller.storage.postgres import SCHEMES, PostgresDatabase
from pacekeeper.controller.storage.rows import (
    LARGE,
    decision_row,
    incident_of,
    incident_row,
    job_of,
    job_row,
    proposal_of,
    proposal_row,
    whole,
)
from pacekeeper.controller.storage.sqlite_file import SqliteDatabase
from pacekeeper.controller.storage.tables import (
    DECISIONS,
    INCIDENTS,
    JOBS,
    LAYOUTS,
    LEASE,
    LEASES,
    PROPOSALS,
    storable,
    upsert,
)
from pacekeeper.core.incidents.findings import Decision, Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout

SQLITE_SCHEME = "sqlite:///"


def sqlite_path(where: str | Path) -> Path | None:
    """The file of a store that is named by its path or `sqlite:///PATH`; None: no SQLite store."""
    if isinstance(where, str) and where.startswith(SCHEMES):
        return None
    return Path(str(where).removeprefix(SQLITE_SCHEME))


class Store:
    """One open store; use from one thread at a time."""

    def __init__(self, database: SqliteDatabase | PostgresDatabase) -> None:
        self.database = database
        self._connection: sa.Connection | None = None  # of the open transaction
        self._next_decision_id: int | None = None
        self.history_tables = HistoryTables(self._writing, self.connected)

    @classmethod
    def open(cls, where: str | Path) -> "Store":
        """Open the store; create it if there is none.

        Args:
            where: The path of an SQLite file, `sqlite:///PATH` or `postgresql://...`.

        Raises:
            HostError: The store is not accessible, in use, or of another program.
            VersionError: It has another version.
            ConfigError: The URL is invalid.
        """
        path = sqlite_path(where)
        if path is None:
            return cls(PostgresDatabase.open(str(where)))
        return cls(SqliteDatabase.open(path))

    def close(self) -> None:
        """Close the database; another controller may open it."""
        self.database.close()

    def next_term(self) -> int:
        """The term of a controller without a lease: a new one; 0 if the store never had a lease.

        Raises:
            HostError: The store is damaged.
        """
        with self.reading() as connection:
            found = connection.execute(sa.select(LEASES.c.term).where(LEASES.c.name == LEASE))
            term = whole(found.scalar() or 0, LARGE)
        if term:
            with self._writing() as connection:
                raised = sa.update(LEASES).where(LEASES.c.name == LEASE).values(term=term + 1)
                connection.execute(raised)
        return term + 1 if term else 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One transaction: all writes in the block are stored, or none. It may be repeated."""
        next_decision_id = self._next_decision_id
        try:
            with self.database.begin() as connection:
                self._connection = connection
                yield
        except BaseException:
            self._next_decision_id = next_decision_id
            raise
        finally:
            self._connection = None

    def save_job(self, job: JobRecord) -> None:
        """Insert or replace a job."""
        self._save(JOBS, job_row(job))

    def forget_job(self, job: str) -> None:
        """Delete a job, so that it is not restored; its incidents, decisions and layouts stay."""
        self._delete(JOBS, name=job)

    def forget_layouts(self, job: str) -> None:
        """Delete the layouts of a job that starts anew and uses their generation numbers again."""
        self._delete(LAYOUTS, job=job)

    def save_layout(self, job: str, layout: Layout, reason: str, unix_s: float) -> None:
        """Store a layout that all ranks have run since `unix_s`."""
        row = {
            "job": job,
            "generation": layout.generation,
            "layout": encode_layout(layout),
            "reason": reason,
            "unix_s": unix_s,
        }
        self._save(LAYOUTS, row)

    def save_incident(self, incident: Incident) -> None:
        """Insert or replace an incident."""
        self._save(INCIDENTS, incident_row(incident))

    def save_decision(self, job: str, step: int, decision: Decision, unix_s: float) -> None:
        """Append a decision with the prices it rested on.

        Its number counts only once it is stored: where the outcome of COMMIT is unknown, the
        repetition replaces it.
        """
        with self._writing() as connection:
            if self._next_decision_id is None:
                newest = connection.execute(sa.select(sa.func.max(DECISIONS.c.decision_id)))
                self._next_decision_id = (newest.scalar() or 0) + 1
            number, self._next_decision_id = self._next_decision_id, self._next_decision_id + 1
            self._save(DECISIONS, decision_row(number, job, step, decision, unix_s))

    def incident(self, incident_id: int) -> Incident | None:
        """An incident of any job, ended ones included. Raises HostError for a damaged store."""
        with self.reading() as connection:
            what = sa.select(INCIDENTS).where(INCIDENTS.c.incident_id == incident_id)
            row = connection.execute(what).one_or_none()
            return None if row is None else incident_of(row._mapping)

    def orders(self) -> tuple[OperatorOrder, ...]:
        """Operator orders in effect. Raises HostError for a damaged store."""
        with self.reading():
            return self.history_tables.orders()

    def strikes(self) -> Strikes:
        """Strikes of all devices. Raises HostError for a damaged store."""
        with self.reading():
            return self.history_tables.strikes()

    def save_proposal(self, proposal: Proposal) -> None:
        """Insert or replace a proposal."""
        self._save(PROPOSALS, proposal_row(proposal))

    def load(self) -> tuple[tuple[JobRecord, ...], tuple[Incident, ...], int]:
        """(jobs, their incidents, the number of the next incident).

        Raises HostError for a damaged store.
        """
        with self.reading() as connection:
            rows = connection.execute(sa.select(JOBS).order_by(JOBS.c.name))
            jobs = tuple(job_of(row._mapping) for row in rows)
            known = INCIDENTS.c.job.in_(sa.select(JOBS.c.name))
            what = sa.select(INCIDENTS).where(known).order_by(INCIDENTS.c.incident_id)
            incidents = tuple(incident_of(row._mapping) for row in connection.execute(what))
            newest = connection.execute(sa.select(sa.func.max(INCIDENTS.c.incident_id))).scalar()
            return jobs, incidents, (newest or 0) + 1

    def open_proposals(self) -> tuple[tuple[Proposal, ...], int]:
        """(open proposals of known jobs, the number of the next proposal).

        Raises HostError for a damaged store.
        """
        with self.reading() as connection:
            is_open = PROPOSALS.c.answer.in_(
                (ProposalState.WAITING.value, ProposalState.APPROVED.value)
            )
            known = PROPOSALS.c.job.in_(sa.select(JOBS.c.name))
            what = sa.select(PROPOSALS).where(is_open, known).order_by(PROPOSALS.c.proposal_id)
            found = tuple(proposal_of(row._mapping) for row in connection.execute(what))
            newest = connection.execute(sa.select(sa.func.max(PROPOSALS.c.proposal_id))).scalar()
            return found, (newest or 0) + 1

    def layout(self, job: str, generation: int) -> tuple[Layout, str] | None:
        """A layout of the past with its reason. Raises HostError for a damaged store."""
        key = storable({"job": job})["job"]
        with self.reading() as connection:
            what = sa.select(LAYOUTS.c.layout, LAYOUTS.c.reason).where(
                LAYOUTS.c.job == key, LAYOUTS.c.generation == generation
            )
            row = connection.execute(what).one_or_none()
            return None if row is None else (decode_layout(row.layout), row.reason)

    def raise_if_lasting(self, error: sa.exc.DBAPIError) -> None:
        """Return if a failed write may succeed when it is repeated.

        Raises:
            DamagedError: The store is damaged.
            sqlalchemy.exc.DBAPIError: `error`, if it is a programming error.
        """
        if self.database.is_damage(error):
            raise self.database.damaged(error.orig) from None
        if not self.database.is_temporary(error):
            raise error

    def _save(self, table: sa.Table, row: Mapping[str, Any]) -> None:
        with self._writing() as connection:
            connection.execute(upsert(table, self.database.dialect), storable(row))

    def _delete(self, table: sa.Table, **key: str) -> None:
        ((column, value),) = storable(key).items()
        with self._writing() as connection:
            connection.execute(sa.delete(table).where(table.c[column] == value))

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """The connection of the open transaction, or of one of its own."""
        if self._connection is not None:
            yield self._connection
            return
        with self.transaction():
            assert self._connection is not None, "a transaction is open"
            yield self._connection

    @contextmanager
    def connected(self) -> Iterator[sa.Connection]:
        """The connection of the open transaction, or one for reads."""
        if self._connection is not None:
            yield self._connection
            return
        with self.database.reading() as connection:
            self._connection = connection
            try:
                yield connection
            finally:
                self._connection = None

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """The connection of `connected`, for reads whose rows are validated.

        Raises:
            HostError: The store does not answer, or is damaged: unreadable, or with invalid rows.
        """
        try:
            with self.connected() as connection:
                yield connection
        except sa.exc.DBAPIError as error:
            if self.database.dialect == "sqlite" or self.database.is_damage(error):
                raise self.database.damaged(error.orig) from None
            raise self.database.refused(error) from None
        except (ValueError, TypeError) as error:
            raise self.database.damaged(error) from None
