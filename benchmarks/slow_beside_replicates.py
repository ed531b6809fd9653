"""Was a run slower than the other runs of its system in the steps that a judge called slow?

Counts apart the flagged runs that were: healthy by label, slow by the clock. Imports no detector.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

OWN_SLOWNESS = 1.02  # beside replicates: such a run was slow


class Steps(Protocol):
    """Step numbers, ascending, and what each took."""

    @property
    def step(self) -> npt.NDArray[np.intp]: ...

    @property
    def duration_s(self) -> npt.NDArray[np.float64]: ...


class Recorded(Protocol):
    """A recorded run."""

    @property
    def steps(self) -> Steps | None: ...


class WithReplicates(Protocol):
    """A run beside the other runs of its system."""

    @property
    def trace(self) -> Recorded: ...

    @property
    def replicates(self) -> Sequence[Recorded]: ...


def were_slow(run: WithReplicates, alarms: Sequence[tuple[int, int]]) -> bool:
    """Was the run slow in all of these alarms?

    The median of its steps in an alarm, beside the median of its replicates in the same steps.

    Args:
        run: with its replicates; without any it counts as healthy.
        alarms: [first, end) in rows of the run.
    """
    own, beside = run.trace.steps, [one.steps for one in run.replicates if one.steps is not None]
    if own is None or not beside:
        return False
    for begin, end in alarms:
        step = own.step[begin:end]
        others = [np.interp(step, other.step, other.duration_s) for other in beside]
        if np.median(own.duration_s[begin:end]) <= OWN_SLOWNESS * np.median(others):
            return False
    return True
