"""Selects the commands that are written to the store: each job once, deferrable ones in batches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pacekeeper.controller.state.events import (
    Command,
    DeleteOrder,
    ForgetJob,
    ForgetLayouts,
    SaveDecision,
    SaveIncident,
    SaveJob,
    SaveLayout,
    SaveOrder,
    SaveProposal,
    SaveStrike,
)
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.restore import job_record
from pacekeeper.controller.storage.store import Store

SAVE_WITHIN_S = 1.0  # what may wait
_STORED = (
    SaveIncident
    | SaveLayout
    | SaveDecision
    | SaveProposal
    | SaveJob
    | SaveStrike
    | SaveOrder
    | DeleteOrder
    | ForgetJob
    | ForgetLayouts
)


def last_of_each(commands: Sequence[Command]) -> list[Command]:
    """Keep one SaveIncident of each incident: its last state, at the position of its first."""
    newest: dict[int, SaveIncident] = {}
    for command in commands:
        if isinstance(command, SaveIncident):
            newest[command.incident.incident_id] = command
    after: list[Command] = []
    for command in commands:
        if not isinstance(command, SaveIncident):
            after.append(command)
        elif (last := newest.pop(command.incident.incident_id, None)) is not None:
            after.append(last)
    return after


@dataclass(slots=True, eq=False, kw_only=True)
class WriteBatch:
    """Tracks jobs with unwritten changes, and since when."""

    _unsaved: dict[str, float] = field(default_factory=dict)

    def of(self, state: State, commands: Sequence[Command], now_s: float) -> list[Command]:
        """Return the commands to write, in order, with deferred jobs that have waited long enough.

        A job is written as it is in `state`, once for all commands that ask for it.
        """
        for command in commands:
            if isinstance(command, SaveJob) and command.may_wait:
                self._unsaved.setdefault(command.job, now_s)
        if min(self._unsaved.values(), default=now_s) <= now_s - SAVE_WITHIN_S:
            commands = [*commands, *(SaveJob(job=job) for job in self._unsaved)]
        last = {
            c.job: i for i, c in enumerate(commands) if isinstance(c, SaveJob) and not c.may_wait
        }
        return [
            command
            for i, command in enumerate(commands)
            if isinstance(command, _STORED)
            and not (
                isinstance(command, SaveJob)
                and (last.get(command.job) != i or command.job not in state.jobs)
            )
        ]

    def done(self, state: State, writes: Sequence[Command]) -> None:
        """Record that these commands are stored."""
        for command in writes:
            if isinstance(command, SaveJob):
                self._unsaved.pop(command.job, None)
        for job in self._unsaved.keys() - state.jobs.keys():
            del self._unsaved[job]


def write_all(store: Store, state: State, commands: Sequence[Command], unix_s: float) -> None:
    """Execute store commands in one transaction; `unix_s`: the present time."""
    with store.transaction():
        for command in commands:
            write(store, state, command, unix_s)


def write(store: Store, state: State, command: Command, unix_s: float) -> None:
    """Execute one store command; `unix_s`: the time to record."""
    match command:
        case SaveIncident(incident=incident):
            store.save_incident(incident)
        case SaveLayout(job=job, layout=layout, reason=reason):
            store.save_layout(job, layout, reason, unix_s)
        case SaveDecision(job=job, step=step, decision=decision):
            store.save_decision(job, step, decision, unix_s)
        case SaveProposal(proposal=proposal):
            store.save_proposal(proposal)
        case SaveOrder(order=order):
            store.history_tables.save_order(order)
        case DeleteOrder(kind=kind, subject=subject):
            store.history_tables.drop_order(kind, subject)
        case SaveStrike(strike=strike):
            store.history_tables.save_strike(strike)
        case SaveJob(job=job):
            store.save_job(job_record(state, job))
        case ForgetJob(job=job):
            store.forget_job(job)
        case ForgetLayouts(job=job):
            store.forget_layouts(job)
