"""Which jobs a tick looks at: all of a small fleet, of a large one some in turn. Pure.

To look at a job costs some microseconds for each of its ranks. What must not wait (a death, a step,
a decision) comes with events of its own; a tick looks for what time alone changes.
"""

from dataclasses import replace

from pacekeeper.controller.state_machine.state import State

RANKS_PER_S = 8192.0  # at some 10 us each: less than a tenth of a core


def next_turn(state: State, now_s: float) -> tuple[State, tuple[str, ...]]:
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
