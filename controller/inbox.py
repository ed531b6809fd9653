"""What a node's report changes in a job: attachments, layouts, deaths, steps, findings. Pure.

Steps are judged when every living rank's records of them are in; records of another generation than
the step's own never count, so that work on an old layout accuses nobody on a new one.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller import incidents
from pacekeeper.controller.events import (
    Command,
    SaveJob,
    SaveLayout,
    Say,
    StepSummary,
)
from pacekeeper.controller.state import JobState, RankLife, RankState, State
from pacekeeper.core.config import ControllerConfig
from pacekeeper.core.findings import FindingKind
from pacekeeper.core.layout import Layout
from pacekeeper.core.layout_codec import decode_layout, layout_crc
from pacekeeper.core.records import (
    ExpertLoadRecord,
    MicroBatchRecord,
    PlanAppliedRecord,
    RankExitRecord,
    Record,
    StepRecord,
)
from pacekeeper.core.reports import JobReport
from pacekeeper.core.topology import Attachment
from pacekeeper.predictor.evidence import Judgement, fold
from pacekeeper.predictor.workload import sample_of

MAX_PENDING_STEPS = 64
KEPT_STEP_TIMES = 32


def take_in(
    state: State, node: str, report: JobReport, config: ControllerConfig, now_s: float
) -> tuple[State, list[Command]]:
    """Fold one job's part of a report. Says with commands what must be stored and told."""
    job = state.jobs.get(report.job) or JobState(name=report.job)
    commands: list[Command] = []
    job, said = _take_attachments(job, node, report.attached)
    commands += said
    job, said = _take_layouts(job, report.layouts)
    commands += said
    if report.records:
        job = replace(job, last_record_s=now_s)
    steps: list[Record] = []
    unix_s = now_s + state.unix_offset_s
    for record in report.records:
        match record:
            case PlanAppliedRecord():
                job = _take_applied(job, record)
            case RankExitRecord():
                state, job, said = _take_exit(state, job, record, unix_s)
                commands += said
            case MicroBatchRecord() | StepRecord() | ExpertLoadRecord():
                job = _take_generation(job, record.rank, record.generation)
                steps.append(record)
    state, job, said = _observe_layout(state, job, unix_s)
    commands += said
    job = _put_pending(job, steps)
    state, job, said = _judge_complete(state, job, config, unix_s)
    commands += said
    return replace(state, jobs={**state.jobs, job.name: job}), commands


def _take_attachments(
    job: JobState, node: str, attached: Iterable[Attachment]
) -> tuple[JobState, list[Command]]:
    """Learn ranks. Another process under a known rank is a new life of the whole job."""
    commands: list[Command] = []
    for attachment in attached:
        known = job.ranks.get(attachment.rank)
        if known is not None and known.attachment.pid != attachment.pid:
            commands.append(Say(text=f"job={job.name} was started anew"))
            job = JobState(name=job.name, incidents=job.incidents)
            known = None
        if known is None:
            fresh = RankState(attachment=attachment, node=node)
            job = replace(job, ranks={**job.ranks, attachment.rank: fresh})
    return job, commands


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
        job = replace(
            job,
            known_layouts={**job.known_layouts, generation: layout},
            newest_generation=max(job.newest_generation, generation),
        )
    return job, commands


def _take_applied(job: JobState, record: PlanAppliedRecord) -> JobState:
    known = job.ranks.get(record.rank)
    layout = job.known_layouts.get(record.generation)
    if known is None or record.generation <= known.observed_generation:
        return job
    if layout is not None and layout_crc(layout) != record.layout_crc:
        return job  # another layout under a number we know: wait for its file
    rank = replace(known, observed_generation=record.generation)
    return replace(
        job,
        ranks={**job.ranks, record.rank: rank},
        newest_generation=max(job.newest_generation, record.generation),
    )


def _take_generation(job: JobState, rank: int, generation: int) -> JobState:
    """After a restart no rank says again which layout it runs: its records do."""
    known, layout = job.ranks.get(rank), job.layout
    if known is None or layout is None or known.observed_generation:
        return job
    if generation != layout.generation:
        return job
    return replace(job, ranks={**job.ranks, rank: replace(known, observed_generation=generation)})


