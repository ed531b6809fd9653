"""What a node's report changes in a job: attachments, layouts, deaths, observed generations. Pure.

Order does not matter and repetition changes nothing: what ranks say is remembered until the layout
they speak of is known. Steps and findings: `steps.py`.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller import incidents, steps
from pacekeeper.controller.events import Command, SaveJob, SaveLayout, Say
from pacekeeper.controller.state import JobState, RankLife, RankState, State, StepFact
from pacekeeper.core.config import ControllerConfig
from pacekeeper.core.findings import FindingKind
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import decode_layout, layout_crc
from pacekeeper.core.records import PlanAppliedRecord, RankExitRecord
from pacekeeper.core.reports import JobReport
from pacekeeper.core.topology import Attachment


def take_in(
    state: State, node: str, report: JobReport, config: ControllerConfig, now_s: float
) -> tuple[State, list[Command]]:
    """Fold one job's part of a report. Says with commands what must be stored and told."""
    job = state.jobs.get(report.job) or JobState(name=report.job)
    commands: list[Command] = []
    unix_s = now_s + state.unix_offset_s
    job, said = _take_attachments(job, node, report.attached, now_s, unix_s)
    commands += said
    job, said = _take_layouts(job, report.layouts)
    commands += said
    work: list[StepFact] = []
    for record in report.records:
        job = _take_sign_of_life(job, record.rank, now_s)
        match record:
            case PlanAppliedRecord():
                job = _take_applied(job, record.rank, record.generation, record.layout_crc)
            case RankExitRecord():
                state, job, said = _take_exit(state, job, record, unix_s)
                commands += said
            case _:
                # As good as a PlanAppliedRecord, which may be lost or of before our own start.
                job = _take_applied(job, record.rank, record.generation, None)
                work.append(record)
    state, job, said = _observe_layout(state, job, unix_s)
    commands += said
    job = steps.put_pending(job, work)
    state, job, said = steps.judge_complete(state, job, config, unix_s)
    commands += said
    return replace(state, jobs={**state.jobs, job.name: job}), commands


