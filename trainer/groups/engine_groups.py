"""The groups of an engine: for exchanges, for gradients, and in host memory for agreement.

What travels at the same time has a group of its own: exchanges of the forward and backward pass,
gradients beside it, and snapshots that another thread sends beside both.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.groups.group import Group, SingleProcess, TorchGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroups:
    """Groups of the same ranks.

    Attributes:
        exchange: Rows of the experts, moves.
        gradients: Gradients, while the backward pass uses `exchange`.
        control: Counts and votes, in host memory.
        snapshots: State in host memory that another thread sends beside the training.
    """

    exchange: Group
    gradients: Group
    control: Group
    snapshots: Group

    @classmethod
    def single_process(cls, rank: int = 0) -> "EngineGroups":
        """Make the groups of a job of one process."""
        alone = SingleProcess(rank)
        return cls(exchange=alone, gradients=alone, control=alone, snapshots=alone)

    @classmethod
    def from_torch(cls, device: torch.device) -> "EngineGroups":
        """Make groups of all ranks of the initialised default process group; all ranks call this.

        Raises:
            ConfigError: torch.distributed is not initialised, or its backend does not serve the
                device.
        """
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised",
                remedy="call torch.distributed.init_process_group first, or give "
                "EngineGroups.single_process() for a job of one process",
            )
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        backend = backends.get(device.type)
        if backend is None:
            raise ConfigError(
                f"the process group has no backend for {device.type} tensors",
                remedy='call init_process_group with "cpu:gloo,cuda:nccl"',
            )
        exchange, gradients = TorchGroup(), TorchGroup(dist.new_group(backend=backend))
        is_on_host = device.type == "cpu"
        # NCCL connects in a group's first collective: here, in one order, and not in a backward
        # pass, where ranks may come to it with kernels of the other group under way.
        for group in () if is_on_host else (exchange, gradients):
            group.all_reduce(torch.zeros(1, device=device)).wait()
        control = gradients if is_on_host else TorchGroup(dist.new_group(backend="gloo"))
        return cls(
            exchange=exchange,
            gradients=gradients,
            control=control,
            snapshots=TorchGroup(dist.new_group(backend="gloo")),
        )
