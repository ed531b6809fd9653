"""The end of a job, its restart from an earlier step, and when it leaves the memory.

A job has ended when none of its ranks runs. Its measurements are dropped at once; the job and its
incidents can be queried for some time. A job without reports is forgotten too: it may have ended
unobserved, and its ranks would report everything again. The store keeps the history. Pure.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.detection.coverage import working_ranks
from pacekeeper.controller.machine import expert_loads
from pacekeeper.controller.mitigation import approvals, notices, rollout
from pacekeeper.controller.state.events import Command, ForgetJob, Log, SaveJob
from pacekeeper.controller.state.job_parts import ENDED, Coverage
from pacekeeper.controller.state.persistent_map import RankMap, node_map
from pacekeeper.controller.state.plan_phase import WithdrawCause
from pacekeeper.controller.state.state import JobState, NodeState, RankStatus, State
from pacekeeper.core.config.controller import RetentionConfig
from pacekeeper.core.incidents.findings import CoverageState, FindingKind
from pacekeeper.core.telemetry.records import StepRecord
from pacekeeper.predictor.assurance.canary import Canaries
from pacekeeper.predictor.detector.cusum import no_charts
from pacekeeper.predictor.detector.state import Evidence

DAY_S = 86_400.0
ENDED_RANKS = 65_536  # of all ended jobs together that stay in memory, some hundred bytes each
KEEP_SILENT_S = 7 * DAY_S  # of a job or a node without reports


def is_over(job: JobState) -> bool:
    """Whether the job's ranks are known and none of them runs."""
    if not job.ranks and not job.remembered:
        return False
    statuses = (rank.status for known in (job.ranks, job.remembered) for rank in known.values())
    return all(status is not RankStatus.ALIVE for status in statuses)


def update_lifecycle(job: JobState, now_s: float, unix_s: float) -> tuple[JobState, list[Command]]:
    """On a tick: release the parts of a job that has ended, and resume one that runs again."""
    if not is_over(job):
        if job.ended_s is None:
            return job, []
        awake = replace(
            job,
            ended_s=None,
            coverage=Coverage(state=CoverageState.BLIND, reason="the job runs again"),
        )
        return awake, []
    if job.coverage.state is CoverageState.ENDED:
        return job, []
    commands: list[Command] = [Log(text=f"job={job.name} watch=ended was={job.coverage.state}")]
    job, said = approvals.withdraw(job, "the job ended")
    commands += said
    if job.plan.offer is not None:
        job = rollout.withdraw_offer(job, WithdrawCause.STOPPED)
    but = (FindingKind.DEATH,)  # these stay open, for operators
    job, said = incidents.close_all(job, unix_s, "the job ended", but=but)
    commands += [*said, *notices.unlogged_deaths(job)]
    job = replace(
        job,
        ended_s=now_s if job.ended_s is None else job.ended_s,
        heard_s=RankMap(),
        layouts=job.layouts.ended(),
        plan=job.plan.ended(),
        detection=job.detection.ended(),
        progress=job.progress.ended(),
        workload=job.workload.without_loads(),
        coverage=ENDED,
        notices=replace(job.notices, has_unsent_deaths=False),
    )
    return job, [*commands, SaveJob(job=job.name)]


def forget_jobs(state: State, now_s: float, config: RetentionConfig) -> tuple[State, list[Command]]:
    """On a tick: forget jobs that ended or stopped reporting long ago, and long-lost nodes.

    The newest `ended_jobs` ended jobs are kept, with at most `ENDED_RANKS` ranks together.
    """
    commands: list[Command] = []
    unix_s = now_s + state.unix_offset_s
    jobs = dict(state.jobs)
    crowded_out = _crowded_out(state, config)
    for name in sorted(state.jobs):
        job = state.jobs[name]
        reason = _reason_to_forget(job, now_s, config) or crowded_out.get(name)
        if reason is None:
            continue
        job, said = approvals.withdraw(job, reason)
        commands += said
        job, said = incidents.close_all(job, unix_s, reason)
        commands += said
        commands += [ForgetJob(job=name), Log(text=f"job={name} forgotten: {reason}")]
        del jobs[name]
    gone = {node.name for node in state.nodes.values() if _is_long_gone(node, now_s)}
    if not commands and not gone:
        return state, []
    nodes = node_map(state.nodes).without(gone) if gone else state.nodes
    return replace(state, jobs=jobs, nodes=nodes), commands


