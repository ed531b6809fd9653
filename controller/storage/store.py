"""What must outlive the controller, in one SQLite file: jobs, layouts, incidents, decisions,
proposals.

What was acknowledged survives a kill at any moment (`sqlite_file.py`). One controller writes a
store at a time: two would give the same numbers to different incidents.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pacekeeper.controller.state.device_history import Strikes
from pacekeeper.controller.state.state import JobRecord, RankRecord, RankStatus
from pacekeeper.controller.storage import replica_marker, sqlite_file
from pacekeeper.controller.storage.change_log import Change, Journal
from pacekeeper.controller.storage.history_tables import HistoryTables
from pacekeeper.controller.storage.rows import (
    LARGE,
    incident_of,
    incident_row,
    items,
    proposal_of,
    proposal_row,
    step_of,
    text,
    whole,
)
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import Decision, Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.incidents.proposals import Proposal, ProposalState
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.layout.layout import Layout


class Store:
    """One open store; use from one thread."""

    def __init__(self, connection: sqlite3.Connection, path: Path, lock: int) -> None:
        self._connection = Journal(connection)
        self._raw = connection  # for what is this file's own, and not told to copies
        self._path = path
        self._lock = lock
        self.history_tables = HistoryTables(self._connection)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Open or make the store. Raises HostError (no access, not ours, in use), VersionError."""
        lock = sqlite_file.lock(path)
        try:
            connection = sqlite_file.connect(path)
        except BaseException:
            os.close(lock)
            raise
        return cls(connection, path, lock)

    def close(self) -> None:
        """Write everything back into one file, and let another controller have it."""
        self._connection.close()
        os.close(self._lock)

    @property
    def journal(self) -> Journal:
        return self._connection

    @property
    def copy(self) -> tuple[str, int]:
        """The name of just this copy of the state, and the last term it was led in."""
        rows = self._connection.execute("SELECT name, term FROM copy").fetchall()
        if len(rows) != 1:
            raise self._damaged(ValueError(f"{len(rows)} rows in the table copy instead of 1"))
        name, term = rows[0]
        return text(name), whole(term, LARGE)

    def next_term(self) -> int:
        """The term to lead it in without a lease: a new one, or 0 where it never had one."""
        name, term = self.copy
        if term:
            self.name_copy(name, term + 1)
        return term + 1 if term else 0

    def name_copy(self, name: str, term: int) -> None:
        """It is led from now on, in this term: nobody else has what comes. Raises HostError."""
        replica_marker.remove_marker(self._path)
        self._connection.execute("UPDATE copy SET name = ?, term = ?", (name, term))

    def follow(self, changes: Sequence[Change]) -> None:
        """One transaction of the store that this one is a copy of."""
        with self.transaction():
            self._connection.apply(changes)

    @property
    def used_bytes(self) -> int:
        """What lies in the file."""
        return sqlite_file.used_bytes(self._raw)

    @property
    def log_bytes(self) -> int:
        """The write-ahead log, which grows while another process reads the store for long."""
        try:
            return os.stat(f"{self._path}-wal").st_size
        except FileNotFoundError:
            return 0

    def give_back(self) -> bool:
        """Return some of what is free in the file to the file system; True: there is more."""
        return sqlite_file.give_back(self._raw)

    def transaction(self) -> AbstractContextManager[None]:
        """All writes inside are stored together or not at all."""
        return self._connection.transaction()

    def save_job(self, job: JobRecord) -> None:
        """Insert or replace a job."""
        self._connection.execute(
            "REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                job.name,
                job.newest_generation,
                job.step,
                _encoded(job.layout),
                job.layout_reason,
                _encoded(job.desired),
                _encoded(job.baseline),
                json.dumps([[rank.rank, rank.pid, rank.status] for rank in job.ranks]),
                job.run_id,
                job.is_provisional,
            ),
        )

    def forget_job(self, job: str) -> None:
        """A restart does not bring the job back; its incidents, decisions and layouts stay."""
        self._connection.execute("DELETE FROM jobs WHERE name = ?", (job,))

    def forget_layouts(self, job: str) -> None:
        """The job begins anew, and numbers its layouts from the first on again."""
        self._connection.execute("DELETE FROM layouts WHERE job = ?", (job,))

    def save_layout(self, job: str, layout: Layout, reason: str, unix_s: float) -> None:
        """Remember a layout that came into force then."""
        self._connection.execute(
            "REPLACE INTO layouts VALUES (?, ?, ?, ?, ?)",
            (job, layout.generation, encode_layout(layout), reason, unix_s),
        )

    def save_incident(self, incident: Incident) -> None:
        """Insert or replace an incident."""
        self._connection.execute(
            f"REPLACE INTO incidents VALUES ({', '.join('?' * 21)})", incident_row(incident)
        )

    def save_decision(self, job: str, step: int, decision: Decision, unix_s: float) -> None:
        """Append a decision with the prices it rested on."""
        self._connection.execute(
            "INSERT INTO decisions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                unix_s,
                job,
                step,
                decision.level,
                decision.reason,
                decision.current_step_s,
                decision.planned_step_s,
                decision.fluid_step_s,
                decision.cost_s,
                decision.moved_bytes,
            ),
        )

    def incident(self, incident_id: int) -> Incident | None:
        """One of any job, also of those that are over. Raises HostError for a damaged store."""
        with self._reading():
            row = self._connection.execute(
                "SELECT * FROM incidents WHERE incident_id = ?", (incident_id,)
            ).fetchone()
            return None if row is None else incident_of(row)

    def orders(self) -> tuple[OperatorOrder, ...]:
        """Orders of people that stand. Raises HostError for a damaged store."""
        with self._reading():
            return self.history_tables.orders()

    def strikes(self) -> Strikes:
        """What is remembered of devices. Raises HostError for a damaged store."""
        with self._reading():
            return self.history_tables.strikes()

    def save_proposal(self, proposal: Proposal) -> None:
        """Insert or replace a proposal."""
        self._connection.execute(
            f"REPLACE INTO proposals VALUES ({', '.join('?' * 18)})", proposal_row(proposal)
        )

    def load(self) -> tuple[tuple[JobRecord, ...], tuple[Incident, ...], int]:
        """(jobs, their incidents, the number of the next incident).

        Raises HostError for a damaged store.
        """
        with self._reading():
            jobs = tuple(
                JobRecord(
                    name=text(row[0]),
                    newest_generation=whole(row[1]),
                    step=step_of(row[2]),
                    layout=_decoded(row[3]),
                    layout_reason=text(row[4]),
                    desired=_decoded(row[5]),
                    baseline=_decoded(row[6]),
                    ranks=tuple(
                        RankRecord(rank=whole(rank), pid=whole(pid), status=RankStatus(status))
                        for rank, pid, status in items(row[7])
                    ),
                    run_id=whole(row[8], LARGE),
                    is_provisional=bool(row[9]),
                )
                for row in self._connection.execute("SELECT * FROM jobs ORDER BY name")
            )
            rows = self._connection.execute(
                "SELECT * FROM incidents WHERE job IN (SELECT name FROM jobs) ORDER BY incident_id"
            )
            incidents = tuple(incident_of(row) for row in rows)
            (newest,) = self._connection.execute(
                "SELECT max(incident_id) FROM incidents"
            ).fetchone()
            return jobs, incidents, (newest or 0) + 1

    def open_proposals(self) -> tuple[tuple[Proposal, ...], int]:
        """(those of known jobs that are open, the number of the next one).

        Raises HostError for a damaged store.
        """
        with self._reading():
            rows = self._connection.execute(
                "SELECT * FROM proposals WHERE answer IN (?, ?)"
                " AND job IN (SELECT name FROM jobs) ORDER BY proposal_id",
                (ProposalState.WAITING, ProposalState.APPROVED),
            )
            found = tuple(proposal_of(row) for row in rows)
            (newest,) = self._connection.execute(
                "SELECT max(proposal_id) FROM proposals"
            ).fetchone()
        return found, (newest or 0) + 1

    def raise_if_damaged(self, error: sqlite3.DatabaseError) -> None:
        """Raises DamagedError where `error` says that the file is no whole store any more."""
        if sqlite_file.is_damage(error):
            raise self._damaged(error) from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises HostError for a damaged store: for rows that no store of ours holds, too."""
        try:
            yield
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> HostError:
        return sqlite_file.damaged(self._path, error)

    def layout(self, job: str, generation: int) -> tuple[Layout, str] | None:
        """A layout of the past with its reason. Raises HostError for a damaged store."""
        with self._reading():
            row = self._connection.execute(
                "SELECT layout, reason FROM layouts WHERE job = ? AND generation = ?",
                (job, generation),
            ).fetchone()
            return None if row is None else (decode_layout(row[0]), row[1])


def _encoded(layout: Layout | None) -> bytes | None:
    return None if layout is None else encode_layout(layout)


def _decoded(data: bytes | None) -> Layout | None:
    return None if data is None else decode_layout(data)
