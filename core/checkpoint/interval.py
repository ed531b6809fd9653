"""What saving costs a run, how often it went back, and so how often it should save. Pure.

Measured by the ranks, told in their parts, gathered in the manifest: the next life goes on with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pacekeeper.core.checkpoint.sparse_window import best_interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """held_s: that one checkpoint, all its steps, held training; `step_s` of training; `running_s`
    of the job, all its lives, in which it went back to a checkpoint `num_restores` times.
    """

    held_s: float
    step_s: float
    running_s: float
    num_restores: int

    def __post_init__(self) -> None:
        if not (0.0 < self.step_s < inf and 0.0 <= self.held_s < inf and self.num_restores >= 0):
            raise ValueError(f"no costs of a run: {self}")
        if not 0.0 <= self.running_s < inf:
            raise ValueError(f"a run of {self.running_s} s")

    @property
    def between_restores_s(self) -> float:
        """The mean time; before the first that of the whole run, which it is at least."""
        return self.running_s / max(1, self.num_restores)

    @property
    def best_period_steps(self) -> int | None:
        """Steps between two checkpoints of one step that cost least, saving and doing again taken
        together: Young's and Daly's interval. None where too little is known.
        """
        if not self.held_s or not self.running_s:
            return None
        steps = best_interval_s(self.held_s, self.between_restores_s) / self.step_s
        return max(1, round(steps)) if steps < inf else None

    def text(self) -> str:
        """For people: what it is, and what would be best."""
        best, hours = self.best_period_steps, self.running_s / 3600
        held = f"one holds training for {1e3 * self.held_s:.1f} ms ({self.held_s / self.step_s:.1%}"
        least = "at least " if not self.num_restores else ""
        often = f"gone back to {self.num_restores} times in {hours:.1f} h"
        every = "" if best is None else f": one in {least}{best} steps costs least (Young, Daly)"
        return f"{held} of a step), {often}{every}"


def combine_costs(told: Iterable[SaveCosts | None]) -> SaveCosts | None:
    """Of a job, from what its ranks measured: the most counts, as all wait for the slowest and who
    came late knows less. None where nobody measured.
    """
    known = [costs for costs in told if costs is not None]
    if not known:
        return None
    return SaveCosts(
        held_s=max(costs.held_s for costs in known),
        step_s=max(costs.step_s for costs in known),
        running_s=max(costs.running_s for costs in known),
        num_restores=max(costs.num_restores for costs in known),
    )
