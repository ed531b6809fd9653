"""The cost of saving, the number of restores, and the checkpoint interval that follows from them.

Ranks measure the costs, manifests keep them, and the next run of the job continues with them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pacekeeper.core.checkpoint.sparse_window import best_interval_s
from pacekeeper.core.text import format_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCosts:
    """Measured costs of checkpoints.

    Attributes:
        held_s: time that one checkpoint, all its steps, stopped training.
        step_s: time of one training step.
        running_s: run time of the job, all its runs.
        num_restores: restores from a checkpoint in that time.
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
        """The mean time between restores; before the first one the run time, a lower bound."""
        return self.running_s / max(1, self.num_restores)

    @property
    def best_period_steps(self) -> int | None:
        """Steps between two checkpoints with the least total cost of saving and redoing (Young,
        Daly).

        None if too little is known.
        """
        if not self.held_s or not self.running_s:
            return None
        steps = best_interval_s(self.held_s, self.between_restores_s) / self.step_s
        return max(1, round(steps)) if steps < inf else None

    def text(self) -> str:
        """The costs and the best period in words."""
        best, hours = self.best_period_steps, self.running_s / 3600
        held = f"one holds training for {format_s(self.held_s)} ({self.held_s / self.step_s:.1%}"
        least = "at least " if not self.num_restores else ""
        often = f"gone back to {self.num_restores} times in {hours:.1f} h"
        every = "" if best is None else f": one in {least}{best} steps costs least (Young, Daly)"
        return f"{held} of a step), {often}{every}"


def combine_costs(told: Iterable[SaveCosts | None]) -> SaveCosts | None:
    """The costs of a job from those of its ranks; None if no rank measured any.

    The maximum counts: all ranks wait for the slowest, and late ranks know less.
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
