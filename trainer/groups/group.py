"""Collectives that the engine needs of a group of ranks, over torch.distributed or in one process.

`TorchGroup` calls the backend of a process group (NCCL or gloo) on tensors where they are;
`SingleProcess` is a group of one. Neither decides anything, and neither copies to host memory.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

# Named so from PyTorch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class PeerLost(Exception):
    """A member of the group is lost, or this rank has left it: the group is of no more use.

    What its collectives were to fill is garbage.

    Attributes:
        is_silence: Nothing broke; a member did not answer for the whole timeout.
    """

    def __init__(self, why: str, *, is_silence: bool = False) -> None:
        super().__init__(why)
        self.is_silence = is_silence


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until its output may be read (NCCL: by the current stream).

        Raises:
            PeerLost: A member of an elastic group is lost, or this rank has left it.
        """


Messages = Sequence[tuple[int, Tensor]]
"""A tensor for or from each of some ranks; those between the same two ranks arrive in order."""


class Group(Protocol):
    """Ranks that call the same collectives in the same order.

    Those of an elastic group (`trainer/groups/elastic.py`) raise PeerLost.

    Attributes:
        rank: This process's rank in the job.
        ranks: Ranks of the members, ascending; rows are exchanged in this order.
    """

    rank: int
    ranks: tuple[int, ...]

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the members' `values` [...] as one tensor [members, ...]."""

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        """Start to exchange rows.

        Args:
            output: [sum(receive), ...], contiguous; filled when the returned object was waited for.
            rows: [sum(send), ...], contiguous; may not change before that.
            receive: Number of rows from each member.
            send: Number of rows to each member.
        """

    def all_reduce(self, values: Tensor) -> Pending:
        """Start to add up the members' `values` in place, with the same bits on all members."""

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        """Start to send and receive; the members at both ends of a message call it, no others.

        Args:
            sends: (rank, contiguous tensor that may not change before the wait), not empty.
            receives: (rank, contiguous tensor that is filled with the wait), not empty.
        """


class TorchGroup:
    """A process group of torch.distributed, of all ranks of the job or some.

    Args:
        group: The process group; None: the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))

    def all_gather(self, values: Tensor) -> Tensor:
        gathered = values.new_empty(len(self.ranks) * values.numel())
        _all_gather(gathered, values.reshape(-1), group=self._group)
        return gathered.view(len(self.ranks), *values.shape)

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        pending: Pending | None = dist.all_to_all_single(
            output, rows, list(receive), list(send), group=self._group, async_op=True
        )
        assert pending is not None, "async_op"
        return pending

    def all_reduce(self, values: Tensor) -> Pending:
        pending: Pending | None = dist.all_reduce(values, group=self._group, async_op=True)
        assert pending is not None, "async_op"
        return pending

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        ops = [dist.P2POp(dist.isend, tensor, rank, self._group) for rank, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, rank, self._group) for rank, tensor in receives]
        return AllOf(dist.batch_isend_irecv(ops) if ops else ())


class SingleProcess:
    """A group of one rank, without torch.distributed."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)

    def all_gather(self, values: Tensor) -> Tensor:
        return values[None]

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        output.copy_(rows)
        return _DONE

    def all_reduce(self, values: Tensor) -> Pending:
        return _DONE

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        assert not sends and not receives, "there is no other rank"
        return _DONE


class AllOf:
    """Several collectives under way."""

    def __init__(self, pending: Sequence[Pending]) -> None:
        self._pending = pending

    def wait(self) -> object:
        for one in self._pending:
            one.wait()
        return None


_DONE = AllOf(())
