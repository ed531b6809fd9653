"""The store's tables of timelines, operator orders and strikes.

Timelines are for display: the newest are kept, and one that cannot be read counts as not stored.
Orders take effect: one that cannot be read is damage of the store.
"""

import logging
import sqlite3
from dataclasses import astuple

from pacekeeper.controller.state.device_history import KEEP_S, Strike, Strikes, add_strike
from pacekeeper.controller.storage.change_log import Journal
from pacekeeper.controller.storage.rows import LARGE, real, text, whole
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.incidents.operator_orders import OperatorOrder, OrderKind

MAX_INCIDENT_TIMELINES, MAX_JOB_TIMELINES, MAX_STRIKES = 4096, 512, 16384
_log = logging.getLogger(__name__)


class HistoryTables:
    """These tables of one open store; use from its thread."""

    def __init__(self, connection: Journal) -> None:
        self._connection = connection

    def save_incident_timeline(self, incident_id: int, job: str, timeline: bytes) -> None:
        """Insert or replace a timeline; delete the oldest beyond `MAX_INCIDENT_TIMELINES`."""
        execute = self._connection.execute
        execute("REPLACE INTO courses VALUES (?, ?, ?)", (incident_id, job, timeline))
        execute(
            "DELETE FROM courses WHERE incident_id <= (SELECT incident_id FROM courses"
            " ORDER BY incident_id DESC LIMIT 1 OFFSET ?)",
            (MAX_INCIDENT_TIMELINES,),
        )

    def incident_timeline(self, incident_id: int) -> bytes | None:
        """Return the encoded timeline of an incident; None where none is stored or readable."""
        try:
            row = self._connection.execute(
                "SELECT course FROM courses WHERE incident_id = ?", (incident_id,)
            ).fetchone()
            return None if row is None else _blob(row[0])
        except (sqlite3.Error, ValueError) as error:
            _log.warning(
                "The stored timeline of incident %d cannot be read: %s", incident_id, error
            )
            return None

    def save_job_timeline(self, job: str, timeline: bytes, newest_unix_s: float) -> None:
        """Insert or replace a timeline; delete the oldest jobs beyond `MAX_JOB_TIMELINES`."""
        execute = self._connection.execute
        execute("REPLACE INTO paces VALUES (?, ?, ?)", (job, timeline, newest_unix_s))
        execute(
            "DELETE FROM paces WHERE newest_unix_s <= (SELECT newest_unix_s FROM paces"
            " ORDER BY newest_unix_s DESC LIMIT 1 OFFSET ?)",
            (MAX_JOB_TIMELINES,),
        )

    def job_timeline(self, job: str) -> bytes | None:
        """Return the encoded timeline of a job; None where none is stored or readable."""
        try:
            found = self._connection.execute("SELECT pace FROM paces WHERE job = ?", (job,))
            row = found.fetchone()
            return None if row is None else _blob(row[0])
        except (sqlite3.Error, ValueError) as error:
            _log.warning("The stored timeline of job %s cannot be read: %s", job, error)
            return None

    def save_strike(self, strike: Strike) -> None:
        """Insert or replace; what is too old, and the oldest beyond `MAX_STRIKES`, go."""
        execute = self._connection.execute
        execute("REPLACE INTO strikes VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(strike))
        execute("DELETE FROM strikes WHERE unix_s < ?", (strike.unix_s - KEEP_S,))
        execute(
            "DELETE FROM strikes WHERE incident_id <= (SELECT incident_id FROM strikes"
            " ORDER BY incident_id DESC LIMIT 1 OFFSET ?)",
            (MAX_STRIKES,),
        )

    def strikes(self) -> Strikes:
        """All that are remembered. Raises ValueError for what is none."""
        known: Strikes = {}
        for row in self._connection.execute("SELECT * FROM strikes ORDER BY incident_id"):
            strike = Strike(
                incident_id=whole(row[0], LARGE),
                node=text(row[1]),
                device_uuid=text(row[2]),
                job=text(row[3]),
                kind=FindingKind(row[4]),
                slowdown=real(row[5]),
                unix_s=real(row[6]),
            )
            known = add_strike(known, strike)
        return known

    def save_order(self, order: OperatorOrder) -> None:
        """Insert or replace an order."""
        self._connection.execute("REPLACE INTO orders VALUES (?, ?, ?, ?, ?, ?)", astuple(order))

    def drop_order(self, kind: OrderKind, subject: str) -> None:
        """It was taken back."""
        self._connection.execute(
            "DELETE FROM orders WHERE kind = ? AND subject = ?", (kind, subject)
        )

    def orders(self) -> tuple[OperatorOrder, ...]:
        """Those that stand, oldest first. Raises ValueError for what is none."""
        rows = self._connection.execute("SELECT * FROM orders ORDER BY since_unix_s")
        return tuple(
            OperatorOrder(
                kind=OrderKind(row[0]),
                subject=text(row[1]),
                operator=text(row[2]),
                reason=text(row[3]),
                since_unix_s=real(row[4]),
                run_id=whole(row[5], LARGE),
            )
            for row in rows
        )


def _blob(value: object) -> bytes:
    """Return `value` if it is bytes. Raises ValueError otherwise: the row is damaged."""
    if not isinstance(value, bytes):
        raise ValueError(f"a {type(value).__name__} where bytes belong")
    return value