def _crowded_out(state: State, config: RetentionConfig) -> dict[str, str]:
    """Return the ended jobs beyond the limits, with the reason; the newest one is always kept."""
    ended = [job for job in state.jobs.values() if job.ended_s is not None]
    if len(ended) <= 1:
        return {}
    ended.sort(key=lambda job: (job.ended_s, job.name), reverse=True)
    num_ranks, kept = 0, 0
    for job in ended:
        num_ranks += len(job.ranks)
        if kept >= config.ended_jobs or (kept and num_ranks > ENDED_RANKS):
            break
        kept += 1
    return {job.name: f"{kept} jobs ended after it" for job in ended[kept:]}


def _reason_to_forget(job: JobState, now_s: float, config: RetentionConfig) -> str | None:
    """Return why the job is forgotten; None: it is kept."""
    if job.ended_s is not None and now_s - job.ended_s > config.ended_job_days * DAY_S:
        return f"it ended {config.ended_job_days:g} days ago"
    if job.reported_s is not None and now_s - job.reported_s > KEEP_SILENT_S:
        return f"no agent has reported it for {KEEP_SILENT_S / DAY_S:.0f} days"
    return None


def _is_long_gone(node: NodeState, now_s: float) -> bool:
    return not node.is_connected and now_s - node.last_report_s > KEEP_SILENT_S


def rewind_to_step(job: JobState, ends: Iterable[StepRecord]) -> tuple[JobState, list[Command]]:
    """Restart steps at the lowest one, once each running rank has ended a judged step anew."""
    ended_s: dict[int, float] = {}
    again: dict[int, int] = dict(job.progress.again)
    for record in ends:
        rank = record.rank
        if rank not in job.ranks:
            continue
        last_s = ended_s.get(rank) or job.progress.ended_mono_s.get(rank)
        if last_s is None or record.ended_mono_s > last_s:
            ended_s[rank] = record.ended_mono_s
            if record.step > job.progress.step:
                again.pop(rank, None)
            elif last_s is not None:  # the first end that is known may be an old one
                again[rank] = min(record.step, again.get(rank, record.step))
    if not ended_s:
        return job, []
    job = replace(
        job,
        progress=replace(
            job.progress, ended_mono_s=job.progress.ended_mono_s.changed(ended_s), again=again
        ),
    )
    if not again:
        return job, []  # nearly always: not worth a walk over all ranks
    ranks = working_ranks(job)
    if not ranks or job.unattached or not all(rank in again for rank in ranks):
        return job, []
    first = min(again[rank] for rank in ranks)
    text = (
        f"job={job.name} restarted from step {first}: its ranks had ended step {job.progress.step}"
    )
    job = expert_loads.reset_drafts(job)
    detection = job.detection
    job = replace(
        job,
        layouts=replace(job.layouts, first_step=min(job.layouts.first_step, first)),
        plan=replace(job.plan, decided_on=None),
        progress=replace(job.progress, step=first - 1, pending={}, again={}),
        # Cost models stay valid; values with step numbers do not.
        detection=replace(
            detection,
            evidence=_undated(detection.evidence),
            by_role={role: _undated(kept) for role, kept in detection.by_role.items()},
            links=_undated(detection.links),
            inputs=replace(detection.inputs, evidence=_undated(detection.inputs.evidence)),
            canaries=Canaries(turn=detection.canaries.turn),
        ),
    )
    return job, [SaveJob(job=job.name), Log(text=text)]


def _undated(evidence: Evidence) -> Evidence:
    return replace(evidence, charts=no_charts())
