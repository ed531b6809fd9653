"""`ExpertReplicas`: one rank's part in plans that place and share the experts of torchtitan."""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import ExpertReplica, Layout
from pacekeeper.core.telemetry.attachment import Capability, ModelShape
from pacekeeper.trainer.adapters.torchtitan_experts.checkpoint import (
    home_slots,
    hook_optimizer,
    hook_weights,
)
from pacekeeper.trainer.adapters.torchtitan_experts.sharing import SharedSlots
from pacekeeper.trainer.adapters.torchtitan_experts.slots import ExpertSlots, Placed, local_of
from pacekeeper.trainer.adapters.torchtitan_experts.states import Stacks, stacks_of
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.hooks.hooks import Hooks
from pacekeeper.trainer.parallel.dispatch_plan import ReplicaShares
from pacekeeper.trainer.parallel.moves import commit_move, require_slots, stage_move
from pacekeeper.trainer.parallel.optimizers import require_per_element
from pacekeeper.trainer.plans.consumer import Gather, PlanSession, flat_layout
from pacekeeper.trainer.plans.gather import CpuGather

CAPABILITIES = (Capability.TOKEN_SHARES, Capability.EXPERT_REPLICAS)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ExpertReplicas:
    """The experts of a torchtitan Trainer on this rank; a `PlanConsumer`.

    Use it from the training thread. The placement begins as torchtitan's own: equal runs of
    experts, one replica each; further slots are free.

    Attributes:
        shape: What the controller is told of the model.
    """

    def __init__(self, trainer: Any) -> None:
        """Place the experts; all ranks call it together, after torchtitan has built the Trainer.

        Raises:
            ConfigError: The overrides are not active, or the Trainer's settings do not allow
                replicas; which, and what to do.
        """
        require_settings(trainer)
        (model,) = trainer.model_parts
        self._routed = _routed_experts(model)
        self._num_layers = max(max(self._routed) + 1, len(getattr(model, "layers", ())))
        self._optimizers: list[torch.optim.Optimizer] = list(trainer.optimizers)
        self._layers: dict[int, ExpertSlots] = {
            layer: routed.inner_experts for layer, routed in self._routed.items()
        }
        self._group: Group = next(iter(self._routed.values())).token_dispatcher.group
        require_per_element(
            self._optimizers, chain.from_iterable(x.parameters() for x in self._layers.values())
        )
        self.layout = self._first_layout()
        self.shape = shape_of(trainer, self._layers, self._num_layers)
        self._session: PlanSession | None = None
        self._gather: Gather | None = None
        ranks, rank = self._group.ranks, self._group.rank
        slots = {n: home_slots(x.num_experts, ranks, rank) for n, x in self._layers.items()}
        self._place(slots)
        for layer, experts in self._layers.items():
            free = sorted(set(range(experts.num_slots)) - set(slots[layer].values()))
            for stack in experts.stacks().values():
                stack[free] = 0.0
            hook_weights(experts)
        for optimizer in self._optimizers:
            hook_optimizer(optimizer, list(self._layers.values()))
        # Runs after torchtitan has clipped the gradients.
        trainer.optimizers.register_step_pre_hook(lambda *_: self._copy_gradients())

    def take_plans(self, pace: Hooks, *, step: int, gather: Gather | None = None) -> None:
        """Take plans from now on; all ranks call it together.

        Args:
            pace: Attached with `shape` and `CAPABILITIES`.
            step: The next step.
            gather: Exchanges the votes; default: a gloo group of its own, which waits 60 s.
        """
        self._gather = gather or CpuGather()
        self._session = PlanSession(pace, self, self.layout, step=step)

    def at_boundary(self, *, step: int) -> bool:
        """Before a step, on all ranks together: vote, and apply what all voted for.

        Returns:
            Whether a new layout is in force.
        """
        assert self._session is not None and self._gather is not None, "after take_plans"
        return self._session.at_boundary(step=step, gather=self._gather)

    def check(self, layout: Layout) -> None:
        """Accept other replicas and shares of experts, nothing else."""
        if layout.model != self.layout.model or layout.mesh != self.layout.mesh:
            raise ValueError("this trainer only changes which ranks hold and compute experts")
        if layout.batch_shares != self.layout.batch_shares or layout.standing_by:
            raise ValueError("every rank of this trainer runs an equal part of the batch")
        try:
            require_slots(layout, next(iter(self._layers.values())).num_slots)
        except ConfigError as error:
            raise ValueError(error.what) from error

    def apply(self, layout: Layout) -> int:
        """Move the experts, and send tokens to the new replicas from the next step on."""
        placed = {n: _placement(x) for n, x in self._layers.items()}
        stacks = {n: stacks_of(x, self._optimizers) for n, x in self._layers.items()}
        states = Stacks(
            {n: one.slots for n, one in placed.items()},
            stacks,
            num_slots=next(iter(self._layers.values())).num_slots,
            num_experts=[len(experts) for experts in layout.experts],
        )
        with torch.no_grad():
            staged = stage_move(states, self.layout, layout, self._group)
            commit_move(states, staged)
        self.layout = layout
        self._place(states.slots)
        return staged.moved_bytes

    def _first_layout(self) -> Layout:
        ranks = self._group.ranks
        by_layer = []
        for layer in range(self._num_layers):
            experts = self._layers.get(layer)
            homes = (
                {e: r for r in ranks for e in home_slots(experts.num_experts, ranks, r)}
                if experts
                else {}
            )
            by_layer.append(tuple((ExpertReplica(homes[e], 1.0),) for e in sorted(homes)))
        return flat_layout(len(ranks), experts=by_layer)

    def _place(self, slots: Mapping[int, Mapping[int, int]]) -> None:
        for layer, experts in self._layers.items():
            device = next(iter(experts.stacks().values())).device
            of_layer = self.layout.experts[layer]
            experts.placed = Placed(
                layer=layer,
                experts=of_layer,
                slots=dict(slots[layer]),
                group=self._group,
                shared=SharedSlots.of(of_layer, slots[layer], self._group, device),
            )
            self._routed[layer].token_dispatcher.shares = ReplicaShares.of(
                of_layer,
                slots[layer],
                ranks=self._group.ranks,
                rank=self._group.rank,
                num_slots=experts.num_slots,
                device=device,
            )

    @torch.no_grad()
    def _copy_gradients(self) -> None:
        """Give replicas the gradient that was added up and clipped on their lowest rank."""
        for experts in self._layers.values():
            shared = _placement(experts).shared
            grads = [p.grad for p in experts.parameters(recurse=False) if p.grad is not None]
            if shared.is_needed and grads:
                shared.copy_out([local_of(gradient) for gradient in grads])


