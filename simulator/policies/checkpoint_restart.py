"""Policies that rest on checkpoints: none at all, DeepSpeed's restarts, and its restarts made rare.

Experts lie in fixed groups of `group_size` nodes, each group with one copy of every expert, in
their own order (DeepSpeed-MoE's expert parallelism); nodes that make no whole group stand idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pacekeeper.core.layout.layout import Layout
from pacekeeper.simulator.jobs.data_parallel import (
    Dispatch,
    JobModel,
    alive_everywhere,
    copied_bytes,
    with_replicas,
)
from pacekeeper.simulator.policies.base import PUBLISHED, Answer, Cause, Costs, Moment, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarting:
    """Every change of nodes ends all processes; they start again from the newest checkpoint.

    A change that can wait (nodes have joined) waits for a checkpoint made for it. Without
    `checkpoint_steps` everything begins at step 0 again, and nodes that join stand idle.
    """

    name: str = "checkpoint-restart"
    group_size: int
    checkpoint_steps: int | None = 50
    costs: Costs = PUBLISHED
    review_steps: int | None = None
    dispatch: Dispatch = Dispatch.PADDED

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        if moment.cause in (Cause.DUE, Cause.PACED):
            return Answer(layout=moment.layout, reason="keeps going")
        layout = grouped(moment.nodes, self.group_size, job)
        restart = self.costs.restart(moment)
        if layout is None:
            return Answer(layout=None, is_rolled_back=True, reason="too few nodes for one group")
        if moment.cause is Cause.GROWN and moment.layout is not None:
            if self.checkpoint_steps is None or len(layout.ranks) <= len(moment.layout.ranks):
                return Answer(layout=moment.layout, reason="no further group")
            saved = (Use.SAVED, self.costs.saving(job, len(moment.nodes)).stop_s)
            return Answer(layout=layout, phases=(saved, restart), reason="restarts with more nodes")
        if moment.is_fresh:
            return Answer(layout=layout, reason="begins")
        return Answer(
            layout=layout,
            phases=(restart,),
            is_rolled_back=True,
            reason="nodes were lost: restarts",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """DeepSpeed with Lazarus' way to reconfigure (its baseline "DS(FT)"): whole groups are made of
    the nodes that are left; only where an expert has no living copy it restarts.
    """

    name: str = "checkpoint, fast reconfiguration"
    group_size: int
    checkpoint_steps: int | None = 250
    costs: Costs = PUBLISHED
    review_steps: int | None = None
    dispatch: Dispatch = Dispatch.PADDED

    def answer(self, moment: Moment, job: JobModel) -> Answer:
        if moment.cause in (Cause.DUE, Cause.PACED):
            return Answer(layout=moment.layout, reason="keeps going")
        layout = grouped(moment.nodes, self.group_size, job)
        return reconfigured(moment, layout, job, self.costs, is_planned=False)


def reconfigured(
    moment: Moment, layout: Layout | None, job: JobModel, costs: Costs, *, is_planned: bool
) -> Answer:
    """From what is held to `layout`: notice, a plan, new groups, copies; or from storage, where an
    expert has no living copy."""
    if layout is None:
        return Answer(layout=None, is_rolled_back=True, reason="too few nodes for the model")
    if moment.layout is None:
        if moment.is_fresh:
            return Answer(layout=layout, reason="begins")
        phases = (costs.restart(moment),)
        return Answer(layout=layout, phases=phases, is_rolled_back=True, reason="starts again")
    if not alive_everywhere(moment.layout, moment.nodes):
        phases = (costs.restart(moment),)
        return Answer(layout=layout, phases=phases, is_rolled_back=True, reason="an expert is lost")
    moved = copied_bytes(moment.layout, layout, job)
    return Answer(
        layout=layout,
        phases=costs.regrouping(moment, moved, is_planned=is_planned),
        copied_bytes=moved,
        reason="reconfigures",
    )


def grouped(nodes: Sequence[int], group_size: int, job: JobModel) -> Layout | None:
    """As many whole groups as there are nodes for; None: not even one.

    Raises ValueError where a group can not hold the experts.
    """
    per_node = -(-job.num_experts // group_size)
    if per_node > job.slots_per_node:
        raise ValueError(
            f"group_size: {job.num_experts} experts on {group_size} nodes are {per_node} on one, "
            f"of {job.slots_per_node} slots"
        )
    num_groups = len(nodes) // group_size
    if not num_groups:
        return None
    used = sorted(nodes)[: num_groups * group_size]
    on = [
        {used[group * group_size + expert // per_node]: 1.0 / num_groups
         for group in range(num_groups)}
        for expert in range(job.num_experts)
    ]  # fmt: skip
    return with_replicas(used, [on] * job.num_layers)
