"""Groups of one generation of ranks: left from any thread, and formed anew, without sockets.

`Members` is the lower layer: it waits until all members have come, connects groups of them by a
`Connector`, waits for collectives and leaves them. A generation has names of its own in the store,
so that a late rank can not enter it. Nothing here decides who is dead or who goes on.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    PrefixStore,
    Store,
)

from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.groups.group import (
    AllOf,
    Group,
    Messages,
    PeerLost,
    Pending,
    SingleProcess,
)
from pacekeeper.trainer.groups.waiting import Deadline, WaitLimits, run_leavable

_log = logging.getLogger(__name__)
Backend = Any  # a backend of torch: the stubs lack most of their collectives
_ARRIVAL_POLL_S = 0.002
_ENDING_POLL_S = 0.01
_STUCK_S = 1.0  # a collective that does not start, or end, for so long after it was interrupted


class Connection(Protocol):
    """The backend of one group of one generation.

    Attributes:
        backend: Where collectives are started; refer to it here only, so that it is destroyed
            where that may block.
        blocks_host: Whether waiting for a collective blocks the host, not the device's stream.
    """

    backend: Backend
    blocks_host: bool

    def interrupt(self) -> None:
        """Let collectives under way fail, here and at the other members, as far as possible."""

    def retire(self, *, is_idle: bool) -> None:
        """Give up the backend after `interrupt`, for good or for a later generation; may block.

        Args:
            is_idle: Whether all its collectives have ended.
        """


class Connector(Protocol):
    """Connects members of a generation, in one way."""

    def connect(self, store: Store, position: int, size: int, limits: WaitLimits) -> Connection:
        """Connect with the other members; blocks, and runs in a thread that may be left.

        Args:
            store: Of this group of this generation alone.
            position: Of this rank among the members.
            size: Number of members.
            limits: How long to wait.

        Raises:
            RuntimeError: They did not connect.
        """


class Members:
    """The members of one generation.

    Args:
        store: Where they meet. After PeerLost a thread that was left may use it: make another one.
        name: Of the generation, among all that use the store: a late rank enters no other one.
        rank: This process's rank in the job.
        ranks: Of the members, ascending.
        is_aborted: Asked every tick, by any thread, one at a time: whether a member is known to be
            dead, so that nobody need wait for it.
        limits: How long to wait.

    Attributes:
        waiting: Returns a context that the host's waits for members are in.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        *,
        is_aborted: Callable[[], bool],
        limits: WaitLimits,
    ) -> None:
        self.name, self.rank, self.ranks, self.limits = name, rank, ranks, limits
        self.store = PrefixStore(f"group-{name}", store)
        self._whole_store = store  # one written in Python must outlive what torch makes of it
        self._is_aborted = is_aborted
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self._asking = threading.Lock()
        self._lock = threading.Lock()  # of the two below
        self._loss: tuple[str, bool] | None = None
        self._groups: list[ElasticGroup] = []
        self._tick = timedelta(seconds=limits.tick_s)
        self._heard_s = time.monotonic()
        self._newest: dist.Work | None = None  # of collectives on the device
        self._watch: threading.Thread | None = None

    def meet(self) -> None:
        """Wait until all members have come: nobody connects to one that never comes.

        Raises:
            PeerLost: One is dead, or did not come in time, or the store is silent.
        """
        if len(self.ranks) == 1:
            return
        limits = self.limits
        arrive_s = limits.timeout_s if limits.arrive_s is None else limits.arrive_s
        arrival = Deadline(arrive_s, limits.tick_s)
        answer = Deadline(limits.answer_s, limits.tick_s)

        def arrive(is_left: Callable[[], bool]) -> None:
            if self.store.add("arrived", 1) == len(self.ranks):
                self.store.set("complete", "1")
            answer.restart()
            while not is_left() and not self.store.check(["complete"]):
                answer.restart()
                time.sleep(_ARRIVAL_POLL_S)

        def watch() -> None:
            self.check()
            if answer.has_passed():
                self.raise_lost(f"the store is silent for {limits.answer_s:.1f} s", is_silence=True)
            if arrival.has_passed():
                self.raise_lost(f"not all members came within {arrive_s:.0f} s", is_silence=True)

        try:
            run_leavable(arrive, watch=watch, tick_s=limits.tick_s, name="arrival")
        except RuntimeError as error:
            self.raise_lost(f"the store is gone: {in_short(error)}")
        self._heard_s = time.monotonic()

    def connect(
        self, connector: Connector, name: str, ranks: tuple[int, ...] | None = None
    ) -> Group:
        """Form a group of the members, or of some: each of these calls it alike.

        Args:
            connector: Makes the backend.
            name: Of the group, among those of the same ranks.
            ranks: This rank and others, ascending; None: all members.

        Raises:
            PeerLost: One is dead, or does not connect in time.
        """
        ranks, limits = ranks or self.ranks, self.limits
        if len(ranks) == 1:
            return SingleProcess(self.rank)
        store = PrefixStore(f"{name}-{'-'.join(map(str, ranks))}", self.store)
        end = Deadline(limits.connect_s, limits.tick_s)

        def watch() -> None:
            self.check()
            if end.has_passed():
                why = f"ranks {format_ranks(ranks)} do not connect within {limits.connect_s:.0f} s"
                self.raise_lost(why, is_silence=True)

        position = ranks.index(self.rank)
        try:
            connection = run_leavable(
                lambda _: connector.connect(store, position, len(ranks), self.limits),
                watch=watch,
                tick_s=limits.tick_s,
                discard=_discard,
                name="connect",
            )
        except (RuntimeError, ValueError) as error:
            self.raise_lost(f"ranks {format_ranks(ranks)} formed no group: {in_short(error)}")
        group = ElasticGroup(self, connection, ranks)
        with self._lock:
            is_lost = self._loss is not None
            if not is_lost:
                self._groups.append(group)
        if is_lost:
            group.leave()
            self.raise_if_lost()
        self._heard_s = time.monotonic()
        if not connection.blocks_host and self._watch is None:
            self._watch = threading.Thread(target=self._watch_device, daemon=True, name="device")
            self._watch.start()
        return group

    def abort(self, why: str = "this rank has left it", *, is_silence: bool = False) -> None:
        """Leave the generation, from any thread, once and for all; the first reason counts.

        Whoever waits in one of its groups gets PeerLost, at once or after a tick; the other members
        get it at once where the backend can let them know.

        Args:
            why: What later collectives say.
            is_silence: Whether they say that a member was silent.
        """
        with self._lock:
            self._loss = self._loss or (why, is_silence)
            groups, self._groups = self._groups, []
        for group in groups:
            group.leave()

    def check(self) -> None:
        """Raise PeerLost where this process has left the generation, or a member is dead.

        Stores may be asked: not for every collective.
        """
        self.raise_if_lost()
        with self._asking:
            is_aborted = self._is_aborted()
        if is_aborted:
            self.raise_lost("a member is dead")

    def raise_if_lost(self) -> None:
        """Raise PeerLost where this process has left the generation. Costs nothing."""
        if self._loss is not None:
            self.raise_lost("")

    def raise_lost(self, why: str, *, is_silence: bool = False) -> NoReturn:
        """Raise PeerLost because of `why`, or why the generation was left before."""
        why, is_silence = self._loss or (why, is_silence)
        raise PeerLost(f"generation {self.name}: {why}", is_silence=is_silence)

    def await_host(self, work: dist.Work) -> None:
        """Block until a collective has ended.

        Raises:
            PeerLost: It failed, or a member is dead or silent, or the generation was left.
        """
        watch = self._watch_silence()
        with self.waiting():
            while not self._has_ended(work):
                watch()
        self._heard_s = time.monotonic()

    def await_messages(self, works: Sequence[dist.Work]) -> None:
        """Block until messages have arrived; errors as of `await_host`.

        A wait for a message of gloo closes its connection when it times out: only a thread that may
        be left waits for it.
        """
        with self.waiting():
            why = run_leavable(
                lambda _: next(filter(None, map(_failure, works)), ""),
                watch=self._watch_silence(),
                tick_s=self.limits.tick_s,
                name="messages",
            )
        if why:
            self.raise_lost(f"a message broke: {why}")
        self._heard_s = time.monotonic()

    def _watch_silence(self) -> Callable[[], None]:
        """What to call every tick of a wait: raises PeerLost where it is in vain."""
        timeout_s, tick_s = self.limits.timeout_s, self.limits.tick_s
        # Who froze may have done so just after the collective before, while this rank computed.
        waited_s = min(time.monotonic() - self._heard_s, timeout_s / 4)
        end = Deadline(timeout_s - waited_s, tick_s)

        def watch() -> None:
            self.check()
            if end.has_passed():
                self.raise_lost(f"a member is silent for {timeout_s:.1f} s", is_silence=True)

        return watch

    def _has_ended(self, work: dist.Work) -> bool:
        """Wait for one tick. Raises PeerLost where the collective failed."""
        why = _failure(work, self._tick)
        if why and work.is_completed():
            why = _failure(work, self._tick)  # perhaps just after the tick: how it ended
        elif "timed out" in why.lower():
            return False  # a wait that timed out does no harm
        if why:
            self.raise_lost(f"a collective broke: {why}")
        return True

    def started_on_device(self, work: dist.Work) -> None:
        """Let the watching thread see that a collective was given to the device."""
        self._newest = work

    def _watch_device(self) -> None:
        """Ask who is dead while the host runs ahead of the device, or waits for it."""
        silence = Deadline(self.limits.timeout_s, self.limits.tick_s)
        watched: dist.Work | None = None
        try:
            while True:
                time.sleep(self.limits.tick_s)
                self.check()
                # One at a time: its tensors live as long as it does.
                if watched is None or watched.is_completed():
                    watched, self._newest = self._newest, None
                    silence.restart()
                elif silence.has_passed():
                    why = f"no collective ended for {self.limits.timeout_s:.1f} s"
                    self.raise_lost(why, is_silence=True)
        except PeerLost as lost:  # the host may be blocked until the collectives end
            _, _, why = str(lost).partition(": ")
            self.abort(why, is_silence=lost.is_silence)
        except Exception as error:  # of a store: whoever waits must not do so for ever
            self.abort(str(error))
            raise


