"""Applies a node's report to a job: attachments, layouts, exits, observed generations.

Called by `machine.py`. Reports may arrive in any order and repeatedly: what ranks report is kept
until the layout it belongs to is known. Steps and findings are handled by `steps.py`. Pure.
"""

import zlib
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from pacekeeper.controller.detection import hangs, incidents
from pacekeeper.controller.machine import (
    checkpoints,
    expert_loads,
    job_lifecycle,
    rank_failures,
    steps,
)
from pacekeeper.controller.machine.report_parsing import RecordsByKind, records_by_kind
from pacekeeper.controller.mitigation import (
    approvals,
    backoff,
    migration_costs,
    probes,
    rollout,
    verification,
)
from pacekeeper.controller.mitigation.rollout import is_same_work, leaves_ranks_out
from pacekeeper.controller.policy import failure_rates
from pacekeeper.controller.state.events import (
    Command,
    ForgetLayouts,
    Log,
    SaveJob,
    SaveLayout,
)
from pacekeeper.controller.state.job_parts import PlanState
from pacekeeper.controller.state.plan_phase import (
    Applying,
    InForce,
    Offered,
    PlanEvent,
    WithdrawCause,
    Withdrawn,
    transition,
)
from pacekeeper.controller.state.state import JobState, RankState, RankStatus, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.layout.codec import decode_layout, layout_crc
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import EXIT_UNKNOWN, RankExitRecord


def ingest_report(
    state: State, node: str, report: JobReport, now_s: float
) -> tuple[State, list[Command]]:
    """Apply one job's part of a report, except its steps, which wait for `judge`.

    Returns:
        The new state, and the commands that store and announce what changed.
    """
    job = state.jobs.get(report.job) or JobState(name=report.job, run_id=report.run_id)
    if 0 < report.run_id < job.run_id:
        return state, []  # the report is of an earlier run
    job = replace(job, reported_s=now_s)
    unix_s = now_s + state.unix_offset_s
    job, commands = _update_run(job, report.run_id, unix_s)
    job, said = _take_attachments(job, node, report.attached, now_s, unix_s)
    commands += said
    job, said = _take_layouts(job, report.layouts)
    commands += said
    told = records_by_kind(report)
    job = _take_signs_of_life(job, told, now_s)
    job = migration_costs.record_moves(_take_applied(job, told), told.applied)
    for refused in told.refused:
        job, said = backoff.reject_plan(job, refused, now_s)
        commands += said
    state, job, said = _take_exits(state, job, told.exits, now_s)
    commands += said
    state, job, said = _observe_layout(state, job, now_s)
    commands += said
    job, said = probes.record_answers(job, told.probes, told.pairs, unix_s)
    commands += said
    job, said = _take_saves(job, told)
    commands += said
    if report.phases or report.stacks:
        job, said = hangs.record_phases(state, job, report.phases, report.stacks, now_s)
        commands += said
    job, said = job_lifecycle.rewind_to_step(job, told.ends)
    commands += said
    job = expert_loads.add_counts(steps.add_pending(job, told.work, told.ends), told.loads)
    return replace(state, jobs={**state.jobs, job.name: job}), commands


def judge(
    state: State, name: str, config: ControllerConfig, now_s: float
) -> tuple[State, list[Command]]:
    """Judge the steps of a job that are complete by now."""
    job = expert_loads.fold_complete(state.jobs[name], config.policy.load_ema)
    state, job, commands = steps.judge_complete(state, job, config, now_s)
    return replace(state, jobs={**state.jobs, name: job}), commands


def _update_run(job: JobState, run_id: int, unix_s: float) -> tuple[JobState, list[Command]]:
    """Reset the job where the report is of a later run; earlier reports do not apply to it."""
    if run_id <= job.run_id:
        return job, []
    is_known = bool(job.ranks or job.remembered or job.layouts.current is not None)
    job, commands = _reset_for_new_run(job, unix_s) if is_known else (job, [])
    return replace(job, run_id=run_id), commands


