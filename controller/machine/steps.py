"""Steps: their records are collected, and a complete step is judged.

A step is judged when every rank that should run it has reported it under one generation. Work done
on an older layout than the observed one is not judged. Called by `reports.py`. Pure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pacekeeper.controller.detection import (
    coverage,
    data_loading,
    imbalance,
    incidents,
    iteration,
    job_level,
    link_verdicts,
    links,
    root_cause,
)
from pacekeeper.controller.detection.peer_groups import judge_roles, samples_of
from pacekeeper.controller.mitigation import verification
from pacekeeper.controller.mitigation.probes import standby_ranks
from pacekeeper.controller.mitigation.rollout import on_all_recovered
from pacekeeper.controller.state.events import Command, SaveJob, StepSummary
from pacekeeper.controller.state.job_parts import StepDraft
from pacekeeper.controller.state.state import JobState, RankStatus, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.telemetry.microbatch_table import MicroBatchTable
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.predictor.cost.features import FeatureTable, last_reported, work_of
from pacekeeper.predictor.detector.state import Judgement
from pacekeeper.predictor.job_level.online import JobStep

MAX_PENDING_STEPS = 64
KEPT_STEP_TIMES = 32
MAX_ROWS_PER_RANK = 4096  # of one pending step; the oldest ones beyond it are dropped


def add_pending(
    job: JobState, tables: Iterable[MicroBatchTable], ends: Iterable[StepRecord]
) -> JobState:
    """Add work and ends to the pending steps.

    Those of unknown ranks belong to an older run and are dropped.
    """
    work: dict[int, list[MicroBatchTable]] = {}
    ended: dict[int, dict[int, StepRecord]] = {}
    for table in tables:
        if (known := _of_known(job, table)) is not None:
            for step, own in known.by_step(most=MAX_PENDING_STEPS):
                if step > job.progress.step:
                    work.setdefault(step, []).append(own)
    for record in ends:
        if record.step > job.progress.step and record.rank in job.ranks:
            ended.setdefault(record.step, {})[record.rank] = record
    pending = dict(job.progress.pending)
    # Only the newest steps: a rank that stopped reporting must not keep steps for ever.
    newest = sorted(pending.keys() | work.keys() | ended.keys())[-MAX_PENDING_STEPS:]
    for step in newest:
        if step not in work and step not in ended:
            continue
        draft, more = pending.get(step) or StepDraft(), work.get(step, ())
        tables, told = _with_more(draft, more)
        pending[step] = StepDraft(
            tables=tables,
            num_rows=draft.num_rows.changed(told),
            ends=draft.ends.changed(ended.get(step, {})),
            first_missing=draft.first_missing,
        )
    if len(pending) > MAX_PENDING_STEPS:
        pending = {step: draft for step, draft in pending.items() if step >= newest[0]}
    return replace(
        job,
        progress=replace(job.progress, pending=pending),
        detection=replace(job.detection, tells_work=job.detection.tells_work or bool(work)),
    )


def _of_known(job: JobState, table: MicroBatchTable) -> MicroBatchTable | None:
    """Return the rows of known ranks of this job; None where there are none."""
    if job.ranks.keys() >= set(table.column("rank")):
        return table
    return _without(table, lambda rank: rank not in job.ranks)


def _without(table: MicroBatchTable, is_left_out: Callable[[int], bool]) -> MicroBatchTable | None:
    """Return the table without the rows of some ranks; None: no row is left."""
    ranks = table.column("rank")
    rows = [row for row, rank in enumerate(ranks) if not is_left_out(rank)]
    if len(rows) == len(ranks):
        return table
    return table.rows(rows) if rows else None


def _with_more(
    draft: StepDraft, more: Iterable[MicroBatchTable]
) -> tuple[tuple[MicroBatchTable, ...], dict[int, Mapping[int, int]]]:
    """Return all tables of a step, and the new entries of `StepDraft.num_rows` for their ranks.

    Of a rank that reports too many rows only the newest table is kept; other ranks keep their rows.
    """
    tables, told = [*draft.tables], dict[int, Mapping[int, int]]()
    for table in more:
        too_many = set[int]()
        # Loops of plain values: this is done for each report of a fleet.
        fresh: dict[int, dict[int, int]] = {}
        for rank, generation in zip(table.column("rank"), table.column("generation"), strict=True):
            counts = fresh.get(rank)
            if counts is None:
                counts = fresh[rank] = {}
            counts[generation] = counts.get(generation, 0) + 1
        for rank, counts in fresh.items():
            known = told.get(rank) or draft.num_rows.get(rank)
            if known and sum(known.values()) + sum(counts.values()) > MAX_ROWS_PER_RANK:
                too_many.add(rank)
            elif known:
                counts = {**known, **{g: known.get(g, 0) + count for g, count in counts.items()}}
            told[rank] = counts
        if too_many:
            kept = [_without(one, too_many.__contains__) for one in tables]
            tables = [one for one in kept if one is not None]
        tables.append(table)
    return tuple(tables), told


def judge_complete(
    state: State, job: JobState, config: ControllerConfig, now_s: float
) -> tuple[State, JobState, list[Command]]:
    """Judge all complete steps, in order; an incomplete one before them is given up."""
    commands: list[Command] = []
    for step in sorted(job.progress.pending):
        draft = job.progress.pending[step]
        at = first_missing(job, draft, is_work_missing=job_level.is_work_missing(job, step))
        if at is not None:
            if at != draft.first_missing:
                draft = replace(draft, first_missing=at)
                job = replace(
                    job,
                    progress=replace(job.progress, pending={**job.progress.pending, step: draft}),
                )
            continue
        state, job, said = _judge(state, job, step, config, now_s)
        commands += said
        job = replace(
            job,
            progress=replace(
                job.progress,
                pending={s: left for s, left in job.progress.pending.items() if s > step},
            ),
        )
    return state, job, commands


def first_without(ranks: Sequence[int], start: int, is_there: Callable[[int], bool]) -> int | None:
    """Return the position of a rank for which `is_there` is false; None: it is true for all.

    The search begins at position `start` and wraps around. A caller that passes the last result as
    `start` checks each rank about once in total, however often it calls.
    """
    num_ranks = len(ranks)
    for i in range(num_ranks):
        at = (start + i) % num_ranks
        if not is_there(ranks[at]):
            return at
    return None


def first_missing(job: JobState, draft: StepDraft, *, is_work_missing: bool) -> int | None:
    """Return the position of a rank that has not committed the step with its work; None: complete.

    The position is one in the layout's ranks (or the whole world's where there is no layout).

    Args:
        job: The job.
        draft: The step's records so far.
        is_work_missing: No rank will report any work of the step.
    """
    ranks = range(job.world_size) if job.layouts.current is None else job.layouts.current.ranks
    resting = standby_ranks(job)

    def is_done(rank: int) -> bool:
        if is_work_missing or rank in resting:
            return rank in draft.ends
        return draft.is_whole(rank)

    def is_there(rank: int) -> bool:
        if is_done(rank):
            return True
        known = job.ranks.get(rank)
        return known is not None and known.status is not RankStatus.ALIVE

    at = first_without(ranks, draft.first_missing, is_there)
    if at is None and not any(map(is_done, draft.ends)):
        return draft.first_missing  # no rank is alive, and none ended the step
    return at


def _judge(
    state: State, job: JobState, step: int, config: ControllerConfig, now_s: float
) -> tuple[State, JobState, list[Command]]:
    draft = job.progress.pending[step]
    ended = dict(sorted(draft.ends.items()))
    generation = max(r.generation for r in ended.values())
    if job.layouts.current is not None and generation < job.layouts.current.generation:
        return (
            state,
            replace(job, progress=replace(job.progress, step=step)),
            [],
        )  # the step is of an older layout
    work = work_of(draft.tables)
    # FeatureTable under another layout, or of a rank that did not end the step, is not judged.
    is_of_step = work["generation"] == generation
    if not ended.keys() >= set(draft.num_rows):
        is_of_step &= np.isin(work["rank"], list(ended))
    work = last_reported(work if is_of_step.all() else work.only(is_of_step))
    job, told = _update_progress(job, step, generation, ended, work, config)
    unix_s = now_s + state.unix_offset_s
    resting = standby_ranks(job)  # their waits are no part of a step
    of_generation = {
        rank: end
        for rank, end in ended.items()
        if end.generation == generation and rank not in resting
    }
    state, job, commands = _judge_waits(state, job, of_generation, config, unix_s)
    timed, untimed = _split_by_timing(work)
    if not len(timed) and (untimed or not job.detection.tells_work):
        state, job, said = job_level.judge_step(state, job, told, untimed, config, now_s)
        return state, job, [*commands, *said]
    if not len(timed):
        return state, job, commands
    if job.detection.whole.num_steps or job.detection.whole.is_open:
        job = job_level.switch_to_ranks(job)
    samples = samples_of(job, timed)
    job, judgement = judge_roles(config.detector, job, samples)
    job = replace(
        job, detection=replace(job.detection, measured=job.detection.measured.by(judgement))
    )
    state, job, said = _apply_judgement(state, job, judgement, draft, config, unix_s)
    commands += said
    job, said = coverage.update_after_step(job, judgement, timed, untimed, config, now_s)
    commands += said
    job, said = incidents.note_persistent(job, config.policy.horizon_steps)
    commands += said
    paths = iteration.paths_of(job, timed)
    state, job, said = iteration.update_iterations(state, job, paths, told, config, unix_s)
    commands += said
    state, job, advised = imbalance.update_advice(
        state, job, samples, paths, told.duration_s, unix_s
    )
    commands += advised
    commands.append(
        StepSummary(
            job=job.name,
            step=step,
            generation=generation,
            tokens=told.tokens,
            duration_s=told.duration_s,
            loss=job.progress.loss,
            ranks=judgement.ranks,
            observed_s=judgement.observed_s,
            expected_s=judgement.expected_s,
            slowdown=judgement.slowdown,
            watch=job.coverage.state,
        )
    )
    return state, job, commands


def _update_progress(
    job: JobState,
    step: int,
    generation: int,
    ended: Mapping[int, StepRecord],
    work: FeatureTable,
    config: ControllerConfig,
) -> tuple[JobState, JobStep]:
    """Update the job's progress and workload from a step; also return the step as a whole."""
    duration_s = max(r.duration_s for r in ended.values())
    # All ranks of a pipeline report its tokens: `tensor_share` counts each token once.
    tokens, squares, documents = (
        round(float(work[name] @ work["tensor_share"]))
        for name in ("tokens", "sum_len_squared", "num_documents")
    )
    at_head = round(float(work["head_tokens"].sum()))
    if not len(work):
        tokens = max(r.tokens for r in ended.values())
        squares = max(r.sum_len_squared for r in ended.values())
    losses = [r.loss for r in ended.values() if r.loss is not None]
    weight = config.policy.load_ema if job.workload.tokens_per_step else 1.0
    current = job.layouts.current
    is_present = current is None or generation == current.generation
    times = (*job.progress.recent_step_s, duration_s)[-KEPT_STEP_TIMES:] if is_present else ()
    job = replace(
        job,
        progress=replace(
            job.progress,
            step=step,
            recent_step_s=times,
            tokens_per_s=tokens / duration_s if duration_s > 0.0 else 0.0,
            loss=losses[0] if losses else job.progress.loss,
        ),
        workload=replace(
            job.workload,
            tokens_per_step=job.workload.tokens_per_step
            + weight * (tokens - job.workload.tokens_per_step),
            squares_per_step=job.workload.squares_per_step
            + weight * (squares - job.workload.squares_per_step),
            documents_per_step=job.workload.documents_per_step
            + weight * (documents - job.workload.documents_per_step),
            head_tokens_per_step=job.workload.head_tokens_per_step
            + weight * (at_head - job.workload.head_tokens_per_step),
            expert_rows_per_step=job.workload.expert_rows_per_step
            + weight * (float(work["expert_rows"].sum()) - job.workload.expert_rows_per_step),
            active_experts_per_step=job.workload.active_experts_per_step
            + weight
            * (float(work["num_active_experts"].sum()) - job.workload.active_experts_per_step),
        ),
    )
    return job, JobStep(
        step=step,
        generation=generation,
        duration_s=duration_s,
        tokens=tokens,
        sum_len_squared=squares,
        ended_s=ended[min(ended)].ended_mono_s,
    )


