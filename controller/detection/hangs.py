"""Detection of hangs: which rank stands still while others wait for it. Pure.

Agents report ranks that stand still in their phase (`core/telemetry/sign_of_life.py`). A rank that
waits in a collective is a victim; one that stands still elsewhere for twice its usual time, and at
least LIMIT_S, while others wait, is named. Incidents are closed when a rank moves again or the job
completes a step. Fencing is the trainer's, by its own limit. Called by `machine/reports.py` when a
report comes, and by `machine.py` on ticks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from pacekeeper.controller.detection import incidents
from pacekeeper.controller.state.events import Command, Log, RequestStacks, SaveStack
from pacekeeper.controller.state.job_parts import AskedStack, StandingRank
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.core.telemetry.sign_of_life import (
    RUNNABLE,
    STOPPED,
    UNINTERRUPTIBLE,
    Phase,
    RankPhase,
    RankStack,
)
from pacekeeper.core.text import format_s

LIMIT_S = 1.75  # in one phase while others wait, at least: named within 2 s, a tick later
USUAL_FACTOR = 1.8  # of the usual time in the phase: named within twice of it
ALL_S = 10.0  # all ranks wait, or all load: no rank waits for another's work
ALL_COMPUTE_S = 60.0  # all stand still in a step: waits that the host does not see, as on CUDA
IDLE_RATIO = 0.05  # of a core: the process sleeps
STACKS = 4  # ranks of one incident whose stacks are asked for
ASK_AGAIN_S = 5.0
MOST_ASKED = 3
_IN_STEP = (Phase.COMPUTING, Phase.STEPPING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks that stand still. `rank`: the one that is named; None: the job as a whole."""

    rank: int | None
    ranks: tuple[int, ...]
    tier: Tier
    reason: str
    cause: str


def find_hangs(
    standing: Mapping[int, StandingRank], living: Sequence[int], now_s: float
) -> tuple[Hang, ...]:
    """Return the hangs of a job.

    Args:
        standing: Ranks that stand still, of nodes whose agent is connected.
        living: All ranks that should run, ascending.
        now_s: The machine's clock.
    """
    known = {rank: standing[rank] for rank in living if rank in standing}
    if not known:
        return ()
    due = [rank for rank, one in known.items() if one.is_stopped or not one.is_waiting]
    due = [rank for rank in due if _is_due(known[rank], now_s)]
    waiting = [rank for rank, one in known.items() if one.is_waiting and not one.is_stopped]
    if stopped := [rank for rank in due if known[rank].is_stopped]:
        # A job that is stopped as a whole is paused. Its ranks are reported one after the other:
        # who waits for a stopped rank was seen to wait after that one had stopped.
        since_s = max(known[rank].stopped_s or 0.0 for rank in stopped)
        victims = [rank for rank in waiting if known[rank].reported_s >= since_s]
        return tuple(_of_rank(rank, known[rank], victims, now_s) for rank in stopped if victims)
    if due and waiting:
        are_loading = all(known[rank].phase is Phase.LOADING for rank in due)
        if len(due) == 1 or (not are_loading and 2 * len(due) <= len(living)):
            return tuple(_of_rank(rank, known[rank], waiting, now_s) for rank in due)
        return (_of_job(due, known, waiting, now_s),)
    if len(known) == len(living):
        phases = {one.phase for one in known.values()}
        floor_s = inf
        if phases in ({Phase.WAITING}, {Phase.LOADING}):
            floor_s = ALL_S
        elif phases <= set(_IN_STEP):
            floor_s = ALL_COMPUTE_S
        if all(_is_due(one, now_s, floor_s) for one in known.values()):
            return (_of_job(list(known), known, [], now_s),)
    return ()


def _is_due(one: StandingRank, now_s: float, floor_s: float = LIMIT_S) -> bool:
    held_s = now_s - one.since_s
    if one.is_stopped:
        return held_s >= floor_s
    return one.usual_s is not None and held_s >= max(floor_s, USUAL_FACTOR * one.usual_s)


