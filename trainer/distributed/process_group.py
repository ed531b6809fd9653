"""The one process group of a generation: collectives that can be interrupted and time themselves.

A generation has its own prefix in the store, so a late rank can not enter it. Collectives wait in
ticks and look at the abort flag between them; anything that goes wrong in one is `PeerLost`, and
after that the fabric is only good for `close()`: contents of its buffers are garbage.
"""

import contextlib
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore, Store

from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.distributed.collectives import (
    Collectives,
    FabricGroup,
    LocalFabric,
    PeerLost,
    exchanged,
)
from pacekeeper.trainer.distributed.interruptible_gloo import (
    GLOO_TO_LEAVE,
    Waiting,
    Wire,
    gloo_connect,
    open_sockets,
    shutdown_sockets,
)
from pacekeeper.trainer.hooks.compute_timers import SegmentClock, TransferTimer

FORM_TIMEOUT_S = 10.0  # from "everybody is here" to the standing group; usually milliseconds
STORE_TIMEOUT_S = 5.0  # for one answer of the store, where nothing shorter is asked for
STOPPED_S = 1.0  # a look that comes so late was a stop of this process itself
_ARRIVAL_POLL_S = 0.002


class _Begun:
    """An all-to-all under way; `input` and `host` live as long as it does."""

    def __init__(
        self,
        fabric: "InterruptibleProcessGroup",
        work: dist.Work,
        input: Tensor,
        host: Tensor,
        output: Tensor,
    ) -> None:
        self._fabric, self._work, self._input = fabric, work, input
        self._host, self._output = host, output

    def wait(self) -> None:
        self.arrive()
        self.take_in()

    def arrive(self) -> None:
        self._fabric._await(self._work)

    def take_in(self) -> None:
        if self._host is not self._output:
            self._output.copy_(self._host)


class _Members(FabricGroup):
    """The collectives of a fabric, or of some of its members: `_group` is gloo's word for them."""

    rank: int
    ranks: tuple[int, ...]
    _group: Any  # a process group or a bare backend: both know alltoall_base, the stubs of one not

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
        try:
            work = self._group.alltoall_base(
                host_output, host_input, output_splits, input_splits, AllToAllOptions()
            )
        except RuntimeError as error:
            raise PeerLost(f"a collective broke: {_in_short(error)}") from None
        return _Begun(self._whole, work, host_input, host_output, output)

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
        self.transfers: TransferTimer | None = None
        self._is_aborted = is_aborted
        self._tick = timedelta(seconds=tick_s)
        self._timeout_s = timeout_s
        self._sockets: set[Wire] = set()
        self._parts: dict[tuple[tuple[int, ...], str], _Part] = {}
        self._cut_store = cut_store
        self._is_strange = is_strange
        self._waiting = Waiting(is_aborted=is_aborted, tick_s=tick_s, cut_store=cut_store)
        self._answer_s = STORE_TIMEOUT_S if answer_s is None else answer_s
        self._is_store_silent = False
        self._store = own = PrefixStore(f"group-{name or generation}", store)
        before: set[Wire] | None = None
        failure, is_silence = "", False
        form_s = min(timeout_s, FORM_TIMEOUT_S)
        try:
            self._await_members(own, timeout_s if arrive_s is None else arrive_s)
            before = open_sockets()
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
            self._sockets = open_sockets() - before
        if failure:
            self.close()
            raise PeerLost(failure, is_silence=is_silence)
        self._heard_s = time.monotonic()  # from all members, last
        self._group = dist.group.WORLD

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
        """Leave: cut the sockets, so that blocked peers notice at once, then free the group."""
        shutdown_sockets(wire for wire in self._sockets if not self._is_strange(wire))
        self._sockets = set()
        self._parts.clear()
        self._group = None
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

    def _form_part(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroupGloo:
        before, began_s = open_sockets(), time.monotonic()
        form_s = min(self._timeout_s, FORM_TIMEOUT_S)
        own = PrefixStore(f"part-{name}-{'-'.join(map(str, ranks))}", self._store)
        try:
            # Not by new_group(): it counts all groups of a rank, and ranks differ in theirs.
            made = gloo_connect(own, ranks.index(self.rank), len(ranks), form_s, self._waiting)
            made._set_default_timeout(timedelta(seconds=2.0 * self._timeout_s))
        except (RuntimeError, ValueError) as error:
            is_silence = self._is_store_silent or time.monotonic() - began_s >= form_s
            why = f"ranks {format_ranks(ranks)} formed no group: {_in_short(error)}"
            raise PeerLost(why, is_silence=is_silence) from None
        finally:
            self._sockets |= open_sockets() - before
        return made

    def _await(self, work: dist.Work) -> None:
        """Until it has ended, in ticks. Raises PeerLost."""
        entered_s = time.monotonic()
        # Who froze may have done so just after the last one, while this rank computed.
        counted_s = min(entered_s - self._heard_s, self._timeout_s / 4)
        give_up_s = entered_s + self._timeout_s - counted_s
        due_s = entered_s + self._tick.total_seconds() + STOPPED_S
        try:
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
                # While all of a job is stopped nobody is silent.
                give_up_s += max(0.0, (now_s := time.monotonic()) - due_s)
                due_s = now_s + self._tick.total_seconds() + STOPPED_S
                if now_s > give_up_s:
                    why = f"a member is silent for {self._timeout_s:.0f} s"
                    raise PeerLost(why, is_silence=True) from None
        except RuntimeError as error:
            raise PeerLost(f"a collective broke: {_in_short(error)}") from None
        self._heard_s = time.monotonic()


class _Part(_Members):
    """Some members of a fabric; it ends with the fabric."""

    def __init__(self, whole: InterruptibleProcessGroup, ranks: tuple[int, ...], name: str) -> None:
        self.rank = whole.rank
        self.ranks = ranks
        self._fabric = whole
        self._group = whole._form_part(ranks, name)

    @property
    def _whole(self) -> InterruptibleProcessGroup:
        return self._fabric

    def group(self, ranks: tuple[int, ...], name: str = "") -> Collectives:
        return self if ranks == self.ranks and not name else self._whole.group(ranks, name)


def _in_host_memory(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _in_short(error: Exception) -> str:
    """What a library says of a broken connection, without its source file and its guesses."""
    first = str(error).splitlines()[0]
    said = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ", "", first)
    return said.partition(". This is typically")[0][:200]
