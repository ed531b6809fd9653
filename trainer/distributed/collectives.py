"""What model, optimizer and moves need of a group of ranks: all-to-alls; and a group of one."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pacekeeper.trainer.groups.group import Group, PeerLost
from pacekeeper.trainer.hooks.compute_timers import SegmentClock
from pacekeeper.trainer.toy.model.flop_counter import WorkPass


class Posted(Protocol):
    """A collective that has begun."""

    def wait(self) -> None:
        """Until what is sent here has arrived. Raises PeerLost."""


class _Done:
    def wait(self) -> None:
        pass


DONE: Posted = _Done()


class Collectives(Group, Protocol):
    """What model and optimizer need of a group of ranks."""

    rank: int
    ranks: tuple[int, ...]

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        entered_synchronously: bool = False,
    ) -> None:
        """Send rows of `input` to the members, in the order of `ranks`; fill `output` alike.

        `entered_synchronously`: all members enter at once, as just after another collective: its
        time is that of the links, and counts as such.
        """

    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Posted:
        """Begin an all-to-all and go on; `output` is filled when it was waited for.

        Those of one group are posted in the same order by all of its members. Raises PeerLost.
        """

    def exchange(self, values: Sequence[float]) -> Tensor:
        """Everybody's values: [members, len(values)] float64, the same on all members."""

    def group(self, ranks: tuple[int, ...], name: str = "") -> "Collectives":
        """Some of the members, this one among them, ascending: each of these calls it alike.

        `name` keeps groups of the same ranks apart. Who is in several makes them in one order that
        all ranks agree on, or they wait for each other.
        """


class FabricGroup(ABC):
    """What makes `Group` (trainer/groups/group.py) of a fabric, for what both kinds serve."""

    rank: int
    ranks: tuple[int, ...]

    @abstractmethod
    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Posted:
        """As `Collectives.post`."""

    def all_gather(self, values: Tensor) -> Tensor:
        size = len(self.ranks)
        theirs = values.new_empty(size, *values.shape)
        self.post(theirs, torch.stack([values] * size), [1] * size, [1] * size).wait()
        return theirs

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Posted:
        return self.post(output, rows, list(receive), list(send))

    def all_reduce(self, values: Tensor) -> Posted:
        values.copy_(self.all_gather(values).sum(0))
        return DONE


class LocalFabric(FabricGroup):
    """A group of one: for a single process and for tests."""

    def __init__(self, rank: int = 0, clock: SegmentClock | None = None) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self._clock = clock

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        entered_synchronously: bool = False,
    ) -> None:
        if self._clock is not None:
            self._clock.pause()
        output.copy_(input)
        if self._clock is not None:
            self._clock.resume()

    def post(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Posted:
        output.copy_(input)
        return DONE

    def exchange(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([list(values)], dtype=torch.float64)

    def group(self, ranks: tuple[int, ...], name: str = "") -> "LocalFabric":
        assert ranks == self.ranks, "there is nobody else"
        return self


def exchanged(group: Collectives, values: Sequence[float]) -> Tensor:
    """What `Collectives.exchange` gives, by one all-to-all of the group. Raises PeerLost."""
    size = len(group.ranks)
    mine = torch.tensor([list(values)] * size, dtype=torch.float64)
    theirs = torch.empty_like(mine)
    group.all_to_all(theirs, mine, [1] * size, [1] * size)
    return theirs


def end_together(group: Collectives) -> None:
    """Before all raise the same: who ends first must not cost another its reason."""
    with contextlib.suppress(PeerLost):
        group.exchange([1.0])


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose gradient is the opposite one; both are boundaries of the work meter."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        fabric: Collectives,
        work: WorkPass,
        output_splits: list[int],
        input_splits: list[int],
        entered_synchronously: bool,
    ) -> Tensor:
        ctx.route = (fabric, work, work.boundary(), output_splits, input_splits)
        output = rows.new_empty((sum(output_splits), rows.shape[1]))
        fabric.all_to_all(
            output,
            rows.contiguous(),
            output_splits,
            input_splits,
            entered_synchronously=entered_synchronously,
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fabric, work, number, output_splits, input_splits = ctx.route
        work.backward_boundary(number)
        (gradient,) = gradients
        back = gradient.new_empty((sum(input_splits), gradient.shape[1]))
        fabric.all_to_all(back, gradient.contiguous(), input_splits, output_splits)
        return back, None, None, None, None, None


def all_to_all_autograd(
    rows: Tensor,
    fabric: Collectives,
    work: WorkPass,
    output_splits: list[int],
    input_splits: list[int],
    *,
    entered_synchronously: bool = False,
) -> Tensor:
    """Send `input_splits` rows [R, D] to the members of a group; what arrives, in rank order.

    Differentiable. `entered_synchronously`: as of `Collectives.all_to_all`. Raises PeerLost.
    """
    arrived: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        rows, fabric, work, output_splits, input_splits, entered_synchronously
    )
    return arrived
