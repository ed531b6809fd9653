"""Candidate layouts by mitigation level, each level on top of the previous one. Pure.

Used by `decide.py`. Expensive parts are computed once, on first use.
"""

from collections.abc import Set
from dataclasses import replace
from functools import cached_property

from pacekeeper.controller.planning.partition.incremental import with_other_rows
from pacekeeper.controller.planning.partition.layout_codec import with_rows
from pacekeeper.controller.planning.token_split.linear_program import Split, batch_rows
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.failure_rates import failure_probability
from pacekeeper.controller.policy.partition_inputs import as_partition
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.policy.repartition_candidates import (
    Candidate,
    Experts,
    difference,
    repartitions,
)
from pacekeeper.controller.policy.replica_candidates import (
    ReplicaPlan,
    ReplicaRequest,
    plan_replicas,
)
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import STATE_MOVING_LEVELS, MitigationLevel
from pacekeeper.core.layout.layout import Layout, with_batch_shares
from pacekeeper.core.telemetry.attachment import Capability
from pacekeeper.predictor.cost.forecast import replica_s, row_s

SHARES_OF_ROWS = frozenset({Capability.BATCH_SHARES, Capability.MICROBATCH_COUNTS})


class CandidateSearch:
    """The candidate layouts of one decision."""

    def __init__(
        self, view: PlanningSnapshot, config: PolicyConfig, pricing: Pricing, floor: SpreadFloor
    ) -> None:
        self._view, self._config, self._pricing, self._floor = view, config, pricing, floor

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The best token shares over the present replica ranks."""
        view, speeds = self._view, self._pricing.expert_speeds
        # A trainer that splits each step by itself already has the best ones, if its layout holds
        # the present speeds.
        if speeds == view.layout.speed_by_rank:
            own = self._pricing.present_splits
            if own is not None:
                return own
        return tuple(split_layers(view.layout, loads=view.workload.loads, speeds=speeds))

    @cached_property
    def replicas(self) -> ReplicaPlan | None:
        """The better placement of expert replicas; None: the present one is best, or stays."""
        if Capability.EXPERT_REPLICAS not in self._view.capabilities:
            return None
        view, config, costs = self._view, self._config, self._pricing.costs
        limit = config.max_moved_bytes
        return plan_replicas(
            view.layout,
            self.splits,
            view.workload.loads,
            self._pricing.expert_speeds,
            ReplicaRequest(
                slots_per_rank=view.shape.slots_per_rank,
                min_hosts=config.min_hosts,
                spread=self._floor,
                row_s=_row_s(view),
                replica_s=0.0 if view.work else replica_s(view.model, view.workload, view.layout),
                num_steps=config.horizon_steps,
                move_s=view.shape.expert_bytes * costs.total_s_per_byte,
                restart_s=config.restart_s,
                failure_probability=failure_probability(
                    config.failure_probability, view.history.losses
                ),
                rack_failure_probability=config.rack_failure_probability,
                max_copies=limit // max(1, view.shape.expert_bytes) if limit else None,
                doubted=view.doubted,
            ),
        )

    @property
    def slow_speeds(self) -> tuple[tuple[int, float], ...]:
        """The speeds of the slow ranks, as a layout holds them."""
        speeds = self._pricing.expert_speeds
        return tuple((rank, speed) for rank, speed in sorted(speeds.items()) if speed < 1.0)

    def candidates(self) -> list[Candidate]:
        """Return the candidates that the trainer can carry out, the cheapest level first."""
        view, problem, can = self._view, self._pricing.problem, self._view.capabilities
        shared, batch, found = view.layout.experts, view.layout, list[Candidate]()
        if Capability.TOKEN_SHARES in can:
            shared = tuple(split.replicas for split in self.splits)
            layout = self.made(shared, batch)
            found.append(Candidate(level=MitigationLevel.TOKEN_SHARES, layout=layout))
        if can & SHARES_OF_ROWS:
            batch = self._with_batch_shares(view.layout)
            layout = self.made(shared, batch)
            words = difference(layout, view.layout)
            found.append(
                Candidate(
                    level=MitigationLevel.BATCH_SHARES,
                    layout=layout,
                    proof=f"; {words}" if words else "",
                )
            )
        # Shares cost nothing. State is not moved because of a rank whose probe was normal or is
        # still pending.
        if view.is_probing:
            return found
        if refuted := view.refuted & view.slow.keys():
            return found + self._moves_without(refuted)
        replicas: list[Experts] = [shared]
        if plan := self.replicas:
            replicas.append(plan.experts)
            found.append(
                Candidate(
                    level=MitigationLevel.MOVE_REPLICAS,
                    layout=self.made(plan.experts, batch),
                    proof=f"; {plan.proof}",
                )
            )
        if problem is not None and Capability.PARTITION in can:
            found += repartitions(
                view, problem, self._config, replicas, self.slow_speeds, self._floor
            )
        return found

    def _moves_without(self, refuted: Set[int]) -> list[Candidate]:
        """Return the candidates that move state, made as if these slow ranks were as fast as usual,
        for the other slow ranks and links; none if there are no others.
        """
        slow = {rank: ratio for rank, ratio in self._view.slow.items() if rank not in refuted}
        if not slow and not self._view.slow_links:
            return []
        view = replace(self._view, slow=slow)
        pricing = Pricing(view, self._config)
        search = CandidateSearch(view, self._config, pricing, self._floor)
        moves = [one for one in search.candidates() if one.level in STATE_MOVING_LEVELS]
        layouts = [replace(move.layout, speeds=self.slow_speeds) for move in moves]
        if view.capabilities & SHARES_OF_ROWS:
            layouts = [self._with_batch_shares(layout) for layout in layouts]
        return [replace(move, layout=layout) for move, layout in zip(moves, layouts, strict=True)]

    def made(self, experts: Experts, base: Layout) -> Layout:
        """Return the next layout: `base` with these experts."""
        return replace(
            base,
            generation=self._view.next_generation,
            experts=experts,
            speeds=self.slow_speeds,
        )

    def _with_batch_shares(self, layout: Layout) -> Layout:
        """Return a layout with batch shares by speed, so that its pipelines end together."""
        view, problem = self._view, self._pricing.problem
        if problem is not None:
            other = with_other_rows(as_partition(view, layout), problem)
            pipelines = with_rows(layout.pipelines, other)
            return replace(layout, pipelines=pipelines, schedule=other.schedule)
        speeds = self._pricing.speeds
        rows_per_step = view.shape.rows_per_step
        # A rank without a micro-batch would never be seen to be well again.
        is_counted = view.workload.are_rows_microbatches
        least = int(is_counted and rows_per_step >= len(layout.batch_shares))
        of_leaders = {rank: speeds[rank] for rank, _ in layout.batch_shares}
        rows = batch_rows(rows_per_step, of_leaders, least=least)
        shares = (count / rows_per_step for count in rows.values())
        return replace(layout, pipelines=with_batch_shares(layout.pipelines, shares))


def _row_s(view: PlanningSnapshot) -> float:
    """Return the seconds per row of an expert, by the cost model or by the ranks' measured work."""
    if not view.work:
        return row_s(view.model, view.workload, view.layout)
    rows = sum(map(sum, view.workload.loads))
    spent_s = sum(time.expert_s for time in view.work.values())
    return spent_s / rows if rows > 0.0 else 0.0
