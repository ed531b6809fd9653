"""Gradients of replicated experts: added up on the lowest replica rank, copied back after clipping.

In between the other replicas' gradients are zero, so that a norm over all slots counts an expert
once, whoever computes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import ReplicaSet
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.row_exchange import exchange


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSlots:
    """Own slots of one layer's replicated experts; in each, ascending experts.

    Attributes:
        group: Ranks that hold the experts.
        is_needed: Whether any expert of the layer is replicated, here or elsewhere.
        counted: By member, slots of experts that this rank counts and the member has, too: those
            whose lowest replica rank it is.
        copied: By member, slots of experts that the member counts.
    """

    group: Group
    is_needed: bool
    counted: tuple[Tensor, ...]
    copied: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        experts: Sequence[ReplicaSet],
        slots: Mapping[int, int],
        group: Group,
        device: torch.device,
    ) -> "SharedSlots":
        """Return those of a layer.

        Args:
            experts: Replicas of each expert.
            slots: Slot of each expert held here.
            group: Ranks that hold the experts.
            device: Of the experts.
        """
        holders = {e: [replica.rank for replica in experts[e]] for e in sorted(slots)}
        mine = {e: ranks for e, ranks in holders.items() if ranks[0] == group.rank}

        def chosen(some: Sequence[int]) -> Tensor:
            return torch.tensor([slots[e] for e in some], dtype=torch.int64, device=device)

        others = [member if member != group.rank else None for member in group.ranks]
        return cls(
            group=group,
            is_needed=any(len(replicas) > 1 for replicas in experts),
            counted=tuple(chosen([e for e, ranks in mine.items() if m in ranks]) for m in others),
            copied=tuple(chosen([e for e in holders if holders[e][0] == m]) for m in others),
        )

    def add_up(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums in rank order where this rank counts an expert, zeros in its copies.

        Args:
            gradients: [slots, ...] each; those of less than 32 bits are added up in float32.
        """
        wide = [g.float() if g.element_size() < 4 else g.clone() for g in gradients]
        arrived = self._sent(wide, self.copied, self.counted)
        for member, slots in enumerate(self.counted):
            for total, rows in zip(wide, arrived[member], strict=True):
                total.index_add_(0, slots, rows)
        for slots in self.copied:
            for total in wide:
                total.index_fill_(0, slots, 0.0)
        return [total.to(g.dtype) for total, g in zip(wide, gradients, strict=True)]

    def copy_out(self, rows: Sequence[Tensor]) -> None:
        """Overwrite this rank's copies by what their counting ranks have: [slots, ...] each."""
        arrived = self._sent(rows, self.counted, self.copied)
        for member, slots in enumerate(self.copied):
            for own, new in zip(rows, arrived[member], strict=True):
                own.index_copy_(0, slots, new)

    def _sent(
        self, rows: Sequence[Tensor], sent: Sequence[Tensor], received: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """Exchange the rows of slots with all members; return what arrived by member and tensor."""
        sizes = [row[0].numel() for row in rows]
        data = [r.index_select(0, slots).reshape(-1) for slots in sent for r in rows]
        counts = [len(slots) for slots in received]
        arrived = exchange(
            torch.cat(data),
            self.group,
            receive=[n * sum(sizes) for n in counts],
            send=[len(slots) * sum(sizes) for slots in sent],
        )
        parts = iter(arrived.split([n * size for n in counts for size in sizes]))
        return [[next(parts).view(n, *row.shape[1:]) for row in rows] for n in counts]


def summed(shared: SharedSlots, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the weights [slots, ...]; their gradients are those of `SharedSlots.add_up`."""
    found: tuple[Tensor, ...] = _Summed.apply(shared, *weights)  # type: ignore[no-untyped-call]
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: "_Shared", shared: SharedSlots, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.shared = shared
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: "_Shared", *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.shared.add_up(gradients)


class _Shared:
    shared: SharedSlots