def _take_attachments(
    job: JobState, node: str, attached: Collection[Attachment], now_s: float, unix_s: float
) -> tuple[JobState, list[Command]]:
    """Add ranks. Another process under a known rank is a new run of the whole job.

    Where runs have numbers, the numbers decide.
    """
    commands: list[Command] = []
    if not attached:
        return job, commands
    # Put into the job once for all: a copy of thousands of ranks for each of them took seconds.
    ranks, remembered = dict(job.ranks), dict(job.remembered)
    world_size, is_news = job.world_size, False
    for attachment in attached:
        number = attachment.rank
        known, stored = ranks.get(number), remembered.get(number)
        if known is not None and _is_same_run(known.attachment, attachment):
            if known.node != node:  # its agent goes by another name now
                ranks[number], is_news = replace(known, node=node), True
            continue
        is_same = (
            stored is None or (0 < job.run_id == attachment.run_id) or stored.pid == attachment.pid
        )
        is_new_run = known is not None or not is_same
        if is_new_run and (job.progress.step >= 0 or stored is not None):
            job, said = _reset_for_new_run(job, unix_s)
            commands += said
            ranks, remembered, world_size, stored = {}, {}, 0, None
        fresh = RankState(attachment=attachment, node=node, attached_s=now_s)
        if stored is not None:
            # The controller restarted, the rank did not.
            fresh = replace(fresh, status=stored.status)
        ranks[number] = fresh
        remembered.pop(number, None)
        world_size = max(world_size, attachment.world_size)
        is_news = True
    if not is_news:
        return job, commands
    job = replace(job, ranks=ranks, remembered=remembered, world_size=world_size)
    return job, [*commands, SaveJob(job=job.name, may_wait=not commands)]


def _is_same_run(known: Attachment, attachment: Attachment) -> bool:
    if known.run_id and attachment.run_id:
        return known.run_id == attachment.run_id
    return known.pid == attachment.pid


def _reset_for_new_run(job: JobState, unix_s: float) -> tuple[JobState, list[Command]]:
    """Discard all state of the previous run except closed incidents and proposals."""
    commands: list[Command] = [Log(text=f"job={job.name} was started anew")]
    job, said = approvals.withdraw(job, "the job was started anew")
    commands += said
    job, said = incidents.close_all(job, unix_s, "the job was started anew")
    commands += said
    commands.append(ForgetLayouts(job=job.name))  # their numbers are given anew
    fresh = JobState(
        name=job.name,
        incidents=job.incidents,
        reported_s=job.reported_s,
        plan=PlanState(closed_proposals=job.plan.closed_proposals),
    )
    return fresh, commands


def _take_layouts(
    job: JobState, layouts: Iterable[tuple[int, bytes]]
) -> tuple[JobState, list[Command]]:
    """Layouts that the trainer wrote: the first one, and what survivors agreed on."""
    commands: list[Command] = []
    for generation, data in layouts:
        try:
            layout = decode_layout(data)
        except ValueError as error:
            commands.append(Log(text=f"job={job.name} layout={generation} unreadable: {error}"))
            continue
        offered = dict(job.layouts.offer_reasons)
        if job.layouts.known.get(generation) != layout:
            offered.pop(generation, None)  # theirs, though it has the number of one of ours
        job = replace(
            job,
            layouts=replace(
                job.layouts,
                known={**job.layouts.known, generation: layout},
                checksums={**job.layouts.checksums, generation: zlib.crc32(data)},
                offer_reasons=offered,
                newest_generation=max(job.layouts.newest_generation, generation),
            ),
        )
    return job, commands


def _take_signs_of_life(job: JobState, told: RecordsByKind, now_s: float) -> JobState:
    heard_s = dict.fromkeys(told.ranks & job.ranks.keys(), now_s)
    return replace(job, heard_s=job.heard_s.changed(heard_s)) if heard_s else job


