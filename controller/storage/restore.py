"""Converts the controller's state to stored records, and restores the state at a start."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pacekeeper.controller.state.device_history import Strikes
from pacekeeper.controller.state.job_parts import (
    DetectionState,
    LayoutState,
    PlanState,
    StepProgress,
)
from pacekeeper.controller.state.plan_phase import AwaitingApproval
from pacekeeper.controller.state.state import (
    JobRecord,
    JobState,
    RankRecord,
    State,
    newest_incidents,
)
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import FindingKind, Incident
from pacekeeper.core.incidents.operator_orders import OperatorOrder
from pacekeeper.core.incidents.proposals import Proposal
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.detector.input_stall import restored_inputs
from pacekeeper.predictor.detector.state import restore
from pacekeeper.predictor.job_level.online import JobLevelState


def restored(
    jobs: Sequence[JobRecord],
    incidents: Sequence[Incident],
    *,
    next_incident_id: int,
    unix_offset_s: float,
    waiting: Sequence[Proposal] = (),
    next_proposal_id: int = 1,
    standing: Sequence[OperatorOrder] = (),
    strikes: Strikes = MappingProxyType({}),
) -> State:
    """Build the state from stored records: open findings stay open, all else is measured anew.

    Args:
        jobs: All jobs.
        incidents: Their incidents, open and closed.
        next_incident_id: Number of the next incident.
        unix_offset_s: Unix time minus the machine's clock.
        waiting: Open proposals, at most one of each job.
        next_proposal_id: Number of the next proposal.
        standing: Operator orders that are in effect.
        strikes: Earlier incidents by device.
    """
    states = {}
    proposed = {proposal.job: proposal for proposal in waiting}
    for job in jobs:
        own = newest_incidents([incident for incident in incidents if incident.job == job.name])
        known = {x.generation: x for x in (job.layout, job.desired) if x is not None}
        ours = (job.desired,) if job.desired is not None else ()
        states[job.name] = JobState(
            name=job.name,
            run_id=job.run_id,
            incidents=own,
            remembered={rank.rank: rank for rank in job.ranks},
            layouts=LayoutState(
                current=job.layout,
                reason=job.layout_reason,
                is_provisional=job.is_provisional,
                baseline=job.baseline,
                known=known,
                newest_generation=job.newest_generation,
                offer_reasons={plan.generation: "offered before a restart" for plan in ours},
            ),
            detection=DetectionState(
                evidence=restore(
                    _open_slowdowns(own, FindingKind.DEVICE),
                    everybody=_open_slowdown(own, FindingKind.HOST),
                ),
                links=restore(
                    _open_slowdowns(own, FindingKind.LINK),
                    everybody=_open_slowdown(own, FindingKind.LINK),
                ),
                inputs=restored_inputs(
                    _open_slowdowns(own, FindingKind.INPUT),
                    everybody=_open_slowdown(own, FindingKind.INPUT),
                ),
                whole=JobLevelState(slowdown=_open_slowdown(own, FindingKind.HOST)),
            ),
            plan=PlanState(pending=_waiting(proposed.get(job.name), job.layout)),
            progress=StepProgress(step=job.step),
        )
    return State(
        jobs=states,
        next_incident_id=next_incident_id,
        next_proposal_id=next_proposal_id,
        unix_offset_s=unix_offset_s,
        orders=tuple(standing),
        strikes=strikes,
    )


def _waiting(proposal: Proposal | None, layout: Layout | None) -> AwaitingApproval | None:
    """Return the phase of an open proposal; its base is `layout` itself where they are equal.

    The two are compared on every tick.
    """
    if proposal is None:
        return None
    if layout is not None and proposal.base == layout:
        proposal = replace(proposal, base=layout)
    return AwaitingApproval(proposal=proposal)


def _open_slowdowns(incidents: Sequence[Incident], kind: FindingKind) -> dict[int, float]:
    """Slowdowns of the open findings of this kind, by rank."""
    return {
        incident.finding.rank: incident.finding.slowdown
        for incident in incidents
        if incident.is_open and incident.finding.kind is kind and incident.finding.rank is not None
    }


def _open_slowdown(incidents: Sequence[Incident], kind: FindingKind) -> float:
    """Slowdown of the open finding of this kind without a rank; 1.0: there is none."""
    for incident in incidents:
        finding = incident.finding
        if incident.is_open and finding.kind is kind and finding.rank is None:
            return incident.finding.slowdown
    return 1.0


def job_record(state: State, job: str) -> JobRecord:
    """The stored part of a job."""
    known = state.jobs[job]
    return JobRecord(
        name=job,
        run_id=known.run_id,
        is_provisional=known.layouts.is_provisional,
        newest_generation=known.layouts.newest_generation,
        step=known.progress.step,
        layout=known.layouts.current,
        layout_reason=known.layouts.reason,
        desired=known.plan.desired,
        baseline=known.layouts.baseline,
        ranks=tuple(
            RankRecord(rank=rank, pid=r.attachment.pid, status=r.status)
            for rank, r in sorted(known.ranks.items())
        )
        + tuple(known.remembered[rank] for rank in sorted(known.remembered)),
    )


_log = logging.getLogger(__name__)


def open_past(where: str | Path, unix_offset_s: float) -> tuple[Store, State]:
    """Open the store and load its state. Raises as `Store.open` and `load_state`."""
    store = Store.open(where)
    with contextlib.ExitStack() as undone:
        undone.callback(store.close)
        state = load_state(store, unix_offset_s)
        undone.pop_all()
    if state.jobs:
        _log.info("store=%s jobs=%d", store.database.name, len(state.jobs))
    return store, state


def load_state(store: Store, unix_offset_s: float) -> State:
    """Load the state from the store, in one consistent read.

    Raises:
        HostError: The store does not answer, or is damaged.
    """
    with store.reading():
        jobs, incidents, next_id = store.load()
        waiting, next_proposal_id = store.open_proposals()
        return restored(
            jobs,
            incidents,
            next_incident_id=next_id,
            waiting=waiting,
            next_proposal_id=next_proposal_id,
            standing=store.orders(),
            strikes=store.strikes(),
            unix_offset_s=unix_offset_s,
        )
