"""What the engine adds to a model's routers: full precision, balancing losses and bias updates."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.model.routers import Router, routers
from pacekeeper.trainer.model.skeleton import Skeleton
from pacekeeper.trainer.parallel.experts import ExpertParallel
from pacekeeper.trainer.parallel.load_balancing import (
    affinities,
    batch_loss,
    row_counts,
    sequence_loss,
    update_bias,
)
from pacekeeper.trainer.parallel.mesh.tensor_regions import TokenSlices

_WIDE = (torch.float32, torch.float64)
_BIASES = ("e_score_correction_bias", "expert_bias")


class Balance(StrEnum):
    """Over what a load-balancing loss is computed."""

    SEQUENCE = "sequence"  # each row alone: exact under any layout
    BATCH = "batch"  # all tokens of a step, as transformers does: one micro-batch only


def require_balance(layout: Layout, balance: Balance, weight: float) -> None:
    """Reject stages with a load-balancing loss over the batch: it needs all layers at once.

    Raises:
        ConfigError: The layout has several stages.
    """
    if balance is Balance.BATCH and weight and any(len(stages) > 1 for stages in layout.mesh):
        raise ConfigError(
            f"generation {layout.generation} has pipeline stages, and the load-balancing loss is "
            "over the batch",
            remedy='use balance="sequence"',
        )


class Routing:
    """Routers of a model.

    Args:
        skeleton: The model.
        experts: Computes its experts.
        balance: Kind of the loss.
        weight: Of the loss; 0: none.
        bias_rate: Of the bias update; 0: none.

    Raises:
        ConfigError: A loss or update is asked for that the family has no place for.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        experts: ExpertParallel,
        *,
        balance: Balance,
        weight: float,
        bias_rate: float,
    ) -> None:
        self._skeleton, self._experts = skeleton, experts
        self._balance, self._weight, self._bias_rate = balance, weight, bias_rate
        self._routers = [router for router in routers(skeleton) if router is not None]
        self._biases = correction_biases(skeleton)
        self._logits: dict[int, Tensor] = {}
        layers = [one.layer for one in skeleton.experts if one is not None]
        name = skeleton.config.model_type
        if (weight or bias_rate) and not layers:
            raise ConfigError(
                f"{name} has no experts to balance",
                remedy="set the weight of the loss and the rate of the bias update to 0",
            )
        if weight and [router.layer for router in self._routers] != layers:
            raise ConfigError(
                f"{name}: transformers does not give the logits of its routers, so there is no "
                "load-balancing loss",
                remedy="set its weight to 0",
            )
        if bias_rate and sorted(self._biases) != layers:
            raise ConfigError(
                f"{name}: its routers have no correction bias to update",
                remedy="set the rate of the bias update to 0, or use a load-balancing loss",
            )
        if bias_rate and any(b.dtype not in _WIDE for b in self._biases.values()):
            raise ConfigError(
                f"{name}: correction biases below float32 do not hold small updates",
                remedy="keep the parameters in float32, with compute_dtype=torch.bfloat16",
            )
        if weight:
            for router in self._routers:
                router.module.register_forward_hook(self._keeper(router))

    @property
    def needs_one_micro_batch(self) -> bool:
        """Whether the loss is over the whole batch."""
        return self._weight > 0.0 and self._balance is Balance.BATCH

    def loss(
        self, num_rows: int, num_tokens: int, slices: TokenSlices, group: Group
    ) -> Tensor | float:
        """Return the weighted loss of the micro-batch that was just computed; 0 without one.

        It is that of this rank's layers and tokens: those of all ranks add up.

        Args:
            num_rows: Rows of the micro-batch; 0: this rank had none.
            num_tokens: Tokens of the global batch.
            slices: The micro-batch.
            group: Ranks with work; the loss over a batch exchanges counts.
        """
        if not self._weight:
            return 0.0
        kept, self._logits = self._logits, {}
        chosen = self._experts.take_chosen()
        here = [router for router in self._routers if router.layer in chosen]
        found = [self._affinities(router, kept[router.layer]) for router in here]
        if self._balance is Balance.SEQUENCE:
            if not (num_rows and found):
                return 0.0
            losses = [
                _sequence_loss(affinity, chosen[router.layer], slices)
                for router, affinity in zip(here, found, strict=True)
            ]
            return self._weight * torch.stack(losses).sum() / (num_tokens * len(self._routers))
        own = found[0].new_zeros(found[0].shape[1])
        for router in here if num_rows else ():
            picked = chosen[router.layer].flatten()
            own.scatter_add_(0, picked, own.new_ones(len(picked)))
        group.all_reduce(own).wait()
        loss = batch_loss(found, own, num_tokens)
        return self._weight * loss if num_rows else 0.0

    def use_layout(self) -> None:
        """Look up what this rank holds, after it has changed."""
        self._biases = correction_biases(self._skeleton)

    def forget(self) -> None:
        """Drop the logits of the last forward pass."""
        self._logits = {}

    def take_rows(self, layout: Layout, group: Group, device: torch.device) -> dict[int, Tensor]:
        """Return the rows that all ranks routed to each expert, of all layers; all ranks call it.

        Args:
            layout: The layout in force.
            group: Its ranks.
            device: Of this rank.
        """
        routed = self._experts.take_routed_rows()
        if len(layout.spans) == 1 and not layout.standing_by:
            return routed
        sizes = list(map(len, layout.experts))
        counts = [torch.zeros(n, dtype=torch.int64, device=device) for n in sizes]
        for layer, rows in routed.items():
            if layout.ranks_of_layer(layer)[0] == group.rank:
                counts[layer] += rows
        whole = torch.cat(counts)
        group.all_reduce(whole).wait()
        return {layer: part for layer, part in enumerate(whole.split(sizes)) if len(part)}

    def update_biases(self, routed: Mapping[int, Tensor]) -> None:
        """Update the correction biases from the rows routed in a step, by layer."""
        if self._bias_rate:
            for layer, bias in self._biases.items():
                if not bias.is_meta:  # of a layer of another stage
                    update_bias(bias, routed[layer], self._bias_rate)

    def _keeper(self, router: Router) -> Any:
        def keep(_module: nn.Module, _given: object, output: object) -> None:
            self._logits[router.layer] = router.logits(output)

        return keep

    def _affinities(self, router: Router, logits_NE: Tensor) -> Tensor:
        is_sigmoid = router.scores or router.layer in self._biases
        return affinities(logits_NE, is_sigmoid=is_sigmoid, are_scores=router.scores)


