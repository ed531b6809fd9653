"""A policy whose checkpoints are made another way; all else it does as before.

What a checkpoint costs is said outright: seconds for which it holds training, and after which it is
whole. A window of sparse checkpoints (`core/checkpoint/sparse_window.py`) is one that begins with
the window and is whole when its last step's part is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from pacekeeper.simulator.jobs.data_parallel import Dispatch, JobModel
from pacekeeper.simulator.policies.base import Answer, Costs, Moment, Policy, Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class _Otherwise:
    """`inner` with a checkpoint every `checkpoint_steps`."""

    name: str
    inner: Policy
    checkpoint_steps: int | None

    @property
    def review_steps(self) -> int | None:
        return self.inner.review_steps

    @property
    def dispatch(self) -> Dispatch:
        return self.inner.dispatch

    @property
    def costs(self) -> Costs:
        return self.inner.costs


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingAs(_Otherwise):
    """Each checkpoint costs `saving`."""

    saving: Saving

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        return replace(self.inner.answer(moment, job), saving=self.saving)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsSaved:
    """What Dynamic-K remembers: how many experts of a layer a checkpoint saves, and which part of
    all tokens was lost since it is so many.
    """

    experts: int
    lost: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicK(_Otherwise):
    """Partial experts, ever more of them (MoC-System, arXiv 2408.04307, 5; research 2.5).

    By the number of each layer's `num_experts` that are saved: `saving_of`, and `lost_of`, the part
    of all tokens that a restart loses. Where one number has lost more than `budget` it doubles.
    The inner policy remembers nothing.
    """

    num_experts: int
    first_experts: int
    saving_of: Callable[[int], Saving]
    lost_of: Callable[[int], float]
    budget: float

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        answer = self.inner.answer(moment, job)
        known = moment.memory
        parts = known if isinstance(known, PartsSaved) else PartsSaved(experts=self.first_experts)
        if answer.is_rolled_back and not moment.is_fresh:
            parts = self.after_restart(parts)
        return replace(answer, saving=self.saving_of(parts.experts), memory=parts)

    def after_restart(self, parts: PartsSaved) -> PartsSaved:
        lost = parts.lost + self.lost_of(parts.experts)
        if lost <= self.budget or parts.experts >= self.num_experts:
            return replace(parts, lost=lost)
        return PartsSaved(experts=min(2 * parts.experts, self.num_experts))