def _take_exit(
    state: State, job: JobState, record: RankExitRecord, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    known = job.ranks.get(record.rank)
    if known is None or known.life is not RankLife.ALIVE or known.attachment.pid != record.pid:
        return state, job, []
    if not record.signal and not record.exit_code:
        rank = replace(known, life=RankLife.FINISHED)
        return state, replace(job, ranks={**job.ranks, record.rank: rank}), []
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
        ranks = [job.ranks.get(rank) for rank in layout.ranks]
        if all(rank is not None and rank.observed_generation >= generation for rank in ranks):
            return _enter_layout(state, job, layout, unix_s)
    return state, job, []


def _enter_layout(
    state: State, job: JobState, layout: Layout, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    commands: list[Command] = []
    is_ours = job.desired is not None and job.desired.generation == layout.generation
    if is_ours:
        reason = job.desired_reason
    elif job.layout is None:
        reason = "the layout the job runs"
    else:
        reason = f"the survivors {list(layout.ranks)} went on by themselves"
    left_out = [
        rank
        for rank in (job.layout.ranks if job.layout is not None else ())
        if rank not in layout.ranks and job.ranks[rank].life is RankLife.ALIVE
    ]
    for rank in left_out:
        state, job, said = incidents.bury(state, job, rank, "the others went on without it", unix_s)
        commands += said
    if is_ours:
        job, said = incidents.note_action(job, f"generation {layout.generation}: {reason}")
    else:
        gone = {r for r, known in job.ranks.items() if known.life is RankLife.DEAD}
        action = f"generation {layout.generation}: {reason}"
        job, said = incidents.close(job, gone, FindingKind.DEATH, unix_s, action)
    commands += said
    job = replace(
        job,
        layout=layout,
        layout_reason=reason,
        is_makeshift=not is_ours and job.layout is not None,
        desired=None if is_ours else job.desired,
        home=None if _is_same_work(job.home, layout) else job.home,
        known_layouts={g: x for g, x in job.known_layouts.items() if g >= layout.generation},
        recent_step_s=(),
        layout_step=job.step,
    )
    commands += [
        SaveLayout(job=job.name, layout=layout, reason=reason),
        SaveJob(job=job.name),
        Say(text=f"job={job.name} generation={layout.generation} in force: {reason}"),
    ]
    return state, job, commands


def _is_same_work(home: Layout | None, layout: Layout) -> bool:
    """Has the job come home?"""
    here = (layout.experts, layout.batch_shares)
    return home is not None and here == (home.experts, home.batch_shares)


def _put_pending(job: JobState, records: Iterable[Record]) -> JobState:
    pending = dict(job.pending)
    for record in records:
        assert not isinstance(record, PlanAppliedRecord | RankExitRecord), "taken in before"
        if record.step > job.step:
            pending[record.step] = (*pending.get(record.step, ()), record)
    for step in sorted(pending)[:-MAX_PENDING_STEPS]:
        del pending[step]  # a rank stopped reporting: do not wait for ever
    return replace(job, pending=pending)


def _judge_complete(
    state: State, job: JobState, config: ControllerConfig, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """Judge all complete steps, in order; an incomplete one before them is given up."""
    commands: list[Command] = []
    for step in sorted(job.pending):
        if not _is_complete(job, job.pending[step]):
            continue
        state, job, said = _judge(state, job, step, config, unix_s)
        commands += said
        left = {s: records for s, records in job.pending.items() if s > step}
        job = replace(job, pending=left)
    return state, job, commands


def _is_complete(job: JobState, records: tuple[Record, ...]) -> bool:
    """Did every living rank commit the step, under one generation, and report its work?"""
    ended = {r.rank: r.generation for r in records if isinstance(r, StepRecord)}
    worked = {(r.rank, r.generation) for r in records if isinstance(r, MicroBatchRecord)}
    living = [rank for rank in job.living if rank in ended]
    expected = set(job.living) or set(ended)
    return (
        bool(ended)
        and expected <= set(ended)
        and all((rank, ended[rank]) in worked for rank in living)
    )


def _judge(
    state: State, job: JobState, step: int, config: ControllerConfig, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    records = job.pending[step]
    ended = {r.rank: r for r in records if isinstance(r, StepRecord)}
    generation = max(r.generation for r in ended.values())
    work = {
        (r.rank, r.micro_batch): r
        for r in records
        if isinstance(r, MicroBatchRecord) and r.generation == generation and r.rank in ended
    }
    job = _learn_loads(job, records, generation, config)
    duration_s = max(r.duration_s for r in ended.values())
    tokens = sum(r.tokens for r in work.values())
    squares = sum(r.sum_len_squared for r in work.values())
    losses = [r.loss for r in ended.values() if r.loss is not None]
    weight = config.policy.load_ema if job.tokens_per_step else 1.0
    is_present = job.layout is not None and generation == job.layout.generation
    times = (*job.recent_step_s, duration_s)[-KEPT_STEP_TIMES:] if is_present else ()
    job = replace(
        job,
        step=step,
        recent_step_s=times,
        tokens_per_s=tokens / duration_s if duration_s > 0.0 else 0.0,
        loss=losses[0] if losses else job.loss,
        tokens_per_step=job.tokens_per_step + weight * (tokens - job.tokens_per_step),
        squares_per_step=job.squares_per_step + weight * (squares - job.squares_per_step),
    )
    if not work:
        return state, job, []
    evidence, judgement = fold(config.detector, job.evidence, sample_of(list(work.values())))
    job = _show_on_ranks(replace(job, evidence=evidence), judgement)
    state, job, commands = _take_judgement(state, job, judgement, unix_s)
    commands.append(
        StepSummary(
            job=job.name,
            step=step,
            generation=generation,
            tokens=tokens,
            duration_s=duration_s,
            loss=job.loss,
            ranks=judgement.ranks,
            observed_s=judgement.observed_s,
            expected_s=judgement.expected_s,
            slowdown=judgement.slowdown,
            watch=judgement.watch,
        )
    )
    return state, job, commands


def _learn_loads(
    job: JobState, records: tuple[Record, ...], generation: int, config: ControllerConfig
) -> JobState:
    """Fold the step's token rows per layer and expert into the running mean."""
    shape = job.shape
    if shape is None:
        return job
    seen: dict[tuple[int, int, int], ExpertLoadRecord] = {}
    for record in records:
        if isinstance(record, ExpertLoadRecord) and record.generation == generation:
            seen[record.rank, record.layer, record.first_expert] = record
    if not seen:
        return job
    rows = [[0.0] * shape.num_experts for _ in range(shape.num_layers)]
    for record in seen.values():
        for i, count in enumerate(record.counts):
            if record.layer < shape.num_layers and record.first_expert + i < shape.num_experts:
                rows[record.layer][record.first_expert + i] += count
    weight = config.policy.load_ema if job.loads else 1.0
    old = job.loads or tuple(map(tuple, rows))
    loads = tuple(
        tuple(a + weight * (b - a) for a, b in zip(before, now, strict=True))
        for before, now in zip(old, rows, strict=True)
    )
    return replace(job, loads=loads, num_load_steps=job.num_load_steps + 1)


def _show_on_ranks(job: JobState, judgement: Judgement) -> JobState:
    ranks = dict(job.ranks)
    is_measuring = not judgement.expected_s
    for i, rank in enumerate(judgement.ranks):
        if rank in ranks:
            ranks[rank] = replace(
                ranks[rank],
                observed_s=judgement.observed_s[i],
                expected_s=None if is_measuring else judgement.expected_s[i],
                slowdown=None if is_measuring else judgement.slowdown[i],
                suspicion=0.0 if is_measuring else judgement.suspicion[i],
            )
    return replace(job, ranks=ranks, watch=judgement.watch, watch_reason=judgement.reason)


def _take_judgement(
    state: State, job: JobState, judgement: Judgement, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    """Findings open incidents, recoveries close them, re-measured ones are told."""
    commands: list[Command] = []
    for finding in judgement.findings:
        # The layout to come back to is the one from before the first of the open findings.
        job = replace(job, home=job.home if job.home is not None else job.layout)
        state, job, said = incidents.open_incident(state, job, finding, unix_s)
        commands += [*said, SaveJob(job=job.name)]
    for rank in judgement.recovered:
        why = f"rank {rank} is back at its expected time"
        job, said = incidents.close(job, {rank}, FindingKind.DEVICE, unix_s, why)
        commands += said
    for rank, slowdown in judgement.changed.items():
        job, said = incidents.remeasure(job, rank, slowdown)
        commands += said
    return state, job, commands
