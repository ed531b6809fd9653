"""`PlanConsumer`: what a trainer provides to take plans; `PlanSession`: one rank's part in them.

A session reads what is offered, votes, applies what all ranks voted for and reports it. It never
decides anything by itself: until every rank has checked the same plan, nothing changes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import flat_pipelines
from pacekeeper.core.layout.layout import Layout, ReplicaSet
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.plans.offers import (
    Plan,
    PlanVote,
    agreed_generation,
    read_offered_plan,
)

Gather = Callable[[Sequence[int]], list[tuple[int, ...]]]
"""Returns the numbers of all ranks, in order of rank; blocks until all have called it."""


class PlanConsumer(Protocol):
    """A trainer that can carry out plans; which kinds, it says to `hooks.attach`."""

    def check(self, layout: Layout) -> None:
        """Raise ValueError, with the reason, for a layout that this rank cannot run.

        Whatever may fail belongs here: once all ranks have voted, `apply` must succeed.
        """

    def apply(self, layout: Layout) -> int:
        """Run `layout` from the next step on; return the bytes of state that this rank moved."""


def flat_layout(
    num_ranks: int,
    *,
    generation: int = 1,
    experts: Sequence[tuple[ReplicaSet, ...]] = ((),),
) -> Layout:
    """Return the layout of a data-parallel job whose dense model is not divided: equal batch
    shares; `experts` by layer, if they are known.
    """
    return Layout(
        generation=generation,
        num_attention_shards=1,
        num_mlp_shards=1,
        pipelines=flat_pipelines(range(num_ranks), num_layers=len(experts)),
        experts=tuple(experts),
    )


class PlanSession:
    """One rank's part in agreeing on plans; use it from the training thread.

    Attributes:
        layout: The layout in force.
        agreed: The plan that all ranks have voted for and that is not in force yet.
    """

    def __init__(
        self, hooks: Hooks, consumer: PlanConsumer, layout: Layout, *, step: int = 0
    ) -> None:
        """Report that this rank runs `layout` from `step` on."""
        self._hooks, self._consumer = hooks, consumer
        self._known: Plan | None = None
        self.layout = layout
        self.agreed: Plan | None = None
        hooks.ring.write_layout(layout.generation, encode_layout(layout))
        hooks.report_plan_applied(
            step=step, generation=layout.generation, layout_crc=layout_crc(layout)
        )

    def vote(self) -> PlanVote:
        """Return this rank's vote; a plan that does not fit is refused, with the reason."""
        if self.agreed is not None:
            return PlanVote()
        known = read_offered_plan(self._hooks, self.layout, self._known, self._consumer.check)
        self._known = known
        return PlanVote() if known is None else PlanVote(known.layout.generation, known.crc)

    def count(self, votes: Iterable[PlanVote]) -> bool:
        """Count the votes of all ranks; return whether they agree on a plan, then `agreed`."""
        if self.agreed is not None or self._known is None:
            return False
        wanted = agreed_generation(list(votes), self.layout.generation)
        self.agreed = self._known if wanted == self._known.layout.generation else None
        return self.agreed is not None

    def apply(self, *, step: int) -> None:
        """Apply the agreed plan and report it: `step` is the first step under it."""
        assert self.agreed is not None, "all ranks voted for it"
        plan, began_s = self.agreed, time.monotonic()
        moved_bytes = self._consumer.apply(plan.layout)
        self.layout, self.agreed, self._known = plan.layout, None, None
        self._hooks.report_plan_applied(
            step=step,
            generation=plan.layout.generation,
            layout_crc=plan.crc,
            duration_s=time.monotonic() - began_s,
            moved_bytes=moved_bytes,
        )

    def at_boundary(self, *, step: int, gather: Gather) -> bool:
        """Between two steps, on all ranks together: vote, and apply what all voted for.

        Args:
            step: The step that follows.
            gather: Exchanges the votes, such as `gather.CpuGather`.

        Returns:
            Whether a new layout is in force.
        """
        if not self.count(PlanVote(*numbers) for numbers in gather(self.vote())):
            return False
        self.apply(step=step)
        return True
