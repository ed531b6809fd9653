"""The one process group of a generation: collectives that can be interrupted and time themselves.

A generation has its own prefix in the store, so a late rank can not enter it. Collectives wait in
ticks and look at the abort flag between them; anything that goes wrong in one is `PeerLost`, and
after that the fabric is only good for `close()`: contents of its buffers are garbage.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from pacekeeper.trainer.forming import GLOO_TO_LEAVE, Waiting
from pacekeeper.trainer.timing import SegmentClock, TransferClock
from pacekeeper.trainer.wires import Wire, cut, open_wires

FORM_TIMEOUT_S = 10.0  # from "everybody is here" to the standing group; usually milliseconds
STORE_TIMEOUT_S = 5.0  # for one answer of the store, where nothing shorter is asked for
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
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        is_together: bool = False,
    ) -> None:
        """Send rows of `input` to the members, in the order of `ranks`; fill `output` alike.

        `is_together`: all members enter it at once, as just after another collective: its time is
        that of the links, and counts as such.
        """

    def exchange(self, values: Sequence[float]) -> Tensor:
        """Everybody's values: [members, len(values)] float64, the same on all members."""

    def group(self, ranks: tuple[int, ...]) -> "Collectives":
        """Some of the members, this one among them, ascending: each of these calls it alike."""


