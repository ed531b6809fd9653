"""What the engine takes and gives: how to train, and results of steps and moves."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.errors import ConfigError
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.trainer.engine.micro_batches import WorkSize
from pacekeeper.trainer.engine.routing import Balance
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.parallel.moves import StagedMove


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How an engine trains; the same on all ranks.

    Attributes:
        device: Where parameters and computation are.
        num_slots: Experts of a layer that a rank has memory for; None: as many as the layout puts
            on any rank, and one more to move into if there are several ranks.
        compute_dtype: torch.bfloat16 for mixed precision: parameters, gradients and optimizer state
            keep their type; None: the type of the parameters.
        max_grad_norm: Bound of the global gradient norm; None: no bound.
        checkpoint_activations: Whether the backward pass repeats decoder layers instead of keeping
            their activations. Rows are routed and planned once.
        balance: What the load-balancing loss is computed over; BATCH needs one stage.
        balance_weight: Weight of that loss; 0: none.
        bias_rate: Step of the update of the routers' correction biases, where the family has them
            (DeepSeek-V3: 1e-3); 0: none.
    """

    device: torch.device | str = "cpu"
    num_slots: int | None = None
    compute_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    checkpoint_activations: bool = False
    balance: Balance = Balance.SEQUENCE
    balance_weight: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        problems = {
            "device": not _is_usable(self.device),
            "num_slots": self.num_slots is not None and self.num_slots < 1,
            "compute_dtype": self.compute_dtype not in (None, torch.bfloat16),
            "max_grad_norm": self.max_grad_norm is not None and not self.max_grad_norm > 0.0,
            "balance": self.balance not in list(Balance),
            "balance_weight": not self.balance_weight >= 0.0,
            "bias_rate": not self.bias_rate >= 0.0,
        }
        for name, is_wrong in problems.items():
            if is_wrong:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is not possible here",
                    remedy="see the attributes of EngineOptions",
                )
        object.__setattr__(self, "balance", Balance(self.balance))


def require_schedule(layout: Layout, *, checkpoint_activations: bool) -> None:
    """Reject a layout whose schedule the engine cannot run.

    Zero bubble computes gradients of weights where a stage would wait, from activations that it
    keeps; repeated layers keep none.

    Raises:
        ConfigError: Zero bubble, and activations are checkpointed.
    """
    if checkpoint_activations and layout.schedule is Schedule.ZERO_BUBBLE:
        raise ConfigError(
            f"the layout of generation {layout.generation} has the schedule {layout.schedule}, "
            "which needs the activations that checkpointing drops",
            remedy="give a layout with the schedule 1f1b, or set checkpoint_activations to False",
        )


def _is_usable(device: torch.device | str) -> bool:
    try:
        return torch.empty(0, device=device).device.type == torch.device(device).type
    except (RuntimeError, AssertionError):  # unknown, or not in this build of torch
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave; tensors are scalars on the device, equal on all ranks.

    Attributes:
        loss: Mean loss over the targets of the global batch, without the load-balancing loss.
        grad_norm: L2 norm of the gradients of the whole model before clipping.
        num_targets: Targets of the global batch.
        num_tokens: Tokens of the global batch.
        routed: By layer, the rows that all ranks routed to each expert, [experts] int64.
    """

    loss: Tensor
    grad_norm: Tensor
    num_targets: int
    num_tokens: int
    routed: Mapping[int, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step whose gradients are complete on all ranks, and which has changed nothing yet.

    Attributes:
        step: Its number.
        result: What it gives.
        work: Size of the global batch.
    """

    step: int
    result: StepResult
    work: WorkSize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedMove:
    """A layout whose blocks are on their ranks, but not in force.

    Attributes:
        layout: The layout.
        groups: Its ranks.
        staged: Blocks that arrived here.
    """

    layout: Layout
    groups: EngineGroups
    staged: StagedMove


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedLayout:
    """What a change of the layout did: the bytes of expert state that this rank sent."""

    generation: int
    moved_bytes: int
