"""The mitigation levels as layouts, each on top of the one before. Pure.

What is dear is found when it is first asked for, and once.
"""

from dataclasses import replace
from functools import cached_property

from pacekeeper.controller.planning.partition.incremental import with_other_rows
from pacekeeper.controller.planning.partition.layout_codec import batch_shares_of
from pacekeeper.controller.planning.token_split.linear_program import Split, batch_rows
from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.failure_rates import likelihood
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.policy.repartition_candidates import Candidate, Experts, repartitions
from pacekeeper.controller.policy.replica_candidates import (
    ReplicaPlan,
    ReplicaRequest,
    plan_replicas,
)
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import MitigationLevel
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.forecast import replica_s, row_s


class CandidateSearch:
    """Candidates for one view."""

    def __init__(
        self, view: PlanningSnapshot, config: PolicyConfig, pricing: Pricing, floor: SpreadFloor
    ) -> None:
        self._view, self._config, self._pricing, self._floor = view, config, pricing, floor

    @cached_property
    def splits(self) -> tuple[Split, ...]:
        """The best shares over the present replicas."""
        view, speeds = self._view, self._pricing.speeds
        # What its trainer gives by itself is the best there is, if it knows the speeds.
        if speeds == view.layout.speed_by_rank:
            own = self._pricing.present_splits
            if own is not None:
                return own
        return tuple(split_layers(view.layout, loads=view.workload.loads, speeds=speeds))

    @cached_property
    def replicas(self) -> ReplicaPlan | None:
        """Where experts would better be, None where they are well."""
        view, config, costs = self._view, self._config, self._pricing.costs
        limit = config.max_moved_bytes
        return plan_replicas(
            view.layout,
            self.splits,
            view.workload.loads,
            self._pricing.speeds,
            ReplicaRequest(
                slots_per_rank=view.shape.slots_per_rank,
                min_hosts=config.min_hosts,
                spread=self._floor,
                row_s=_row_s(view),
                replica_s=0.0 if view.work else replica_s(view.model, view.workload, view.layout),
                num_steps=config.horizon_steps,
                move_s=view.shape.expert_bytes * costs.total_s_per_byte,
                restart_s=config.restart_s,
                failure_probability=likelihood(config.failure_probability, view.losses),
                rack_failure_probability=config.rack_failure_probability,
                max_copies=limit // max(1, view.shape.expert_bytes) if limit else None,
                doubted=view.doubted,
            ),
        )

    @property
    def slow_speeds(self) -> tuple[tuple[int, float], ...]:
        """What a layout says of ranks that are slower than their peers."""
        speeds = self._pricing.speeds
        return tuple((rank, speed) for rank, speed in sorted(speeds.items()) if speed < 1.0)

    def candidates(self) -> list[Candidate]:
        """The levels, cheapest first."""
        view, problem = self._view, self._pricing.problem
        shared = tuple(split.replicas for split in self.splits)
        batch = self._batch_shares()
        found = [
            Candidate(
                level=MitigationLevel.TOKEN_SHARES,
                layout=self.made(shared, view.layout.batch_shares),
            ),
            Candidate(level=MitigationLevel.BATCH_SHARES, layout=self.made(shared, batch)),
        ]
        # State is moved for nobody whose device is well by the probe, or of whom it is still to
        # tell; shares cost nothing.
        if view.is_probing or view.refuted & set(view.slow):
            return found
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
        if problem is not None:
            found += repartitions(
                view, problem, self._config, replicas, self.slow_speeds, self._floor
            )
        return found

    def made(self, experts: Experts, batch_shares: tuple[tuple[int, float], ...]) -> Layout:
        """The next layout, its stages as they are."""
        return replace(
            self._view.layout,
            generation=self._view.next_generation,
            experts=experts,
            batch_shares=batch_shares,
            speeds=self.slow_speeds,
        )

    def _batch_shares(self) -> tuple[tuple[int, float], ...]:
        """Rows by speed: of single ranks, or so that pipelines end together."""
        view, problem = self._view, self._pricing.problem
        if problem is not None:
            return batch_shares_of(with_other_rows(problem.now, problem))
        speeds = self._pricing.speeds
        rows_per_step = view.shape.rows_per_step
        rows = batch_rows(rows_per_step, {r: speeds[r] for r, _ in view.layout.batch_shares})
        return tuple((rank, count / rows_per_step) for rank, count in rows.items())


def _row_s(view: PlanningSnapshot) -> float:
    """Seconds that a row more at an expert takes: as learnt of all ranks, or as their work says."""
    if not view.work:
        return row_s(view.model, view.workload, view.layout)
    rows = sum(map(sum, view.workload.loads))
    spent_s = sum(time.expert_s for time in view.work.values())
    return spent_s / rows if rows > 0.0 else 0.0
