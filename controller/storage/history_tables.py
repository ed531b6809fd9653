"""The store's tables of timelines, operator orders and strikes.

Timelines are for display: the newest are kept, and one that cannot be read counts as not stored.
Orders take effect: one that cannot be read is damage of the store.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict

import sqlalchemy as sa

from pacekeeper.controller.state.device_history import KEEP_S, Strike, Strikes, add_strike
from pacekeeper.controller.storage.rows import order_of, strike_of
from pacekeeper.controller.storage.tables import (
    INCIDENT_TIMELINES,
    JOB_TIMELINES,
    ORDERS,
    STRIKES,
    storable,
    upsert,
)
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind

MAX_INCIDENT_TIMELINES, MAX_JOB_TIMELINES, MAX_STRIKES = 4096, 512, 16384
Connected = Callable[[], AbstractContextManager[sa.Connection]]
_log = logging.getLogger(__name__)


class HistoryTables:
    """These tables of one open store; use from its thread."""

    def __init__(self, writing: Connected, reading: Connected) -> None:
        self._writing, self._reading = writing, reading

    def save_incident_timeline(self, incident_id: int, job: str, timeline: bytes) -> None:
        """Insert or replace a timeline; delete the oldest beyond `MAX_INCIDENT_TIMELINES`."""
        row = {"incident_id": incident_id, "job": job, "timeline": timeline}
        self._save(INCIDENT_TIMELINES, row, "incident_id", MAX_INCIDENT_TIMELINES)

    def incident_timeline(self, incident_id: int) -> bytes | None:
        """Return the encoded timeline of an incident; None where none is stored or readable."""
        what = INCIDENT_TIMELINES.c.incident_id == incident_id
        return self._timeline(INCIDENT_TIMELINES, what, f"incident {incident_id}")

    def save_job_timeline(self, job: str, timeline: bytes, newest_unix_s: float) -> None:
        """Insert or replace a timeline; delete the oldest jobs beyond `MAX_JOB_TIMELINES`."""
        row = {"job": job, "timeline": timeline, "newest_unix_s": newest_unix_s}
        self._save(JOB_TIMELINES, row, "newest_unix_s", MAX_JOB_TIMELINES)

    def job_timeline(self, job: str) -> bytes | None:
        """Return the encoded timeline of a job; None where none is stored or readable."""
        key = storable({"job": job})["job"]
        return self._timeline(JOB_TIMELINES, JOB_TIMELINES.c.job == key, f"job {job}")

    def save_strike(self, strike: Strike) -> None:
        """Insert or replace a strike; delete expired ones and the oldest beyond `MAX_STRIKES`."""
        with self._writing() as connection:
            self._save(STRIKES, asdict(strike), "incident_id", MAX_STRIKES)
            old = strike.unix_s - KEEP_S
            connection.execute(sa.delete(STRIKES).where(STRIKES.c.unix_s < old))

    def strikes(self) -> Strikes:
        """All strikes. Raises ValueError for an invalid row."""
        known: Strikes = {}
        with self._reading() as connection:
            for row in connection.execute(sa.select(STRIKES).order_by(STRIKES.c.incident_id)):
                known = add_strike(known, strike_of(row._mapping))
        return known

    def save_order(self, order: OperatorOrder) -> None:
        """Insert or replace an order."""
        with self._writing() as connection:
            row = storable(asdict(order))
            connection.execute(upsert(ORDERS, connection.dialect.name), row)

    def drop_order(self, kind: OrderKind, subject: str) -> None:
        """Delete an order that was withdrawn."""
        key = storable({"kind": kind, "subject": subject})
        with self._writing() as connection:
            connection.execute(
                sa.delete(ORDERS).where(
                    ORDERS.c.kind == key["kind"], ORDERS.c.subject == key["subject"]
                )
            )

    def orders(self) -> tuple[OperatorOrder, ...]:
        """Orders in effect, oldest first. Raises ValueError for an invalid row."""
        with self._reading() as connection:
            rows = connection.execute(sa.select(ORDERS).order_by(ORDERS.c.since_unix_s))
            return tuple(order_of(row._mapping) for row in rows)

    def _save(self, table: sa.Table, row: dict[str, object], age: str, most: int) -> None:
        """Insert or replace a row; delete the oldest beyond the newest `most`."""
        column = table.c[age]
        newest = sa.select(column).order_by(column.desc()).limit(1).offset(most).scalar_subquery()
        with self._writing() as connection:
            connection.execute(upsert(table, connection.dialect.name), storable(row))
            connection.execute(sa.delete(table).where(column <= newest))

    def _timeline(self, table: sa.Table, what: sa.ColumnElement[bool], of: str) -> bytes | None:
        try:
            with self._reading() as connection:
                data = connection.execute(sa.select(table.c.timeline).where(what)).scalar()
                return None if data is None else _blob(data)
        except (sa.exc.DBAPIError, ValueError) as error:
            _log.warning("The stored timeline of %s cannot be read: %s", of, error)
            return None


def _blob(value: object) -> bytes:
    """Return `value` if it is bytes. Raises ValueError otherwise: the row is damaged."""
    if not isinstance(value, bytes):
        raise ValueError(f"a {type(value).__name__} where bytes belong")
    return value
