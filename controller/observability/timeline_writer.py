"""Records timelines and writes them to the store every few seconds.

Timelines are for people: nothing waits for them, and a killed controller loses the last seconds.
Decisions and incidents are stored elsewhere, before they take effect. Old timelines are deleted by
`controller/storage/retention.py`.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from sqlalchemy.exc import DBAPIError

from pacekeeper.controller.observability.explain import Explanation, explain
from pacekeeper.controller.observability.timeline import IncidentTimeline, JobRow, TimelineRecorder
from pacekeeper.controller.observability.timeline_codec import (
    decode_incident_timeline,
    decode_job_timeline,
    encode_incident_timeline,
    encode_job_timeline,
)
from pacekeeper.controller.state.events import Command, SaveIncident, SaveStack, StepSummary
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.postgres import FencedError
from pacekeeper.controller.storage.retention import Retention
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.config.controller import RetentionConfig
from pacekeeper.core.incidents.findings import Decision, Incident

WRITE_EVERY_S = 10.0
END_OF_NUMBERS = 1 << 63  # SQLite knows no larger one
MOST_AT_ONCE = 32  # timelines in one transaction: a few milliseconds
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class TimelineWriter:
    """The history of one controller. Use from the thread of its store."""

    store: Store
    config: RetentionConfig = field(default_factory=RetentionConfig)
    _retention: Retention = field(init=False)
    _recorder: TimelineRecorder = field(init=False)
    _decisions: dict[str, Decision] = field(default_factory=dict)  # the last one noted of each job
    _written_s: float = field(default_factory=time.monotonic)
    _goes_on: bool = False  # with what was open when we were started
    _trouble: str = ""

    def __post_init__(self) -> None:
        self._retention = Retention(store=self.store, config=self.config)
        self.forget_stored()

    @property
    def store_bytes(self) -> tuple[int, int]:
        """Bytes in the store, and in its write-ahead log, as last looked at."""
        return self._retention.used_bytes, self._retention.log_bytes

    def on_commands(self, commands: Sequence[Command]) -> None:
        """Record commands of the state machine."""
        for command in commands:
            self.on_command(command)

    def on_command(self, command: Command) -> None:
        """Record a command of the state machine."""
        match command:
            case StepSummary():
                self._recorder.on_step(command, time.time())
            case SaveIncident(incident=incident):
                self._recorder.on_incident(incident, time.time())
            case SaveStack(incident_id=incident_id, stack=stack):
                self._recorder.on_stack(incident_id, stack)
            case _:
                pass

    def on_tick(self, state: State) -> None:
        """Record new decisions, write what is due, or delete old rows."""
        if not self._goes_on:
            self._goes_on = True
            for job in state.jobs.values():
                self._recorder.go_on(job.open_incidents)
        for name, job in state.jobs.items():
            decision = job.plan.last_decision
            if decision is None or not job.open_incidents:
                continue
            if decision is not self._decisions.get(name):
                self._decisions[name] = decision
                self._recorder.decided(name, decision, time.time())
        if time.monotonic() - self._written_s >= WRITE_EVERY_S:
            self._written_s = time.monotonic()
            self.write()
            self._recorder.forget(state.jobs)
            self._decisions = {n: d for n, d in self._decisions.items() if n in state.jobs}
        else:
            self._retention.on_tick(time.monotonic(), time.time())

    def write(self) -> bool:
        """Write the timelines that waited longest; a failed write is retried the next time.

        Returns:
            Whether it succeeded and more is waiting.
        """
        recorder = self._recorder
        incident_ids = list(islice(recorder.changed, MOST_AT_ONCE))
        jobs = list(islice(recorder.changed_jobs, MOST_AT_ONCE))
        if not incident_ids and not jobs:
            return False
        try:
            with self.store.transaction():
                for incident_id in incident_ids:
                    timeline = recorder.incident_timelines[incident_id]
                    self.store.history_tables.save_incident_timeline(
                        incident_id, timeline.job, encode_incident_timeline(timeline)
                    )
                for job in jobs:
                    rows = recorder.job_timeline(job)
                    newest_unix_s = rows[-1].unix_s if rows else 0.0
                    self.store.history_tables.save_job_timeline(
                        job, encode_job_timeline(rows), newest_unix_s
                    )
        except FencedError:
            return False  # another controller writes its own
        except DBAPIError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("Timelines cannot be written and are kept in memory: %s", error)
            return False
        self._trouble = ""
        recorder.stored(incident_ids, jobs)
        return bool(recorder.changed or recorder.changed_jobs)

    def close(self) -> None:
        """Write everything that is waiting."""
        while self.write():
            pass

    def forget_stored(self) -> None:
        """Read timelines anew, where another controller writes them; drops what is not written."""
        self._recorder = TimelineRecorder(
            stored_incident_timeline=self._stored_incident_timeline,
            stored_job_timeline=self._stored_job_timeline,
        )

    def job_timeline(self, job: str) -> list[JobRow]:
        """The timeline of a job."""
        return self._recorder.job_timeline(job)

    def explain(self, state: State, incident_id: int) -> Explanation | None:
        """The explanation of an incident; None: its number is unknown."""
        incident = self._incident(state, incident_id)
        if incident is None:
            return None
        timeline = self._recorder.incident_timelines.get(
            incident_id
        ) or self._stored_incident_timeline(incident_id)
        return explain(incident, timeline)

    def _stored_incident_timeline(self, incident_id: int) -> IncidentTimeline | None:
        """The stored timeline of an incident; None: none is stored or readable."""
        data = self.store.history_tables.incident_timeline(incident_id)
        try:
            return None if data is None else decode_incident_timeline(data)
        except ValueError as error:
            _log.warning(
                "The stored timeline of incident %d cannot be read: %s", incident_id, error
            )
            return None

    def _stored_job_timeline(self, job: str) -> list[JobRow]:
        """The stored timeline of a job; empty: none is stored or readable."""
        data = self.store.history_tables.job_timeline(job)
        try:
            return [] if data is None else decode_job_timeline(data)
        except ValueError as error:
            _log.warning("The stored timeline of job %s cannot be read: %s", job, error)
            return []

    def _incident(self, state: State, incident_id: int) -> Incident | None:
        for job in state.jobs.values():
            for incident in job.incidents:
                if incident.incident_id == incident_id:
                    return incident
        return self.store.incident(incident_id) if incident_id < END_OF_NUMBERS else None