def _judge_waits(
    state: State,
    job: JobState,
    ended: Mapping[int, StepRecord],
    config: ControllerConfig,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Judge transfers and input waits of a step."""
    commands = list[Command]()
    was_slow = link_verdicts.has_slow_links(job)
    for judge in (links.judge_links, data_loading.judge_inputs):
        state, job, said = judge(state, job, ended, config, unix_s)
        commands += said
    is_slow = link_verdicts.has_slow_links(job)
    if is_slow and not was_slow:
        job = _with_baseline(job)
    elif was_slow and not is_slow and not job.detection.evidence.slow:
        job = on_all_recovered(job)
    return state, job, commands


def _with_baseline(job: JobState) -> JobState:
    """The present layout is the one from before the first of the open findings."""
    if job.layouts.baseline is not None:
        return job
    return replace(job, layouts=replace(job.layouts, baseline=job.layouts.current))


def _split_by_timing(work: FeatureTable) -> tuple[FeatureTable, tuple[int, ...]]:
    """Split the work into that of ranks that measured time in this step, and the other ranks.

    Work takes time: a rank without any measured time is untimed, not infinitely fast.
    """
    ranks, row = np.unique(work["rank"], return_inverse=True)
    is_untimed = np.bincount(row, weights=work["compute_s"], minlength=len(ranks)) <= 0.0
    if not is_untimed.any():
        return work, ()
    untimed = ranks[is_untimed]
    return work.only(~np.isin(work["rank"], untimed)), tuple(untimed.astype(int).tolist())


def _apply_judgement(
    state: State,
    job: JobState,
    judgement: Judgement,
    draft: StepDraft,
    config: ControllerConfig,
    unix_s: float,
) -> tuple[State, JobState, list[Command]]:
    """Apply a judgement: findings open incidents, recoveries close them, changes update them."""
    job, commands = root_cause.repeat_searches(state, job, draft, unix_s)
    for finding in judgement.findings:
        job = _with_baseline(job)
        job, finding = root_cause.explain_finding(state, job, finding, draft, unix_s)
        state, job, said = incidents.open_incident(state, job, finding, unix_s)
        commands += [*said, SaveJob(job=job.name)]
    for rank in judgement.recovered:
        long = incidents.duration_text(job, rank, FindingKind.DEVICE, config.policy.horizon_steps)
        why = f"rank {rank} is back at its expected time {long}".strip()
        job, said = incidents.close(job, {rank}, FindingKind.DEVICE, unix_s, why)
        commands += said
    is_slow = job.detection.evidence.slow or link_verdicts.has_slow_links(job)
    if judgement.recovered and not is_slow:
        job = on_all_recovered(job)
    for rank, slowdown in judgement.changed.items():
        # Below the level of a recovery the fault is ending: keep the former value.
        if slowdown > config.detector.recover_slowdown:
            job, said = incidents.remeasure(job, rank, FindingKind.DEVICE, slowdown)
            commands += said
    state, job, said = job_level.update_common_incident(
        state, job, judgement.common, config, unix_s
    )
    job, told = verification.judge(job)
    return state, job, [*commands, *said, *told]
