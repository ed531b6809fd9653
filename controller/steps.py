"""From the records of a step to its judgement: pending, complete, folded, told. Pure.

A step is judged when every rank that should run it has reported it under one generation. Work done
on an older layout than the observed one never counts against anybody.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller import incidents
from pacekeeper.controller.events import Command, SaveJob, StepSummary
from pacekeeper.controller.state import JobState, RankLife, State, StepFact
from pacekeeper.core.config import ControllerConfig
from pacekeeper.core.findings import FindingKind
from pacekeeper.core.layout import Layout
from pacekeeper.core.records import ExpertLoadRecord, MicroBatchRecord, StepRecord
from pacekeeper.predictor.evidence import Judgement, fold
from pacekeeper.predictor.workload import sample_of

MAX_PENDING_STEPS = 64
KEPT_STEP_TIMES = 32


def put_pending(job: JobState, records: Iterable[StepFact]) -> JobState:
    """Keep records of steps to come; those of ranks we do not know are of an older life."""
    fresh: dict[int, list[StepFact]] = {}
    for record in records:
        if record.step > job.step and record.rank in job.ranks:
            fresh.setdefault(record.step, []).append(record)
    pending = dict(job.pending)
    for step, found in fresh.items():
        pending[step] = (*pending.get(step, ()), *found)
    for step in sorted(pending)[:-MAX_PENDING_STEPS]:
        del pending[step]  # a rank stopped reporting: do not wait for ever
    return replace(job, pending=pending)


def judge_complete(
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


def _expected_ranks(job: JobState) -> set[int]:
    """Who must report a step: the layout's ranks (or the whole world) that still run."""
    if job.layout is not None:
        ranks = set(job.layout.ranks)
    else:
        worlds = (known.attachment.world_size for known in job.ranks.values())
        ranks = set(range(max(worlds, default=0)))
    return {r for r in ranks if r not in job.ranks or job.ranks[r].life is RankLife.ALIVE}


def _is_complete(job: JobState, records: Iterable[StepFact]) -> bool:
    """Did everybody commit the step, under one generation, and report its work?"""
    ended = {r.rank: r.generation for r in records if isinstance(r, StepRecord)}
    worked = {(r.rank, r.generation) for r in records if isinstance(r, MicroBatchRecord)}
    expected = _expected_ranks(job) or set(ended)
    return (
        bool(ended)
        and expected <= set(ended)
        and all((rank, ended[rank]) in worked for rank in expected)
    )


def _judge(
    state: State, job: JobState, step: int, config: ControllerConfig, unix_s: float
) -> tuple[State, JobState, list[Command]]:
    records = job.pending[step]
    ended = {r.rank: r for r in records if isinstance(r, StepRecord)}
    generation = max(r.generation for r in ended.values())
    if job.layout is not None and generation < job.layout.generation:
        return state, replace(job, step=step), []  # it came too late to say anything
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
    state, job, commands = _take_judgement(state, job, judgement, config, unix_s)
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
    job: JobState, records: Iterable[StepFact], generation: int, config: ControllerConfig
) -> JobState:
    """Fold the step's token rows per layer and expert into the running mean."""
    shape = job.shape
    if shape is None:
        return job
    seen: dict[tuple[int, int, int], ExpertLoadRecord] = {}
    for record in records:
        if isinstance(record, ExpertLoadRecord) and record.generation == generation:
            seen[record.rank, record.layer, record.first_expert] = record
    reported = {r.rank for r in records if isinstance(r, StepRecord)}
    if not seen or not reported <= {rank for rank, _, _ in seen}:
        return job  # a part would look like a whole with less work
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


def _all_is_over(job: JobState) -> JobState:
    """The last finding closed: without a way home, the layout made for it is a makeshift."""
    home, layout = job.home, job.layout
    if home is None:
        return replace(job, is_makeshift=True)
    is_there = layout is not None and is_same_work(home, layout)
    return replace(job, home=None if is_there else home)


def is_same_work(one: Layout, other: Layout) -> bool:
    """Do both give every rank the same replicas and shares, whatever their generations?"""
    return (one.experts, one.batch_shares) == (other.experts, other.batch_shares)


def _take_judgement(
    state: State, job: JobState, judgement: Judgement, config: ControllerConfig, unix_s: float
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
    if judgement.recovered and not job.evidence.slow:
        job = _all_is_over(job)
    for rank, slowdown in judgement.changed.items():
        # Below the smallest slowdown worth a finding it is ending: history keeps what it was.
        if slowdown >= config.detector.min_slowdown:
            job, said = incidents.remeasure(job, rank, slowdown)
            commands += said
    return state, job, commands