class LocalFabric:
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
        is_together: bool = False,
    ) -> None:
        if self._clock is not None:
            self._clock.pause()
        output.copy_(input)
        if self._clock is not None:
            self._clock.resume()

    def exchange(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([list(values)], dtype=torch.float64)

    def group(self, ranks: tuple[int, ...]) -> "LocalFabric":
        assert ranks == self.ranks, "there is nobody else"
        return self


class Fabric:
    """A gloo group of `ranks` for one generation. Raises PeerLost where it can not be formed.

    `is_aborted` is asked between ticks: True means that a member is known to be dead. `clock`
    is paused around each collective, so that waiting never counts as compute; `transfers` is told
    of those that all enter together. `name` keeps two groups of one generation apart in a store;
    `cut_store` ends its connection, whoever waits in it. `timeout_s`: for a member that is silent
    in a collective, since the one before it, but a quarter less at most than since this one.
    `arrive_s`: for all members to come (None: `timeout_s`); `answer_s`: for one answer of the
    store. `is_strange` tells connections that others opened while the group formed: to stores.
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
        cut_store: Callable[[], None] = lambda: None,
        is_strange: Callable[[Wire], bool] = lambda _: False,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.generation = generation
        self.clock = clock
        self.transfers: TransferClock | None = None
        self._is_aborted = is_aborted
        self._tick = timedelta(seconds=tick_s)
        self._timeout_s = timeout_s
        self._sockets: set[Wire] = set()
        self._parts: dict[tuple[int, ...], _Part] = {}
        self._cut_store = cut_store
        self._is_strange = is_strange
        self._waiting = Waiting(is_aborted=is_aborted, tick_s=tick_s, cut_store=cut_store)
        self._answer_s = STORE_TIMEOUT_S if answer_s is None else answer_s
        self._is_store_silent = False
        own = PrefixStore(f"group-{name or generation}", store)
        before: set[Wire] | None = None
        failure, is_silence = "", False
        form_s = min(timeout_s, FORM_TIMEOUT_S)
        try:
            self._await_members(own, timeout_s if arrive_s is None else arrive_s)
            before = open_wires()
            began_s = time.monotonic()
            # It names the group's keys, and counts this rank's failed attempts, too: who had one
            # more than the others would look for them elsewhere, for ever.
            dist.distributed_c10d._world.group_count = 0
            dist.init_process_group(
                GLOO_TO_LEAVE,
                store=own,
                rank=ranks.index(rank),
                world_size=len(ranks),
                timeout=timedelta(seconds=form_s),
                pg_options=self._waiting,
            )
            # Ours is the shorter one: the group's own must never end a collective first.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0 * timeout_s))
        except (RuntimeError, ValueError) as error:
            failure = f"generation {generation} could not be formed: {_in_short(error)}"
            is_silence = self._is_store_silent
            if before is not None:  # all were here: who does not connect in time is frozen
                is_silence = is_silence or time.monotonic() - began_s >= form_s
        if before is not None:
            self._sockets = open_wires() - before
        if failure:
            self.close()
            raise PeerLost(failure, is_silence=is_silence)
        self._heard_s = time.monotonic()  # from all members, last

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        is_together: bool = False,
    ) -> None:
        """Along dimension 0, splits in rows, zero allowed. Raises PeerLost."""
        self._exchange_rows(
            self.ranks, None, output, input, output_splits, input_splits, is_together
        )

    def group(self, ranks: tuple[int, ...]) -> Collectives:
        """A gloo group of some members, for this generation. Raises PeerLost."""
        if ranks == self.ranks:
            return self
        if len(ranks) == 1:
            return LocalFabric(self.rank)
        if ranks not in self._parts:
            self._parts[ranks] = _Part(self, ranks)
        return self._parts[ranks]

    def _exchange_rows(
        self,
        ranks: tuple[int, ...],
        group: dist.ProcessGroup | None,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        is_together: bool,
    ) -> None:
        """Among the `ranks` of a `group` (None: all members)."""
        if self.clock is not None:
            self.clock.pause()
        # gloo speaks host memory; the copies lie outside the measured compute, and the transfer.
        is_host = input.device.type == "cpu"
        host_input = input if is_host else input.cpu()
        host_output = output if is_host else torch.empty(output.shape, dtype=output.dtype)
        began_s = time.perf_counter()
        self._all_to_all(group, host_output, host_input, output_splits, input_splits)
        if is_together and self.transfers is not None:
            own = ranks.index(self.rank)
            rows = sum(output_splits) + sum(input_splits) - output_splits[own] - input_splits[own]
            self.transfers.took(rows * input.element_size() * input.shape[1:].numel(), began_s)
        if not is_host:
            output.copy_(host_output)
        if self.clock is not None:
            self.clock.resume()

    def exchange(self, values: Sequence[float]) -> Tensor:
        """As an all-to-all: one round of wake-ups where a ring needs many. Raises PeerLost."""
        return exchanged(self, values)

    def close(self) -> None:
        """Leave: cut the sockets, so that blocked peers notice at once, then free the group."""
        cut(wire for wire in self._sockets if not self._is_strange(wire))
        self._sockets = set()
        self._parts.clear()
        with contextlib.suppress(RuntimeError, AssertionError, ValueError):
            dist.destroy_process_group()

    def _await_members(self, store: Store, arrive_s: float) -> None:
        """Until all are here: nobody connects to who never comes."""
        give_up_s = time.monotonic() + arrive_s
        with self._store_answers(self._answer_s):
            if store.add("arrived", 1) == len(self.ranks):
                store.set("complete", "1")
        while not self._are_all_here(store):
            if self._is_aborted():
                raise PeerLost(f"a member of generation {self.generation} is dead")
            if time.monotonic() > give_up_s:
                raise PeerLost(f"not all came within {arrive_s:.0f} s", is_silence=True)

    def _are_all_here(self, store: Store) -> bool:
        """Look for one tick."""
        tick_s = self._tick.total_seconds()
        until_s = time.monotonic() + tick_s
        with self._store_answers(tick_s + self._answer_s):
            while not store.check(["complete"]):
                if time.monotonic() > until_s:
                    return False
                time.sleep(_ARRIVAL_POLL_S)
        return True

    @contextlib.contextmanager
    def _store_answers(self, limit_s: float) -> Iterator[None]:
        """What is asked inside has this long: the store's client has no deadline of its own.

        The host of the store may be frozen. The client is of no use after that.
        """

        def give_up() -> None:
            self._is_store_silent = True
            self._cut_store()

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _form_part(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        before, began_s = open_wires(), time.monotonic()
        form_s = min(self._timeout_s, FORM_TIMEOUT_S)
        try:
            made: dist.ProcessGroup = dist.new_group(
                [self.ranks.index(rank) for rank in ranks],
                timeout=timedelta(seconds=form_s),
                use_local_synchronization=True,  # the others make groups of their own meanwhile
                pg_options=self._waiting,
            )
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0 * self._timeout_s), made)
        except (RuntimeError, ValueError) as error:
            is_silence = self._is_store_silent or time.monotonic() - began_s >= form_s
            why = f"ranks {list(ranks)} formed no group: {_in_short(error)}"
            raise PeerLost(why, is_silence=is_silence) from None
        finally:
            self._sockets |= open_wires() - before
        return made

    def _all_to_all(
        self,
        group: dist.ProcessGroup | None,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
    ) -> None:
        entered_s = time.monotonic()
        # Who froze may have done so just after the last one, while this rank computed.
        counted_s = min(entered_s - self._heard_s, self._timeout_s / 4)
        give_up_s = entered_s + self._timeout_s - counted_s
        try:
            work = dist.all_to_all_single(
                output, input, output_splits, input_splits, group=group, async_op=True
            )
            assert work is not None, "an asynchronous collective returns its handle"
            while True:
                try:
                    work.wait(self._tick)
                    break
                except RuntimeError as error:
                    if work.is_completed():  # meanwhile: whether well or not, it says so at once
                        work.wait(self._tick)
                        break
                    # A timed-out wait does no harm; whatever else is a broken group.
                    if "timed out" not in str(error).lower():
                        raise
                if self._is_aborted():
                    raise PeerLost(f"a member of generation {self.generation} is dead") from None
                if time.monotonic() > give_up_s:
                    why = f"a member is silent for {self._timeout_s:.0f} s"
                    raise PeerLost(why, is_silence=True) from None
        except RuntimeError as error:
            raise PeerLost(f"a collective broke: {_in_short(error)}") from None
        self._heard_s = time.monotonic()


class _Part:
    """Some members of a fabric; it ends with the fabric."""

    def __init__(self, whole: Fabric, ranks: tuple[int, ...]) -> None:
        self.rank = whole.rank
        self.ranks = ranks
        self._whole = whole
        self._group = whole._form_part(ranks)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        *,
        is_together: bool = False,
    ) -> None:
        self._whole._exchange_rows(
            self.ranks, self._group, output, input, output_splits, input_splits, is_together
        )

    def exchange(self, values: Sequence[float]) -> Tensor:
        return exchanged(self, values)

    def group(self, ranks: tuple[int, ...]) -> Collectives:
        return self if ranks == self.ranks else self._whole.group(ranks)


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


def _in_short(error: Exception) -> str:
    """What a library says of a broken connection, without its source file and its guesses."""
    first = str(error).splitlines()[0]
    said = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ", "", first)
    return said.partition(". This is typically")[0][:200]