def _of_rank(rank: int, one: StandingRank, waiting: Sequence[int], now_s: float) -> Hang:
    others = f" while ranks {format_ranks(waiting)} wait" if waiting else ""
    usual = "" if one.usual_s is None else f" (usually at most {format_s(max(one.usual_s, 0.1))})"
    tier, cause = explain_process(one)
    return Hang(
        rank=rank,
        ranks=(rank,),
        tier=tier,
        reason=f"rank {rank} stands still in phase {one.phase} for {format_s(now_s - one.since_s)}"
        f"{usual}{others}",
        cause=cause,
    )


def _of_job(
    ranks: Sequence[int], known: Mapping[int, StandingRank], waiting: Sequence[int], now_s: float
) -> Hang:
    held_s = min(now_s - known[rank].since_s for rank in ranks)
    phases = {known[rank].phase for rank in ranks}
    if phases == {Phase.LOADING}:
        what, cause = "wait for their input", "the storage or service that all read from is stuck"
    elif phases == {Phase.WAITING}:
        what = "wait in collectives, and no rank computes"
        cause = "ranks call different collectives, or the network lost a message"
    else:
        what = f"stand still in phase {' or '.join(sorted(phases))}"
        cause = "the host does not see which of them wait for others"
    deep = [rank for rank in ranks if known[rank].process_state == UNINTERRUPTIBLE]
    if deep:
        where = ", ".join(sorted({known[rank].kernel_wait for rank in deep} - {""}))
        cause += f"; processes of ranks {format_ranks(deep)} are in uninterruptible sleep"
        cause += f" ({where})" if where else ""
    others = f" while ranks {format_ranks(waiting)} wait for them" if waiting else ""
    return Hang(
        rank=None,
        ranks=tuple(ranks),
        tier=Tier.PROBABLE if deep else Tier.SUSPECTED,
        reason=f"ranks {format_ranks(ranks)} {what} for {format_s(held_s)} and more{others}",
        cause=cause,
    )


def explain_process(one: StandingRank) -> tuple[Tier, str]:
    """Return the tier of a standstill and the cause that the state of the process shows."""
    where = f" in {one.kernel_wait}" if one.kernel_wait else ""
    if one.is_stopped:
        return Tier.CONFIRMED, "its process is stopped (state T): by a signal or a debugger"
    if one.process_state == UNINTERRUPTIBLE:
        return Tier.PROBABLE, f"its process is in uninterruptible sleep{where}: storage or a driver"
    if not one.process_state:
        return Tier.SUSPECTED, "the agent cannot see its process"
    if one.cpu_ratio is not None and one.cpu_ratio < IDLE_RATIO:
        if one.process_state == RUNNABLE:
            return Tier.PROBABLE, "its process waits for a CPU core: it is runnable and gets none"
        return Tier.PROBABLE, f"its process sleeps{where} and uses no CPU: a lock, or a read"
    used = "" if one.cpu_ratio is None else f" {one.cpu_ratio:.0%} of a core"
    return Tier.SUSPECTED, f"its process runs{used}: long work, a compilation or a loop"


