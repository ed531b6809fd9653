"""What must outlive the controller, in one SQLite file: jobs, layouts, incidents, decisions.

Write-ahead log, synchronous FULL: what was acknowledged survives a kill at any moment.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacekeeper.controller.state import JobRecord
from pacekeeper.core.errors import HostError, VersionError
from pacekeeper.core.findings import Decision, Finding, FindingKind, Incident, Tier
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import decode_layout, encode_layout

SCHEMA_VERSION = 1
_TABLES = """
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, newest_generation INTEGER NOT NULL, step INTEGER NOT NULL,
    layout BLOB, layout_reason TEXT NOT NULL, desired BLOB, home BLOB);
CREATE TABLE layouts (
    job TEXT NOT NULL, generation INTEGER NOT NULL, layout BLOB NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (job, generation));
CREATE TABLE incidents (
    incident_id INTEGER PRIMARY KEY, job TEXT NOT NULL, kind TEXT NOT NULL, tier TEXT NOT NULL,
    rank INTEGER NOT NULL, slowdown REAL, onset_step INTEGER NOT NULL, step INTEGER NOT NULL,
    reason TEXT NOT NULL, opened_unix_s REAL NOT NULL, closed_unix_s REAL, closed_step INTEGER,
    actions TEXT NOT NULL);
CREATE TABLE decisions (
    job TEXT NOT NULL, step INTEGER NOT NULL, rung TEXT NOT NULL, reason TEXT NOT NULL,
    current_step_s REAL NOT NULL, planned_step_s REAL NOT NULL, fluid_step_s REAL NOT NULL,
    cost_s REAL NOT NULL, moved_bytes INTEGER NOT NULL);
"""


class Store:
    """One open store; use from one thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open or make the store. Raises HostError (no access, no database), VersionError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(
                    f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
        except (sqlite3.DatabaseError, OSError) as error:
            raise HostError(
                f"store {path}: {error}",
                remedy="name a writable file that is ours with --store",
            ) from None
        if version not in (0, SCHEMA_VERSION):
            raise VersionError(
                f"store {path} has schema {version}, this controller writes {SCHEMA_VERSION}",
                remedy="install the newer pacekeeper, or name another --store",
            )
        return cls(connection)

    def close(self) -> None:
        """Write everything back into one file."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside are stored together or not at all."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def save_job(self, job: JobRecord) -> None:
        """Insert or replace a job."""
        self._connection.execute(
            "REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                job.name,
                job.newest_generation,
                job.step,
                _encoded(job.layout),
                job.layout_reason,
                _encoded(job.desired),
                _encoded(job.home),
            ),
        )

    def save_layout(self, job: str, layout: Layout, reason: str) -> None:
        """Remember a layout that came into force."""
        self._connection.execute(
            "REPLACE INTO layouts VALUES (?, ?, ?, ?)",
            (job, layout.generation, encode_layout(layout), reason),
        )

    def save_incident(self, incident: Incident) -> None:
        """Insert or replace an incident."""
        finding = incident.finding
        self._connection.execute(
            "REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                incident.incident_id,
                incident.job,
                finding.kind,
                finding.tier,
                finding.rank,
                finding.slowdown,
                finding.onset_step,
                finding.step,
                finding.reason,
                incident.opened_unix_s,
                incident.closed_unix_s,
                incident.closed_step,
                json.dumps(incident.actions),
            ),
        )

    def save_decision(self, job: str, step: int, decision: Decision) -> None:
        """Append a decision with the prices it rested on."""
        self._connection.execute(
            "INSERT INTO decisions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                job,
                step,
                decision.rung,
                decision.reason,
                decision.current_step_s,
                decision.planned_step_s,
                decision.fluid_step_s,
                decision.cost_s,
                decision.moved_bytes,
            ),
        )

    def load(self) -> tuple[tuple[JobRecord, ...], tuple[Incident, ...], int]:
        """(jobs, incidents, the next incident's number)."""
        jobs = tuple(
            JobRecord(
                name=row[0],
                newest_generation=row[1],
                step=row[2],
                layout=_decoded(row[3]),
                layout_reason=row[4],
                desired=_decoded(row[5]),
                home=_decoded(row[6]),
            )
            for row in self._connection.execute("SELECT * FROM jobs ORDER BY name")
        )
        rows = self._connection.execute("SELECT * FROM incidents ORDER BY incident_id")
        incidents = tuple(_incident(row) for row in rows)
        newest = max((incident.incident_id for incident in incidents), default=0)
        return jobs, incidents, newest + 1

    def layout(self, job: str, generation: int) -> tuple[Layout, str] | None:
        """A layout of the past with its reason."""
        row = self._connection.execute(
            "SELECT layout, reason FROM layouts WHERE job = ? AND generation = ?",
            (job, generation),
        ).fetchone()
        return None if row is None else (decode_layout(row[0]), row[1])


def _incident(row: tuple[Any, ...]) -> Incident:
    return Incident(
        incident_id=row[0],
        job=row[1],
        finding=Finding(
            kind=FindingKind(row[2]),
            tier=Tier(row[3]),
            rank=row[4],
            slowdown=row[5],
            onset_step=row[6],
            step=row[7],
            reason=row[8],
        ),
        opened_unix_s=row[9],
        closed_unix_s=row[10],
        closed_step=row[11],
        actions=tuple(json.loads(row[12])),
    )


def _encoded(layout: Layout | None) -> bytes | None:
    return None if layout is None else encode_layout(layout)


def _decoded(data: bytes | None) -> Layout | None:
    return None if data is None else decode_layout(data)