class ElasticGroup:
    """Some or all members of a generation; collectives raise PeerLost (`Group`)."""

    def __init__(self, members: Members, connection: Connection, ranks: tuple[int, ...]) -> None:
        self.rank, self.ranks = members.rank, ranks
        self._members, self._connection = members, connection
        self._starting = threading.Lock()
        self._open: set[dist.Work] = set()  # not waited for; kept while gloo writes its tensors

    def all_gather(self, values: Tensor) -> Tensor:
        gathered = values.new_empty(len(self.ranks) * values.numel())
        own = values.reshape(-1)
        self._start(lambda to: to._allgather_base(gathered, own, AllgatherOptions())).wait()
        return gathered.view(len(self.ranks), *values.shape)

    def all_to_all_rows(
        self, output: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Pending:
        splits = list(receive), list(send)
        return self._start(lambda to: to.alltoall_base(output, rows, *splits, AllToAllOptions()))

    def all_reduce(self, values: Tensor) -> Pending:
        return self._start(lambda to: to.allreduce([values], AllreduceOptions()))

    def point_to_point(self, sends: Messages, receives: Messages) -> Pending:
        at = {rank: position for position, rank in enumerate(self.ranks)}
        calls = [partial(_send, tensor=tensor, to=at[rank]) for rank, tensor in sends]
        calls += [partial(_receive, tensor=tensor, source=at[rank]) for rank, tensor in receives]
        if self._connection.blocks_host:
            return _Messages(self._members, [self._started(call) for call in calls], self._open)

        def together(backend: Backend) -> dist.Work:  # else a send would wait for its receiver
            device = (sends or receives)[0][1].device
            backend._start_coalescing(device)
            for call in calls:
                call(backend)
            work: dist.Work = backend._end_coalescing(device)
            return work

        return self._pending(self._started(together)) if calls else AllOf(())

    def leave(self) -> None:
        """Let what is under way fail, in a thread of its own: the generation is over."""
        threading.Thread(target=self._end, daemon=True, name="leave").start()

    def _end(self) -> None:
        is_idle = _interrupt(self._connection)
        end_s = time.monotonic() + _STUCK_S
        # Nobody starts a collective any more; a thread may be stuck in starting one.
        if is_idle := is_idle and self._starting.acquire(timeout=_STUCK_S):
            self._starting.release()
        while is_idle and not all(work.is_completed() for work in tuple(self._open)):
            is_idle = time.monotonic() < end_s
            time.sleep(_ENDING_POLL_S)
        self._open.clear()
        self._connection.retire(is_idle=is_idle)

    def _start(self, start: Callable[[Backend], dist.Work]) -> Pending:
        return self._pending(self._started(start, dist.DistError))

    def _started(
        self, start: Callable[[Backend], dist.Work], broken: type[Exception] = RuntimeError
    ) -> dist.Work:
        failure = ""
        with self._starting:  # in no other generation: some backends serve the next one, too
            self._members.raise_if_lost()
            try:
                work = start(self._connection.backend)
                self._open.add(work)
            except broken as error:  # what else is raised here is the caller's mistake
                failure = in_short(error)
        if failure:
            self._members.raise_lost(f"a collective broke: {failure}")
        return work

    def _pending(self, work: dist.Work) -> Pending:
        if self._connection.blocks_host:
            return _OnHost(self._members, work, self._open)
        self._members.started_on_device(work)
        return _OnDevice(self._members, work, self._open)


class _OnHost:
    __slots__ = ("_members", "_open", "_work")

    def __init__(self, members: Members, work: dist.Work, open_works: set[dist.Work]) -> None:
        self._members, self._work, self._open = members, work, open_works

    def wait(self) -> None:
        self._members.await_host(self._work)
        self._open.discard(self._work)


class _Messages:
    __slots__ = ("_members", "_open", "_works")

    def __init__(
        self, members: Members, works: Sequence[dist.Work], open_works: set[dist.Work]
    ) -> None:
        self._members, self._works, self._open = members, works, open_works

    def wait(self) -> None:
        if self._works:
            self._members.await_messages(self._works)
            self._open.difference_update(self._works)


class _OnDevice(_OnHost):
    __slots__ = ()

    def wait(self) -> None:
        why = _failure(self._work)  # of the stream's wait; with a timeout the host would wait
        self._members.raise_if_lost()
        if why:
            self._members.raise_lost(f"a collective broke: {why}")
        self._open.discard(self._work)


def _send(backend: Backend, *, tensor: Tensor, to: int) -> dist.Work:
    work: dist.Work = backend.send([tensor], to, 0)
    return work


def _receive(backend: Backend, *, tensor: Tensor, source: int) -> dist.Work:
    work: dist.Work = backend.recv([tensor], source, 0)
    return work


def _failure(work: dist.Work, *tick: timedelta) -> str:
    """Why the wait failed, empty if it did not.

    Text only: an error that a frame keeps would hold the frame, and with it the collective.
    """
    try:
        work.wait(*tick)
    except RuntimeError as error:
        return in_short(error)
    return ""


def _discard(connection: Connection) -> None:
    connection.retire(is_idle=_interrupt(connection))


def _interrupt(connection: Connection) -> bool:
    """Interrupt, and return whether that went well."""
    try:
        connection.interrupt()
        return True
    except RuntimeError as error:
        _log.warning("a group that was left could not be interrupted: %s", in_short(error))
        return False


def in_short(error: Exception) -> str:
    """Return the first line of a library's error, without its source file and its guesses."""
    first = str(error).splitlines()[0]
    text = re.sub(r"^\[[^\]]*\.(?:cc|cpp|h|hpp):\d+\] ", "", first)
    return text.partition(". This is typically")[0][:200]