def record_phases(
    state: State,
    job: JobState,
    phases: Iterable[RankPhase],
    stacks: Iterable[RankStack],
    now_s: float,
) -> tuple[JobState, list[Command]]:
    """Record the standstills and requested stacks of a report."""
    commands: list[Command] = []
    hangs = job.detection.hangs
    standing, moved = dict(hangs.standing), set[int]()
    for phase in phases:
        if phase.rank not in job.ranks:
            continue
        if phase.is_standing:
            before, is_stopped = standing.get(phase.rank), phase.process_state in STOPPED
            stopped_s = None if before is None else before.stopped_s
            standing[phase.rank] = StandingRank(
                phase=phase.phase,
                since_s=now_s - phase.held_s,
                reported_s=now_s,
                stopped_s=(now_s if stopped_s is None else stopped_s) if is_stopped else None,
                usual_s=phase.usual_s,
                process_state=phase.process_state,
                kernel_wait=phase.kernel_wait,
                cpu_ratio=phase.cpu_ratio,
            )
        else:
            standing.pop(phase.rank, None)
            moved.add(phase.rank)
    asked = {rank: one for rank, one in hangs.asked.items() if rank not in moved}
    for stack in stacks:
        for incident in incidents.open_hangs(job):
            if stack.rank not in hangs.asked or incident.finding.rank not in (None, stack.rank):
                continue
            commands.append(SaveStack(incident_id=incident.incident_id, stack=stack))
            words = f"stack dump of rank {stack.rank} by {stack.source}"
            if not stack.source:
                words = f"no stack dump of rank {stack.rank}: {stack.text}"
            job, said = incidents.add_action(job, incident.incident_id, words)
            commands += said
        if stack.rank in asked:
            asked[stack.rank] = replace(asked[stack.rank], is_answered=True)
    job = replace(
        job,
        detection=replace(job.detection, hangs=replace(hangs, standing=standing, asked=asked)),
    )
    for rank in sorted(moved):
        why = f"rank {rank} moves again"
        job, said = incidents.close(
            job, {rank, None}, FindingKind.HANG, now_s + state.unix_offset_s, why
        )
        commands += said
    return job, commands


def judge_hangs(state: State, job: JobState, now_s: float) -> tuple[State, JobState, list[Command]]:
    """Open, close and complete the incidents of hangs; cheap where no rank stands still."""
    if not job.detection.hangs.standing and not incidents.open_hangs(job):
        return state, job, []
    unix_s = now_s + state.unix_offset_s
    commands: list[Command] = []
    for incident in incidents.open_hangs(job):
        if job.progress.step >= incident.finding.step:
            why = "the job completed the step"
            job, said = incidents.close(job, {incident.finding.rank}, FindingKind.HANG, unix_s, why)
            commands += said
    standing = {
        rank: one
        for rank, one in job.detection.hangs.standing.items()
        if rank in job.ranks
        and (node := state.nodes.get(job.ranks[rank].node)) is not None
        and node.is_connected
    }
    opened = {incident.finding.rank for incident in incidents.open_hangs(job)}
    for hang in find_hangs(standing, job.living, now_s):
        if hang.rank in opened or None in opened or (hang.rank is None and opened):
            continue
        finding = Finding(
            kind=FindingKind.HANG,
            tier=hang.tier,
            rank=hang.rank,
            slowdown=inf,
            onset_step=job.progress.step + 1,
            step=job.progress.step + 1,
            reason=hang.reason,
            cause=hang.cause,
        )
        state, job, said = incidents.open_incident(state, job, finding, unix_s)
        commands += said
        asked = dict.fromkeys(hang.ranks[:STACKS], AskedStack())
        job = _with_asked(job, {**asked, **job.detection.hangs.asked})
    job, asks = _ask_for_stacks(job, now_s)
    return state, job, [*commands, *asks]


def _ask_for_stacks(job: JobState, now_s: float) -> tuple[JobState, list[Command]]:
    """Ask for the stacks of open hangs that have not come, a few times."""
    asked = dict(job.detection.hangs.asked)
    if not incidents.open_hangs(job):
        return (_with_asked(job, {}) if asked else job), []
    due = [
        rank
        for rank, one in asked.items()
        if not one.is_answered
        and one.times < MOST_ASKED
        and now_s - one.asked_s >= ASK_AGAIN_S
        and rank in job.ranks
    ]
    if not due:
        return job, []
    for rank in due:
        asked[rank] = replace(asked[rank], times=asked[rank].times + 1, asked_s=now_s)
    nodes = tuple(sorted({job.ranks[rank].node for rank in due}))
    request = RequestStacks(job=job.name, nodes=nodes, ranks=tuple(due), run_id=job.run_id)
    text = f"job={job.name} asks for stacks of ranks {format_ranks(due)}"
    return _with_asked(job, asked), [request, Log(text=text)]


def _with_asked(job: JobState, asked: Mapping[int, AskedStack]) -> JobState:
    hangs = replace(job.detection.hangs, asked=asked)
    return replace(job, detection=replace(job.detection, hangs=hangs))
