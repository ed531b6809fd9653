"""Which jobs a tick looks at: all of a small fleet, of a large one some in turn. Pure.

To look at a job costs some microseconds for each of its ranks. What must not wait (a death, a step,
a decision) comes with events of its own; a tick looks for what time alone changes.
"""

from dataclasses import replace

from pacekeeper.controller.mitigation import approvals
from pacekeeper.controller.state.events import Command, Say
from pacekeeper.controller.state.state import State

RANKS_PER_S = 8192.0  # at some 10 us each: less than a tenth of a core


def next_jobs(state: State, now_s: float) -> tuple[State, tuple[str, ...]]:
    """The jobs to look at now, and the state in which that is noted."""
    since_s = max(0.0, now_s - state.ticked_s)
    left = min(RANKS_PER_S, state.ranks_left + since_s * RANKS_PER_S)
    names = sorted(state.jobs)
    first = next((i for i, name in enumerate(names) if name > state.looked_at), 0)
    turn = []
    for name in names[first:] + names[:first]:
        if left <= 0.0:
            break  # a job may take more than is left: the next ones wait for it
        turn.append(name)
        left -= len(state.jobs[name].ranks)
    looked_at = turn[-1] if turn else state.looked_at
    return replace(state, ticked_s=now_s, ranks_left=left, looked_at=looked_at), tuple(sorted(turn))


SET_S = 1.0  # less is drift, and not worth dates that jitter


def follow_clock(state: State, unix_offset_s: float | None) -> tuple[State, list[Command]]:
    """On a tick. What waits for a person has the time left that it had."""
    by_s = 0.0 if unix_offset_s is None else unix_offset_s - state.unix_offset_s
    if abs(by_s) < SET_S:
        return state, []
    said: list[Command] = [Say(text=f"the wall clock was set by {by_s:+.0f} s: dates go by it")]
    jobs = dict(state.jobs)
    for name, job in state.jobs.items():
        jobs[name], moved = approvals.shift_dates(job, by_s)
        said += moved
    return replace(state, jobs=jobs, unix_offset_s=state.unix_offset_s + by_s), said