def _take_attachments(
    job: JobState, node: str, attached: Iterable[Attachment], now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Learn ranks. Another process under a known rank is a new life of the whole job."""
    commands: list[Command] = []
    for attachment in attached:
        number = attachment.rank
        known, stored = job.ranks.get(number), job.remembered.get(number)
        if known is not None and known.attachment.pid == attachment.pid:
            continue
        is_new_life = known is not None or (stored is not None and stored.pid != attachment.pid)
        if is_new_life and (job.step >= 0 or stored is not None):
            job, said = _begin_anew(job, unix_s)
            commands += said
            stored = None
        fresh = RankState(attachment=attachment, node=node, last_record_s=now_s)
        if stored is not None:
            # We were started anew, it was not.
            fresh = replace(fresh, life=stored.life)
        left = {r: record for r, record in job.remembered.items() if r != number}
        job = replace(job, ranks={**job.ranks, number: fresh}, remembered=left)
        commands.append(SaveJob(job=job.name))
    return job, commands


def _begin_anew(job: JobState, unix_s: float) -> tuple[JobState, list[Command]]:
    """The job was started again: nothing of its former life holds, its findings are history."""
    everybody = {incident.finding.rank for incident in job.open_incidents}
    commands: list[Command] = [Say(text=f"job={job.name} was started anew")]
    for kind in FindingKind:
        job, said = incidents.close(job, everybody, kind, unix_s, "the job was started anew")
        commands += said
    return JobState(name=job.name, incidents=job.incidents), commands


def _take_layouts(
    job: JobState, layouts: Iterable[tuple[int, bytes]]
) -> tuple[JobState, list[Command]]:
    """Layouts that the trainer wrote: the first one, and what survivors agreed on."""
    commands: list[Command] = []
    for generation, data in layouts:
        try:
            layout = decode_layout(data)
        except ValueError as error:
            commands.append(Say(text=f"job={job.name} layout={generation} unreadable: {error}"))
            continue
        offered = dict(job.offered)
        if job.known_layouts.get(generation) != layout:
            offered.pop(generation, None)  # theirs, though it has the number of one of ours
        job = replace(
            job,
            known_layouts={**job.known_layouts, generation: layout},
            offered=offered,
            newest_generation=max(job.newest_generation, generation),
        )
    return job, commands


def _take_sign_of_life(job: JobState, rank: int, now_s: float) -> JobState:
    known = job.ranks.get(rank)
    if known is None or known.last_record_s == now_s:
        return job
    return replace(job, ranks={**job.ranks, rank: replace(known, last_record_s=now_s)})


def _take_applied(job: JobState, rank: int, generation: int, crc: int | None) -> JobState:
    """A rank says which generation it runs: the newest counts, with a checksum better than none."""
    known = job.ranks.get(rank)
    if known is None:
        return job
    is_news = generation > known.observed_generation
    is_proof = generation == known.observed_generation and known.observed_crc is None
    if not is_news and not (is_proof and crc is not None):
        return job
    fresh = replace(known, observed_generation=generation, observed_crc=crc)
    return replace(
        job,
        ranks={**job.ranks, rank: fresh},
        newest_generation=max(job.newest_generation, generation),
    )


def _take_exit(
    state: State, job: JobState, record: RankExitRecord, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    known = job.ranks.get(record.rank)
    if known is None or known.life is not RankLife.ALIVE or known.attachment.pid != record.pid:
        return state, job, []
    if not record.signal and not record.exit_code:
        rank = replace(known, life=RankLife.FINISHED)
        job = replace(job, ranks={**job.ranks, record.rank: rank})
        return state, job, [SaveJob(job=job.name)]
    how = f"signal {record.signal}" if record.signal else f"exit code {record.exit_code}"
    return incidents.bury(state, job, record.rank, f"its process ended by {how}", unix_s)


def _observe_layout(
    state: State, job: JobState, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """The newest known layout that all its ranks say they run becomes the observed one."""
    present = 0 if job.layout is None else job.layout.generation
    for generation in sorted(job.known_layouts, reverse=True):
        if generation <= present:
            break
        layout = job.known_layouts[generation]
        if _is_run_by_all(job, layout):
            return _enter_layout(state, job, layout, unix_s)
    return state, job, []


def _is_run_by_all(job: JobState, layout: Layout) -> bool:
    ranks = [job.ranks.get(rank) for rank in layout.ranks]
    crc = layout_crc(layout)
    return all(
        known is not None
        and known.observed_generation >= layout.generation
        and (known.observed_generation > layout.generation or known.observed_crc in (None, crc))
        for known in ranks
    )


def _enter_layout(
    state: State, job: JobState, layout: Layout, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    commands: list[Command] = []
    before = job.layout
    is_ours = layout.generation in job.offered
    if is_ours:
        reason = job.offered[layout.generation]
    elif before is None:
        reason = "the layout the job runs"
    else:
        reason = f"the survivors {list(layout.ranks)} went on by themselves"
    for rank in before.ranks if before is not None else ():
        known = job.ranks.get(rank)
        if rank not in layout.ranks and known is not None and known.life is RankLife.ALIVE:
            why = "the others went on without it"
            state, job, said = incidents.bury(state, job, rank, why, unix_s)
            commands += said
    action = f"generation {layout.generation}: {reason}"
    if is_ours:
        job, said = incidents.note_action(job, action)
    else:
        left = set(job.dead) - set(layout.ranks)
        job, said = incidents.close(job, left, FindingKind.DEATH, unix_s, action)
    commands += said
    is_overtaken = job.desired is not None and job.desired.generation <= layout.generation
    is_home = job.home is not None and steps.is_same_work(job.home, layout)
    kept = {g: known for g, known in job.known_layouts.items() if g >= layout.generation}
    job = replace(
        job,
        layout=layout,
        layout_reason=reason,
        is_makeshift=not is_ours and before is not None,
        desired=None if is_overtaken else job.desired,
        home=None if is_home else job.home,
        known_layouts=kept,
        offered={g: why for g, why in job.offered.items() if g in kept},
        recent_step_s=(),
        layout_step=job.step,
    )
    commands += [
        SaveLayout(job=job.name, layout=layout, reason=reason),
        SaveJob(job=job.name),
        Say(text=f"job={job.name} generation={layout.generation} in force: {reason}"),
    ]
    return state, job, commands
