"""The wall clock may be set while a controller runs: dates go by it from then on. Pure.

The machine's own clock knows no such moments, nor the time for which a host is suspended.
"""

from dataclasses import replace

from pacekeeper.controller.mitigation import approvals
from pacekeeper.controller.state_machine.events import Command, Say
from pacekeeper.controller.state_machine.state import State

SET_S = 1.0  # less is drift, and not worth dates that jitter


def follow(state: State, unix_offset_s: float | None) -> tuple[State, list[Command]]:
    """On a tick. What waits for a person has the time left that it had."""
    by_s = 0.0 if unix_offset_s is None else unix_offset_s - state.unix_offset_s
    if abs(by_s) < SET_S:
        return state, []
    said: list[Command] = [Say(text=f"the wall clock was set by {by_s:+.0f} s: dates go by it")]
    jobs = dict(state.jobs)
    for name, job in state.jobs.items():
        jobs[name], moved = approvals.move(job, by_s)
        said += moved
    return replace(state, jobs=jobs, unix_offset_s=state.unix_offset_s + by_s), said
