"""Selection of the jobs that a tick updates, and corrections of the wall clock. Pure.

A tick updates all jobs of a small fleet, and a part of a large one in turn, since an update costs
some microseconds per rank. Failures, steps and decisions come as events of their own and do not
wait for a tick. Called by `machine.py`.
"""

from dataclasses import replace

from pacekeeper.controller.mitigation import approvals
from pacekeeper.controller.state.events import Command, Log
from pacekeeper.controller.state.state import State

RANKS_PER_S = 8192.0  # at some 10 us each: less than a tenth of a core


def next_jobs(state: State, now_s: float) -> tuple[State, tuple[str, ...]]:
    """Return the jobs to update now, and the state that records their turn."""
    since_s = max(0.0, now_s - state.ticked_s)
    left = min(RANKS_PER_S, state.ranks_left + since_s * RANKS_PER_S)
    names = sorted(state.jobs)
    first = next((i for i, name in enumerate(names) if name > state.looked_at), 0)
    turn = []
    for name in names[first:] + names[:first]:
        if left <= 0.0:
            break  # a job may exceed the budget: the next ones wait
        turn.append(name)
        left -= len(state.jobs[name].ranks)
    looked_at = turn[-1] if turn else state.looked_at
    return replace(state, ticked_s=now_s, ranks_left=left, looked_at=looked_at), tuple(sorted(turn))


SET_S = 1.0  # a smaller difference is drift and leaves dates as they are


def apply_clock_change(state: State, unix_offset_s: float | None) -> tuple[State, list[Command]]:
    """On a tick: follow a wall clock that was set; open proposals keep their remaining time."""
    by_s = 0.0 if unix_offset_s is None else unix_offset_s - state.unix_offset_s
    if abs(by_s) < SET_S:
        return state, []
    text = f"the wall clock was set by {by_s:+.0f} s; dates of open proposals are moved with it"
    said: list[Command] = [Log(text=text)]
    jobs = dict(state.jobs)
    for name, job in state.jobs.items():
        jobs[name], moved = approvals.shift_dates(job, by_s)
        said += moved
    return replace(state, jobs=jobs, unix_offset_s=state.unix_offset_s + by_s), said