def _take_applied(job: JobState, told: RecordsByKind) -> JobState:
    """Update the generation that each rank runs; of equal ones a report with checksum is preferred.

    Work done under a generation counts like a PlanAppliedRecord, which may be lost or older than
    the controller's start.
    """
    fresh: dict[int, RankState] = {}
    newest = job.layouts.newest_generation
    applied = ((record.rank, record.generation, record.layout_crc) for record in told.applied)
    for rank, generation, crc in chain(((*run, None) for run in told.runs), applied):
        known = fresh.get(rank) or job.ranks.get(rank)
        if known is None:
            continue
        is_news = generation > known.observed_generation
        is_proof = generation == known.observed_generation and known.observed_crc is None
        if is_news or (is_proof and crc is not None):
            newest = max(newest, generation)
            fresh[rank] = replace(known, observed_generation=generation, observed_crc=crc)
    if not fresh:
        return job
    job = replace(
        job, ranks={**job.ranks, **fresh}, layouts=replace(job.layouts, newest_generation=newest)
    )
    match job.plan.pending:
        case Offered(plan=plan) as offer if any(
            known.observed_generation >= plan.generation for known in fresh.values()
        ):
            applying = transition(offer, PlanEvent.RANKS_APPLIED, Applying(offer=offer))
            return replace(job, plan=replace(job.plan, pending=applying))
        case _:
            return job


def _take_saves(job: JobState, told: RecordsByKind) -> tuple[JobState, list[Command]]:
    """Update the progress of checkpoints and of in-memory snapshots."""
    if not told.checkpoints and not told.snapshots:
        return job, []
    stored, of_storage = checkpoints.record_saves(job.progress.saves, told.checkpoints)
    copied, of_memory = checkpoints.record_saves(job.progress.snapshots, told.snapshots)
    words = (("checkpoints", of_storage), ("snapshots", of_memory))
    said: list[Command] = [
        Log(text=f"job={job.name} {level}={what}") for level, what in words if what
    ]
    return replace(job, progress=replace(job.progress, saves=stored, snapshots=copied)), said


def _take_exits(
    state: State, job: JobState, exits: Iterable[RankExitRecord], now_s: float
) -> tuple[State, JobState, list[Command]]:
    """Processes that ended, all at once: to take up thousands of ranks for each of them costs."""
    finished: dict[int, RankState] = {}
    dead: dict[int, str] = {}
    for record in exits:
        known = job.ranks.get(record.rank)
        if (
            known is None
            or known.status is not RankStatus.ALIVE
            or known.attachment.pid != record.pid
        ):
            continue
        if record.signal or record.exit_code:
            dead.setdefault(record.rank, f"its process ended {_end(record)}")
        else:
            finished[record.rank] = replace(known, status=RankStatus.FINISHED)
    commands: list[Command] = []
    if finished:
        job = replace(job, ranks={**job.ranks, **finished})
        commands.append(SaveJob(job=job.name))
    if not dead:
        return state, job, commands
    state, job, said = rank_failures.mark_ranks_dead(state, job, dead, now_s)
    return state, job, [*commands, *said]


def _end(record: RankExitRecord) -> str:
    if record.signal:
        return f"by signal {record.signal}"
    if record.exit_code == EXIT_UNKNOWN:
        return "after its launcher was killed"
    meanings = {int(code): code.name.lower().replace("_", " ") for code in ExitCode}
    meaning = meanings.get(record.exit_code)
    return f"by exit code {record.exit_code}" + (f" ({meaning})" if meaning else "")


def _observe_layout(
    state: State, job: JobState, now_s: float
) -> tuple[State, JobState, list[Command]]:
    """Make the newest known layout that all its ranks run the observed one."""
    present = 0 if job.layouts.current is None else job.layouts.current.generation
    for generation in sorted(job.layouts.known, reverse=True):
        if generation <= present:
            break
        layout = job.layouts.known[generation]
        at = _first_behind(job, layout)
        if at is not None:
            job = replace(job, layouts=replace(job.layouts, first_behind=at))
        elif _is_meant(job, layout):
            return _enter_layout(state, job, layout, now_s)
    return state, job, []


def _first_behind(job: JobState, layout: Layout) -> int | None:
    """The position of a rank of the layout that does not run it (or a later one) yet."""

    def is_there(rank: int) -> bool:
        known = job.ranks.get(rank)
        return known is not None and known.observed_generation >= layout.generation

    return steps.first_without(layout.ranks, job.layouts.first_behind, is_there)


