"""torchtitan's overrides: experts with slots, and the dispatcher that sends tokens to replicas.

    --override.imports \\
      'pacekeeper.trainer.adapters.torchtitan_experts.overrides.expert_slots={"slots": 3}' \\
      pacekeeper.trainer.adapters.torchtitan_experts.overrides.replica_dispatcher

torchtitan imports this module when it is named there; nothing else does.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from pacekeeper.trainer.adapters.torchtitan_experts.slots import ExpertSlots
from pacekeeper.trainer.groups.group import Group, TorchGroup
from pacekeeper.trainer.parallel.dispatch_plan import DispatchPlan, ReplicaShares, plan_dispatch
from pacekeeper.trainer.parallel.experts import NoClock
from pacekeeper.trainer.parallel.row_exchange import exchange_rows, take_rows


@cache
def with_slots(base: Any) -> Any:
    """Return a class of experts in slots, computed as those of `base`, a `GroupedExperts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(base.Config):  # type: ignore[misc]
        num_slots: int = 0

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        self.num_slots = config.num_slots

    body = {"Config": Config, "__init__": __init__}
    return type(f"Slotted{base.__name__}", (ExpertSlots, base), body)


@override(  # type: ignore[untyped-decorator]
    target=GroupedExperts.Config, description="Experts in slots, which replicas may fill"
)
def expert_slots(config: Any, *, slots: int) -> Any:
    """Return the settings of experts with this many slots per rank and layer."""
    return derive(config, with_slots(type(config)._owner).Config, num_slots=slots)


class ReplicaDispatcher(LocalTokenDispatcher):  # type: ignore[misc]
    """Sends each token to a replica of each of its experts, by the shares of the layout.

    Attributes:
        shares: Set by `ExpertReplicas`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):  # type: ignore[misc]
        """As of the dispatcher in whose place it comes."""

    shares: ReplicaShares
    group: Group

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        """Keep the group of ranks that share the experts."""
        if ep_mesh is not None:
            self.group = TorchGroup(ep_mesh.get_group())

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, tuple[DispatchPlan, Tensor]]:
        """Exchange rows; return those that arrived by slot, rows of each slot, and the routes."""
        counts_WE = self.group.all_gather(num_local_tokens_per_expert_E.long())
        plan = plan_dispatch(topk_expert_ids_TK.reshape(-1), counts_WE, self.shares)
        choices = topk_expert_ids_TK.shape[1]
        rows = take_rows(x_TD, plan.sent_from_A, plan.sent_to_A, choices)
        rows = exchange_rows(rows, self.group, plan.receive, plan.send, NoClock())
        rows = take_rows(rows, plan.grouped_from_R, plan.grouped_to_R)
        return rows, plan.rows_S, (plan, topk_scores_TK)

    def combine(
        self,
        routed_output_RD: Tensor,
        metadata: tuple[DispatchPlan, Tensor],
        x_TD: Tensor,
    ) -> Tensor:
        """Send the answers back; return their sums by token, weighted by the scores."""
        plan, scores_TK = metadata
        rows = take_rows(routed_output_RD, plan.grouped_to_R, plan.grouped_from_R)
        rows = exchange_rows(rows, self.group, plan.send, plan.receive, NoClock())
        rows = take_rows(rows, plan.sent_to_A, plan.sent_from_A)
        answers = rows.view(*scores_TK.shape, rows.shape[1]).to(scores_TK.dtype)
        return (answers * scores_TK[..., None]).sum(1).to(x_TD.dtype)


@override(  # type: ignore[untyped-decorator]
    target=LocalTokenDispatcher.Config, description="Tokens to replicas by their shares"
)
def replica_dispatcher(config: Any) -> Any:
    """Return the settings of the dispatcher of replicas."""
    return derive(config, ReplicaDispatcher.Config)