def require_settings(trainer: Any) -> None:
    """Reject a Trainer whose parallelism or compilation excludes replicas.

    Raises:
        ConfigError: Which setting.
    """
    dims = trainer.parallel_dims
    size = dims.pp * dims.dp_replicate * dims.dp_shard * dims.cp * dims.tp
    if dims.ep != size or max(dims.pp, dims.dp_replicate, dims.cp, dims.tp) > 1:
        raise ConfigError(
            f"expert_parallel_degree is {dims.ep}: expected all {size} ranks, without tensor, "
            "context, pipeline or replicated data parallelism",
            remedy="set it to the number of ranks",
        )
    if trainer.config.compile.enable and "model" in trainer.config.compile.components:
        raise ConfigError(
            "the model is compiled, and its experts change places between steps",
            remedy="set --compile.no-enable",
        )


def shape_of(trainer: Any, layers: Mapping[int, ExpertSlots], num_layers: int) -> ModelShape:
    """Return what the controller needs to know of the model and its batch."""
    first = next(iter(layers.values()))
    training, dims = trainer.config.training, trainer.parallel_dims
    rows = getattr(training, "local_batch_size", 1) * trainer.gradient_accumulation_steps
    stacks = first.stacks().values()
    every = sum(p.numel() * p.element_size() for p in trainer.model_parts[0].parameters())
    of_experts = sum(
        p.numel() * p.element_size() for x in layers.values() for p in x.parameters(recurse=False)
    )
    states = 3  # weights and two moments
    return ModelShape(
        num_layers=num_layers,
        num_experts=first.num_experts,
        experts_per_token=next(
            m.top_k for m in trainer.model_parts[0].modules() if hasattr(m, "top_k")
        ),
        rows_per_step=rows * dims.dp_shard,
        slots_per_rank=first.num_slots,
        expert_bytes=states * sum(stack[0].numel() * stack.element_size() for stack in stacks),
        dense_bytes=states * (every - of_experts),
        tokens_per_row=getattr(training, "seq_len", 0),
    )


def _routed_experts(model: nn.Module) -> dict[int, Any]:
    """Return torchtitan's routed experts by layer."""
    found: dict[int, Any] = {}
    for name, part in model.named_modules():
        if not isinstance(getattr(part, "inner_experts", None), ExpertSlots):
            continue
        number = _LAYER.search(f"{name}.")
        layer = int(number[1]) if number else len(found)
        if layer in found or not hasattr(getattr(part, "token_dispatcher", None), "group"):
            raise ConfigError(
                f"{name}: experts have slots, and the dispatcher knows no replicas, or layer "
                f"{layer} comes twice",
                remedy="name both overrides, expert_slots and replica_dispatcher",
            )
        found[layer] = part
    if not found:
        raise ConfigError(
            "no layer of the model has experts with slots",
            remedy="name the overrides in --override.imports: docs/trainer-torchtitan.md",
        )
    for layer, part in found.items():
        experts: ExpertSlots = part.inner_experts
        ranks = len(part.token_dispatcher.group.ranks)
        local = next(iter(experts.stacks().values()))
        if experts.num_experts % ranks or experts.num_slots * ranks <= experts.num_experts:
            raise ConfigError(
                f"layer {layer}: {experts.num_experts} experts on {ranks} ranks with "
                f"{experts.num_slots} slots",
                remedy="give each rank more slots than its equal part of the experts",
            )
        assert len(local) == experts.num_slots, "a rank has all of its slots"
    return found


def _placement(experts: ExpertSlots) -> Placed:
    assert experts.placed is not None, "placed at the beginning"
    return experts.placed