def _is_meant(job: JobState, layout: Layout) -> bool:
    """Is it this layout that they run, and not another one of the same number?"""
    crc = job.layouts.checksums.get(layout.generation) or layout_crc(layout)
    return all(
        known.observed_generation > layout.generation or known.observed_crc in (None, crc)
        for known in (job.ranks[rank] for rank in layout.ranks)
    )


def _with_plan_in_force(job: JobState, in_force: InForce | None, layout: Layout) -> JobState:
    """End the plan in force and an offer that `layout` overtakes; `in_force` takes their place."""
    plan = job.plan
    if plan.current is not None:
        replaced = Withdrawn(cause=WithdrawCause.REPLACED)
        replaced = transition(plan.current, PlanEvent.WITHDRAWN, replaced)
        plan = replace(plan, last_outcome=replaced)
    plan = replace(plan, current=in_force, pending=plan.pending if in_force is None else None)
    job = replace(job, plan=plan)
    if plan.desired is not None and plan.desired.generation <= layout.generation:
        job = rollout.withdraw_offer(job, WithdrawCause.REPLACED)
    return job


def _enter_layout(
    state: State, job: JobState, layout: Layout, now_s: float
) -> tuple[State, JobState, list[Command]]:
    commands: list[Command] = []
    before = job.layouts.current
    is_ours = layout.generation in job.layouts.offer_reasons
    if is_ours:
        reason = job.layouts.offer_reasons[layout.generation]
    elif before is None:
        reason = "the layout the job runs"
    elif came := sorted(set(layout.ranks).difference(before.ranks)):
        reason = f"ranks {format_ranks(came)} joined; {format_ranks(layout.ranks)} go on"
    else:
        reason = f"the survivors {format_ranks(layout.ranks)} went on by themselves"
    old = before.ranks if before is not None else ()
    lost = [
        rank
        for rank in sorted(set(old).difference(layout.ranks))
        if (known := job.ranks.get(rank) or job.remembered.get(rank)) is not None
        and known.status is RankStatus.ALIVE
    ]
    if lost:
        dead = dict.fromkeys(lost, "the others went on without it")
        state, job, said = rank_failures.mark_ranks_dead(state, job, dead, now_s)
        commands += said
    action = f"generation {layout.generation}: {reason}"
    if is_ours:
        job, said = incidents.note_action(job, action)
    else:
        left = set(job.dead) - set(layout.ranks)
        unix_s = now_s + state.unix_offset_s
        job, said = rank_failures.continue_without_ranks(job, left, unix_s, action)
    commands += said
    in_force = verification.in_force(job, layout)
    job = backoff.clear_refusals(job, layout)
    job = _with_plan_in_force(job, in_force, layout)
    # Back there while a rank is still slow: the next plan will want a way back again.
    is_baseline = (
        job.layouts.baseline is not None
        and not job.detection.evidence.slow
        and is_same_work(job.layouts.baseline, layout)
    )
    kept = {g: known for g, known in job.layouts.known.items() if g >= layout.generation}
    job = replace(
        job,
        losses=job.losses if is_ours else failure_rates.add_loss(job.losses, old, layout.ranks),
        layouts=replace(
            job.layouts,
            current=layout,
            reason=reason,
            is_provisional=not is_ours and before is not None,
            baseline=None
            if is_baseline or leaves_ranks_out(job.layouts.baseline, layout)
            else job.layouts.baseline,
            known=kept,
            checksums={g: crc for g, crc in job.layouts.checksums.items() if g in kept},
            offer_reasons={g: why for g, why in job.layouts.offer_reasons.items() if g in kept},
            first_step=job.progress.step,
        ),
        progress=replace(job.progress, recent_step_s=()),
    )
    commands += [
        SaveLayout(job=job.name, layout=layout, reason=reason),
        SaveJob(job=job.name),
        Log(text=f"job={job.name} generation={layout.generation} in force: {reason}"),
    ]
    return state, job, commands
