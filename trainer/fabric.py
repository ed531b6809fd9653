"""The one process group of a generation: collectives that can be interrupted and time themselves.

A generation has its own prefix in the store, so a late rank can not enter it. Collectives wait in
ticks and look at the abort flag between them; anything that goes wrong in one is `PeerLost`, and
after that the fabric is only good for `close()`: contents of its buffers are garbage.
"""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from pacekeeper.trainer.timing import SegmentClock

FORM_TIMEOUT_S = 10.0  # from "everybody is here" to the standing group; usually milliseconds
_ARRIVAL_POLL_S = 0.002


class PeerLost(Exception):
    """A collective broke, or a member is known to be dead: leave this generation.

    `is_silence`: nothing broke, a member just did not answer for the whole timeout.
    """

    def __init__(self, why: str, *, is_silence: bool = False) -> None:
        super().__init__(why)
        self.is_silence = is_silence


class Collectives(Protocol):
    """What model and optimizer need of a group of ranks."""

    rank: int
    ranks: tuple[int, ...]

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Send rows of `input` to the members, in the order of `ranks`; fill `output` alike."""

    def exchange(self, values: Sequence[float]) -> Tensor:
        """Everybody's values: [members, len(values)] float64, the same on all members."""


class LocalFabric:
    """A group of one: for a single process and for tests."""

    def __init__(self, rank: int = 0, clock: SegmentClock | None = None) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self._clock = clock

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        if self._clock is not None:
            self._clock.pause()
        output.copy_(input)
        if self._clock is not None:
            self._clock.resume()

    def exchange(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([list(values)], dtype=torch.float64)


class Fabric:
    """A gloo group of `ranks` for one generation. Raises PeerLost where it can not be formed.

    `is_aborted` is asked between ticks: True means that a member is known to be dead. `clock`
    is paused around each collective, so that waiting never counts as compute.
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
        clock: SegmentClock | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.generation = generation
        self.clock = clock
        self._is_aborted = is_aborted
        self._tick = timedelta(seconds=tick_s)
        self._timeout_s = timeout_s
        self._sockets: set[tuple[int, int]] = set()
        own = PrefixStore(f"generation-{generation}", store)
        before: set[tuple[int, int]] | None = None
        failure = ""
        try:
            self._await_members(own)
            before = _sockets()
            dist.init_process_group(
                "gloo",
                store=own,
                rank=ranks.index(rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=min(timeout_s, FORM_TIMEOUT_S)),
            )
            # Ours is the shorter one: the group's own must never end a collective first.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0 * timeout_s))
        except (RuntimeError, ValueError) as error:
            failure = str(error).splitlines()[0][:200]
        if before is not None:
            self._sockets = _sockets() - before
        if failure:
            self.close()
            raise PeerLost(f"generation {generation} could not be formed: {failure}")

    def all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Along dimension 0, splits in rows, zero allowed. Raises PeerLost."""
        if self.clock is not None:
            self.clock.pause()
        self._all_to_all(output, input, output_splits, input_splits)
        if self.clock is not None:
            self.clock.resume()

    def exchange(self, values: Sequence[float]) -> Tensor:
        """As an all-to-all: one round of wake-ups where a ring needs many. Raises PeerLost."""
        size = len(self.ranks)
        mine = torch.tensor([list(values)] * size, dtype=torch.float64)
        theirs = torch.empty_like(mine)
        self.all_to_all(theirs, mine, [1] * size, [1] * size)
        return theirs

    def close(self) -> None:
        """Leave: cut the sockets, so that blocked peers notice at once, then free the group."""
        # A descriptor that was closed meanwhile may be another connection's by now.
        for descriptor, _ in self._sockets & _sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.getpeername()  # a listening socket has none: gloo dies if that one is cut
                copy.shutdown(socket.SHUT_RDWR)
        self._sockets = set()
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):
            dist.destroy_process_group()

    def _await_members(self, store: Store) -> None:
        """Until all are here: forming the group can not be interrupted, waiting for it can."""
        give_up_s = time.monotonic() + self._timeout_s
        look_s = time.monotonic() + self._tick.total_seconds()
        if store.add("arrived", 1) == len(self.ranks):
            store.set("complete", "1")
        while not store.check(["complete"]):
            now_s = time.monotonic()
            if now_s > look_s:
                look_s = now_s + self._tick.total_seconds()
                if self._is_aborted():
                    raise PeerLost(f"a member of generation {self.generation} is dead")
            if now_s > give_up_s:
                raise PeerLost(f"not all came within {self._timeout_s:.0f} s", is_silence=True)
            time.sleep(_ARRIVAL_POLL_S)

    def _all_to_all(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        give_up_s = time.monotonic() + self._timeout_s
        try:
            work = dist.all_to_all_single(output, input, output_splits, input_splits, async_op=True)
            assert work is not None, "an asynchronous collective returns its handle"
            while True:
                try:
                    work.wait(self._tick)
                    return
                except RuntimeError as error:
                    # A timed-out wait does no harm; whatever else is a broken group.
                    if work.is_completed() or "timed out" not in str(error).lower():
                        raise
                if self._is_aborted():
                    raise PeerLost(f"a member of generation {self.generation} is dead") from None
                if time.monotonic() > give_up_s:
                    why = f"a member is silent for {self._timeout_s:.0f} s"
                    raise PeerLost(why, is_silence=True) from None
        except RuntimeError as error:
            raise PeerLost(f"a collective broke: {str(error).splitlines()[0][:200]}") from None


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets: the inode tells a re-used descriptor."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
