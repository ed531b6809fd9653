"""Forms the groups of an elastic engine, one generation after the other.

`make_former` chooses how this torch can do it on a device. A generation is left by `abort` and
formed anew under another name; who its members are is agreed elsewhere.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.groups.elastic import Connector, Members
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.reconfiguring import ReconfiguringConnector, can_reconfigure


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Groups of one generation of ranks.

    After the first PeerLost of one of them call `abort`, so that the other members get it, too.

    Attributes:
        groups: All of the same ranks; their collectives raise PeerLost.
    """

    groups: EngineGroups
    _members: Members | None = None

    def abort(self) -> None:
        """Leave this generation, and no other one; from any thread, as often as one likes.

        Whoever waits in one of its groups gets PeerLost: here within a tick, at members that wait
        for this one as soon as its connections break, at the others when `is_aborted` says so.
        gloo may use the tensors of a collective a little longer: they are not used again.
        """
        if self._members is not None:
            self._members.abort()

    def check(self) -> None:
        """Raise PeerLost where the generation was left or broke, or a member is known to be dead.

        On CUDA collectives end with garbage then: check before results are used, and when anything
        fails that may be due to such results.
        """
        if self._members is not None:
            self._members.check()


class Former:
    """Forms generations.

    Args:
        device: Connects groups of tensors on the device.
        host: Connects groups of tensors in host memory.
    """

    def __init__(self, device: Connector, host: Connector) -> None:
        self._device, self._host = device, host

    def form(self, members: Members) -> Generation:
        """Wait until all members have come, and connect them.

        Raises:
            PeerLost: A member is dead, did not come or does not connect, or the store is silent.
        """
        try:
            members.meet()
            groups = EngineGroups(
                exchange=members.connect(self._device, "exchange"),
                gradients=members.connect(self._device, "gradients"),
                control=members.connect(self._host, "control"),
                snapshots=members.connect(self._host, "snapshots"),
            )
        except BaseException:
            members.abort()
            raise
        return Generation(groups=groups, _members=members)


class TorchFormer(Former):
    """Forms one generation by torch.distributed: nobody can leave its groups, nothing is survived.

    Args:
        device: Of the tensors of exchanges and gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._of = device

    def form(self, members: Members) -> Generation:
        rank, size = members.rank, len(members.ranks)
        if size == 1:
            return Generation(groups=EngineGroups.single_process(rank))
        backend = "cpu:gloo,cuda:nccl" if self._of.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=members.store, rank=rank, world_size=size)
        return Generation(groups=EngineGroups.from_torch(self._of))


def make_former(device: torch.device) -> Former:
    """Choose how groups of tensors on `device` are formed.

    Raises:
        ConfigError: The device is no CPU, and this torch cannot leave a group there.
    """
    host = GlooConnector()
    if device.type == "cpu":
        return Former(host, host)
    if not can_reconfigure(device):
        raise ConfigError(
            f"torch {torch.__version__} cannot leave a broken group on {device.type}",
            remedy="elastic training on CUDA needs torch 2.15 or later; start the ranks by "
            "torchrun, which survives nothing, or use --device cpu",
        )
    return Former(ReconfiguringConnector(device), host)