def _sequence_loss(affinity_NE: Tensor, chosen_NK: Tensor, slices: TokenSlices) -> Tensor:
    num_rows, length = slices.shape
    first = slices.own.start
    counts_RE = row_counts(chosen_NK, affinity_NE.detach(), first, num_rows, length)
    if len(slices.slices) > 1:
        slices.clock.pause()
        slices.group.all_reduce(counts_RE).wait()
        slices.clock.resume()
    return sequence_loss(affinity_NE, counts_RE, first, length)


def correction_biases(skeleton: Skeleton) -> dict[int, Tensor]:
    """Return the bias that a router adds to its scores to choose experts [E], by layer."""
    found = {}
    for name, tensor in [*skeleton.module.named_buffers(), *skeleton.module.named_parameters()]:
        if name.startswith(f"{skeleton.layers}.") and name.rpartition(".")[2] in _BIASES:
            layer = int(name.removeprefix(f"{skeleton.layers}.").partition(".")[0])
            if skeleton.experts[layer] is not None:
                found[layer] = tensor.detach().view(-1)
    return found


def keep_routers_in_full_precision(skeleton: Skeleton, device_type: str) -> None:
    """Let routers compute in the type of their parameters inside automatic mixed precision.

    Raises:
        ConfigError: The routers of the family are not known.
    """
    known: Sequence[Router | None] = routers(skeleton)
    for one, router in zip(skeleton.experts, known, strict=True):
        if one is not None and router is None:
            raise ConfigError(
                f"{skeleton.config.model_type}: its routers are not known, so they cannot be "
                "kept in full precision",
                remedy="train it without mixed precision",
            )
        if router is not None:
            _keep_in_full_precision(router.module, device_type)


def _keep_in_full_precision(module: nn.Module, device_type: str) -> None:
    forward = module.forward
    dtype = next(module.parameters()).dtype

    def in_full_precision(*given: object, **named: object) -> Any:
        with torch.autocast(device_type, enabled=False):
            return forward(
                *(_widened(value, dtype) for value in given),
                **{name: _widened(value, dtype) for name, value in named.items()},
            )

    module.forward = in_full_precision


def _widened(value: object, dtype: torch.dtype) -> object:
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value  # type: ignore[attr-defined]
