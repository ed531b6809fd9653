"""All ranks went back: to a checkpoint, or as a new run that nothing tells from the old. Pure.

Their steps count again from there. A report that came twice is no such thing: it tells the same
moments again, while a step that is done again ends later.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller.detection.coverage import running
from pacekeeper.controller.state_machine import expert_loads
from pacekeeper.controller.state_machine.events import Command, SaveJob, Say
from pacekeeper.controller.state_machine.state import JobState
from pacekeeper.core.fast_replace import evolve
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.predictor.assurance.canary import Canaries
from pacekeeper.predictor.online.cusum import no_charts
from pacekeeper.predictor.online.state import Evidence


def follow(job: JobState, ends: Iterable[StepRecord]) -> tuple[JobState, list[Command]]:
    """Once each rank that runs has newly ended a step that is over, steps restart at the lowest."""
    ended_s: dict[int, float] = {}
    again: dict[int, int] = dict(job.again)
    for record in ends:
        rank = record.rank
        if rank not in job.ranks:
            continue
        last_s = ended_s.get(rank) or job.ended_mono_s.get(rank)
        if last_s is None or record.ended_mono_s > last_s:
            ended_s[rank] = record.ended_mono_s
            if record.step > job.step:
                again.pop(rank, None)
            elif last_s is not None:  # of the first one heard nobody can say whether it is new
                again[rank] = min(record.step, again.get(rank, record.step))
    if not ended_s:
        return job, []
    job = evolve(job, ended_mono_s=job.ended_mono_s.changed(ended_s), again=again)
    if not again:
        return job, []  # nearly always: not worth a walk over all ranks
    ranks = running(job)
    if not ranks or job.unattached or not all(rank in again for rank in ranks):
        return job, []
    first = min(again[rank] for rank in ranks)
    text = (
        f"job={job.name} went back: its ranks have ended step {job.step} and now end step {first}"
    )
    job = replace(
        expert_loads.undated(job),
        step=first - 1,
        layout_step=min(job.layout_step, first),
        pending={},
        again={},
        decided_on=None,
        # What was learnt of work and ranks holds; what is dated by steps does not.
        evidence=_undated(job.evidence),
        by_role={role: _undated(kept) for role, kept in job.by_role.items()},
        links=_undated(job.links),
        inputs=replace(job.inputs, evidence=_undated(job.inputs.evidence)),
        canaries=Canaries(turn=job.canaries.turn),
    )
    return job, [SaveJob(job=job.name), Say(text=text)]


def _undated(evidence: Evidence) -> Evidence:
    return replace(evidence, charts=no_charts())
