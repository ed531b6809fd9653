"""The experts of one torchtitan layer in slots: a mixin of its grouped experts.

A rank has `num_slots` slots per layer, some of them free: all zero, with zero gradients. The
computation is torchtitan's own; only the number of experts in the parameters differs, and the
gradients of replicas are added up. State dictionaries have logical experts, as without replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import ReplicaSet
from pacekeeper.trainer.adapters.torchtitan_experts.sharing import SharedSlots, summed
from pacekeeper.trainer.groups.group import Group


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, as a view without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Where one layer's experts are.

    Attributes:
        layer: The layer.
        experts: Replicas of each expert.
        slots: Slot of each expert held here.
        group: Ranks that hold the experts.
        shared: Slots of replicated experts.
    """

    layer: int
    experts: Sequence[ReplicaSet]
    slots: Mapping[int, int]
    group: Group
    shared: SharedSlots


class ExpertSlots(nn.Module):
    """Mixin of a torchtitan `GroupedExperts`, before it in the order of bases.

    Attributes:
        num_experts: Logical experts of the layer.
        num_slots: Slots of a rank.
        placed: Set by `ExpertReplicas`; None: not yet.
    """

    num_experts: int
    num_slots: int
    placed: Placed | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Make room for the slots of all ranks, and let torchtitan divide them."""
        for name, parameter in [*self.named_parameters(recurse=False)]:
            shape = parallel_dims.ep * self.num_slots, *parameter.shape[1:]
            self.register_parameter(
                name, nn.Parameter(parameter.new_empty(shape), parameter.requires_grad)
            )
        super().parallelize(parallel_dims)  # type: ignore[misc]

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Compute rows sorted by slot; torchtitan's own forward pass.

        Args:
            x_RD: [rows, hidden].
            num_tokens_per_expert_E: Rows of each slot.
        """
        if self.placed is None:
            raise ConfigError(
                "experts have slots, and nothing says which experts are in them",
                remedy="call torchtitan.watch(trainer, moves_experts=True) before trainer.train()",
            )
        inner: Any = super()
        if not (self.placed.shared.is_needed and torch.is_grad_enabled()):
            rows: Tensor = inner.forward(x_RD, num_tokens_per_expert_E)
            return rows
        names = [name for name, _ in self.named_parameters(recurse=False)]
        weights = [getattr(self, name) for name in names]
        own = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        # An attribute of the instance comes before a parameter of its name.
        vars(self).update(zip(names, summed(self.placed.shared, own), strict=True))
        try:
            rows = inner.forward(x_RD, num_tokens_per_expert_E)
        finally:
            for name in names:
                del vars(self)[name]
        return rows

    def stacks(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter, [slots, ...]: views."""
        return {name: local_of(p) for name, p in self.named_parameters(recurse=False)}
