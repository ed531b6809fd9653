"""Forms the groups of an elastic engine, one generation after the other.

`make_former` chooses how this torch can do it on a device. A generation is left by `abort` and
formed anew under another name; who its members are is agreed elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.groups.elastic import Connector, Members
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.reconfiguring import ReconfiguringConnector, can_reconfigure
from pacekeeper.trainer.groups.waiting import WaitLimits


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

    def form(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        *,
        is_aborted: Callable[[], bool],
        limits: WaitLimits,
    ) -> Generation:
        """Wait until all members have come, and connect them.

        Args:
            store: Where they meet. After PeerLost a thread that was left may still use this
                client: make another one.
            name: Of the generation, among all that use the store: a late rank enters no other one.
            rank: This process's rank in the job.
            ranks: Of the members, ascending.
            is_aborted: Asked every tick, by any thread but one at a time: whether a member is
                known to be dead, so that nobody need wait for it.
            limits: How long to wait.

        Raises:
            PeerLost: A member is dead, did not come or does not connect, or the store is silent.
        """
        members = Members(
            name=name, rank=rank, ranks=ranks, store=store, is_aborted=is_aborted, limits=limits
        )
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

    def form(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        *,
        is_aborted: Callable[[], bool],
        limits: WaitLimits,
    ) -> Generation:
        if len(ranks) == 1:
            return Generation(groups=EngineGroups.single_process(rank))
        backend = "cpu:gloo,cuda:nccl" if self._of.type == "cuda" else "gloo"
        own = PrefixStore(f"group-{name}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=len(ranks))
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
