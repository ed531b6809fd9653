"""The process group of the byte model's trainer: all-to-alls of one generation that can be left.

A generation has its own prefix in the store, so a late rank can not enter it. Anything that goes
wrong in a collective is `PeerLost`, and after that the fabric is only good for `close()`: contents
of its buffers are garbage. How groups are formed and left: trainer/groups/elastic.py.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from pacekeeper.trainer.distributed.collectives import (
    Collectives,
    FabricGroup,
    LocalFabric,
    exchanged,
)
from pacekeeper.trainer.groups.elastic import Members
from pacekeeper.trainer.groups.gloo import GlooConnector
from pacekeeper.trainer.groups.group import Group, Pending
from pacekeeper.trainer.groups.waiting import WaitLimits
from pacekeeper.trainer.hooks.compute_timers import SegmentClock, TransferTimer

FORM_TIMEOUT_S = 10.0  # from "everybody is here" to the standing group; usually milliseconds
STORE_TIMEOUT_S = 5.0  # for one answer of the store, where nothing shorter is asked for
_GLOO = GlooConnector()


class _Begun:
    """An all-to-all under way; `input` and `host` live as long as it does."""

    def __init__(self, pending: Pending, input: Tensor, host: Tensor, output: Tensor) -> None:
        self._pending, self._input = pending, input
        self._host, self._output = host, output

    def wait(self) -> None:
        self.arrive()
        self.take_in()

    def arrive(self) -> None:
        self._pending.wait()

    def take_in(self) -> None:
        if self._host is not self._output:
            self._output.copy_(self._host)


class _Members(FabricGroup):
    """The collectives of a fabric, or of some of its members, over `_group`."""

    rank: int
    ranks: tuple[int, ...]
    _group: Group

    @property
    @abstractmethod
    def _whole(self) -> "InterruptibleProcessGroup":
        """The fabric itself: it knows clock, ticks and deaths. No cycle: few are ever collected."""

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        entered_synchronously: bool = False,
    ) -> None:
        """Along dimension 0, splits in rows, zero allowed. Raises PeerLost."""
        whole = self._whole
        if whole.clock is not None:
            whole.clock.pause()
        # gloo speaks host memory; the copies lie outside the measured compute, and the transfer.
        host_input = _in_host_memory(input)
        began_s = time.perf_counter()
        begun = self.post(output, host_input, output_splits, input_splits)
        begun.arrive()
        if entered_synchronously and whole.transfers is not None:
            own = self.ranks.index(self.rank)
            rows = sum(output_splits) + sum(input_splits) - output_splits[own] - input_splits[own]
            whole.transfers.add(rows * input.element_size() * input.shape[1:].numel(), began_s)
        begun.take_in()
        if whole.clock is not None:
            whole.clock.resume()

    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> _Begun:
        is_host = output.device.type == "cpu"
        host_output = output if is_host else torch.empty(output.shape, dtype=output.dtype)
        host_input = _in_host_memory(input)
        pending = self._group.all_to_all_rows(host_output, host_input, output_splits, input_splits)
        return _Begun(pending, host_input, host_output, output)

    @abstractmethod
    def group(self, ranks: tuple[int, ...], name: str = "") -> Collectives:
        """As `Collectives.group`."""

    def exchange(self, values: Sequence[float]) -> Tensor:
        """As an all-to-all: one round of wake-ups where a ring needs many. Raises PeerLost."""
        return exchanged(self, values)


class InterruptibleProcessGroup(_Members):
    """A gloo group of `ranks` for one generation. Raises PeerLost where it can not be formed.

    `is_aborted` is asked between ticks: True means that a member is known to be dead. `clock`
    is paused around each collective, so that waiting never counts as compute; `transfers` is told
    of those that all enter together. `name` keeps two groups of one generation apart in a store.
    `timeout_s`: for a member that is silent in a collective, since the one before it, but a quarter
    less at most than since this one. `arrive_s`: for all members to come (None: `timeout_s`);
    `answer_s`: for one answer of the store, of which another client is needed after PeerLost.
    """

    def __init__(
        self,
        *,
        store: Store,
        generation: int,
        rank: int,
        ranks: tuple[int, ...],
        is_aborted: Callable[[], bool],
        tick_s: float,
        timeout_s: float,
        arrive_s: float | None = None,
        answer_s: float | None = None,
        clock: SegmentClock | None = None,
        name: str = "",
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.generation = generation
        self.clock = clock
        self.transfers: TransferTimer | None = None
        self._parts: dict[tuple[tuple[int, ...], str], _Part] = {}
        self._members = Members(
            name=name or str(generation),
            rank=rank,
            ranks=ranks,
            store=store,
            is_aborted=is_aborted,
            limits=WaitLimits(
                tick_s=tick_s,
                timeout_s=timeout_s,
                arrive_s=arrive_s,
                answer_s=STORE_TIMEOUT_S if answer_s is None else answer_s,
                connect_s=min(timeout_s, FORM_TIMEOUT_S),
            ),
        )
        self._members.meet()
        self._group = self._members.connect(_GLOO, "all")

    @property
    def _whole(self) -> "InterruptibleProcessGroup":
        return self

    def group(self, ranks: tuple[int, ...], name: str = "") -> Collectives:
        """A gloo group of some members, for this generation. Raises PeerLost."""
        if ranks == self.ranks and not name:
            return self
        if len(ranks) == 1:
            return LocalFabric(self.rank)
        if (ranks, name) not in self._parts:
            self._parts[ranks, name] = _Part(self, ranks, name)
        return self._parts[ranks, name]

    def close(self) -> None:
        """Leave: blocked peers notice at once."""
        self._members.abort()
        self._parts.clear()


class _Part(_Members):
    """Some members of a fabric; it ends with the fabric."""

    def __init__(self, whole: InterruptibleProcessGroup, ranks: tuple[int, ...], name: str) -> None:
        self.rank = whole.rank
        self.ranks = ranks
        self._fabric = whole
        self._group = whole._members.connect(_GLOO, f"part-{name}", ranks)

    @property
    def _whole(self) -> InterruptibleProcessGroup:
        return self._fabric

    def group(self, ranks: tuple[int, ...], name: str = "") -> Collectives:
        return self if ranks == self.ranks and not name else self._whole.group(ranks, name)


def _in_host_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()
