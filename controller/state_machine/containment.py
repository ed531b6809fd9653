"""A mistake of ours that one job brings out stays that job's. Pure.

Whatever else came with it is taken in: other jobs of the same report, and what was learnt of this
job before. It is blind, and says why, until one of its steps can be judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pacekeeper.controller.state_machine.events import Command, Failed
from pacekeeper.controller.state_machine.state import State
from pacekeeper.core.incidents.findings import Blindness, Watch

Part = Callable[[State], tuple[State, Sequence[Command]]]


def contained(
    state: State, name: str, doing: str, part: Part, *, drops_steps: bool = False
) -> tuple[State, Sequence[Command]]:
    """What `part` makes of the state; the state as it was, and the failure told, where it raises.

    `drops_steps`: the steps of job `name` that wait are what it fails on: they are given up, or
    each later report would fail on them again.
    """
    try:
        return part(state)
    except Exception as error:
        commands: list[Command] = [Failed(what=f"job={name} {doing} failed", error=error)]
        job = state.jobs.get(name)
        if job is None:
            return state, commands
        job = replace(
            job,
            pending={} if drops_steps else job.pending,
            watch=Watch.BLIND,
            watch_reason=f"{doing} fails by a mistake in pacekeeper: {error!r:.500}",
            blind=Blindness.FAILED,
        )
        return replace(state, jobs={**state.jobs, name: job}), commands
