"""The key-value stores of a job: one per node, hosted by its supervisor, known to everybody.

A generation uses the store of a node that has a living rank, so no store is a single point of
failure. A store that does not answer means that its node is gone.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from pacekeeper.core.addresses import split_address
from pacekeeper.core.errors import HostError, UnreachableError, listen_error
from pacekeeper.trainer.elastic.agreement.job_key import UNSIGNED, JobKey
from pacekeeper.trainer.elastic.agreement.messages import number_in
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore
from pacekeeper.trainer.groups.waiting import BackgroundWorker, run_leavable

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
LEAST_CONNECT_S = 1.5  # a resolver that stalls may take a second of it (below)
TRY_GET_S = 0.05
_MAX_CONNECTING = 64  # at so many doors at once
_MAX_ATTEMPTS = 8  # to connect to one store at a time: those that it leaves without an answer stay
_POLLS_PER_ANSWER = 5  # for one answer
_log = logging.getLogger(__name__)
T = TypeVar("T")
_attempts: dict[str, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(_MAX_ATTEMPTS))
# A stalling reverse look-up of the peer must not cost five seconds per connection.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def own_host_towards(address: str) -> str:
    """The address of this machine's interface that leads to HOST:PORT.

    Raises UnreachableError where nobody knows that host, HostError where no network leads there.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(split_address(address))  # sends nothing
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise UnreachableError(
            f"no way to {address}: {error.strerror}",
            remedy="no host of this name is known here: --rendezvous names node 0 of the job",
        ) from None
    except OSError as error:
        raise HostError(
            f"no way to {address}: {error.strerror}",
            remedy="is this node's network up? --rendezvous names node 0 of the job",
        ) from None


def host_store(host: str, port: int) -> TCPStore:
    """Serve a store on host:port only (port 0: any free one). Raises HostError where it can not."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise listen_error(
            f"{host}:{port}", error, option="--rendezvous", rival="another job"
        ) from None
    actual = listener.getsockname()[1]
    return TCPStore(
        host,
        actual,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_TIMEOUT_S),
        # Else it listens on all interfaces, whatever host is named.
        master_listen_fd=listener.detach(),
    )


def host_store_near(rendezvous: str) -> tuple[str, TCPStore]:
    """Serve a store on the interface that leads to `rendezvous`: its address, and the store.

    On a machine of its own it listens on the port of the rendezvous, if that is free: who wants to
    join later then knows it. Raises as `own_host_towards` and `host_store`.
    """
    host, (other, port) = own_host_towards(rendezvous), split_address(rendezvous)
    with contextlib.suppress(OSError, HostError):
        if socket.gethostbyname(other) != host:
            return host, host_store(host, port)
    return host, host_store(host, 0)


def connect_store(
    address: str, timeout_s: float = CONNECT_TIMEOUT_S, key: JobKey = UNSIGNED, prefix: str = ""
) -> SignedStore:
    """A client of the store at host:port, whose values are signed with `key` and whose names have
    this prefix. Raises UnreachableError, also where the store stays silent.
    """
    host, port = split_address(address)
    give_up_s = time.monotonic() + timeout_s
    silence = f"it takes connections and has not answered for {timeout_s:.1f} s"
    attempts = _attempts[address]

    def connect(_: Callable[[], bool]) -> TCPStore:
        try:
            store = TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                # Over before we give up: nobody is to knock once more, and wait for ever.
                timeout=timedelta(seconds=timeout_s / 2),
            )
        finally:
            attempts.release()
        store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        return store

    def watch() -> None:
        raise UnreachableError(silence)  # made here: kept, it would keep all frames that wait

    try:
        # The client above knocks for all of its time, even at a door that is not there.
        socket.create_connection((host, port), timeout_s).close()
        # It greets the store and waits for the answer without a deadline: the kernel of a frozen
        # host takes connections for it.
        if not attempts.acquire(timeout=max(0.0, give_up_s - time.monotonic())):
            raise UnreachableError(silence)
        left_s = max(0.0, give_up_s - time.monotonic())
        store = run_leavable(connect, watch=watch, tick_s=left_s, name="connect")
        return SignedStore(store, key, prefix)
    except (OSError, DistError, RuntimeError, UnreachableError) as error:
        why = str(error).splitlines()[0]
    raise UnreachableError(
        f"no store at {address}: {why}",
        remedy="is the launcher of node 0 running, and is --rendezvous the same everywhere?",
    )


class Stores:
    """Clients of all nodes' stores, connected when first needed; use from one thread. Who sends
    beside the training looks from another whether a member is dead: either may lose a node.

    `addresses` by node number, empty where the node's store is not known (any more). `answer_s`:
    who is silent for so long when asked is gone. `key`: signs all values; what is read without its
    signature raises DeniedError. `prefix`: of all names.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        answer_s: float | None = None,
        key: JobKey = UNSIGNED,
        prefix: str = "",
    ) -> None:
        self.addresses = addresses
        self._key, self._prefix = key, prefix
        self.answer_s = ANSWER_TIMEOUT_S if answer_s is None else answer_s
        self._clients: dict[int, SignedStore] = {}
        self._dedicated: dict[int, SignedStore] = {}
        self._desks: dict[int, BackgroundWorker] = {}
        self._pending_gets: dict[tuple[int, str], SimpleQueue[str | Exception | None]] = {}
        # Nodes whose store is not known, or did not answer: those are never asked again.
        self.gone = {node for node, address in enumerate(addresses) if not address}

    def learn(self, addresses: Sequence[str]) -> None:
        """Stores of nodes that were not known, by number; empty: not known there either."""
        known = {node: address for node, address in enumerate(self.addresses) if address}
        fresh = {n: a for n, a in enumerate(addresses) if a and n not in known}
        if fresh:
            every = known | fresh
            self.addresses = tuple(every.get(node, "") for node in range(max(every) + 1))
            self.gone = (self.gone | set(range(len(self.addresses))) - set(every)) - set(fresh)

    def client(self, node: int) -> SignedStore | None:
        """The client of a node's store; None once that node is gone."""
        return self._known(node, self._clients)

    def dedicated_client(self, node: int) -> SignedStore | None:
        """A second client, to wait with; None once that node is gone."""
        return self._known(node, self._dedicated)

    def _known(self, node: int, clients: dict[int, SignedStore]) -> SignedStore | None:
        if node in self.gone:
            return None
        if node not in clients:
            try:
                clients[node] = self._connected(node)
            except UnreachableError:
                self._lose(node)
        return clients.get(node)

    def leave_dedicated_client(self, node: int) -> None:
        """Let the next one be another one: a thread that was left may still wait with this one."""
        self._dedicated.pop(node, None)

    @property
    def _connect_s(self) -> float:
        return max(self.answer_s, LEAST_CONNECT_S)

    def _connected(self, node: int) -> SignedStore:
        return connect_store(self.addresses[node], self._connect_s, self._key, self._prefix)

    def try_get(self, node: int, key: str) -> str | None:
        """A key's value, now or as of a moment ago; None where it is not set or not told at once.

        For who asks again and again: a store that is silent costs TRY_GET_S, and is not gone.
        """
        asked = self._pending_gets.pop((node, key), None)
        answer = asked or self._put(
            node, lambda store: _text(store.get(key)) if store.check([key]) else None
        )
        if answer is None:
            return None
        try:
            found = answer.get(timeout=TRY_GET_S)
        except Empty:
            self._pending_gets[node, key] = answer
            return None
        return self._said(node, found)

    def read(self, node: int, key: str) -> str | None:
        """A key's value without waiting for it; None where it is not set or the node is gone."""
        return self._ask(node, lambda store: _text(store.get(key)) if store.check([key]) else None)

    def write(self, node: int, key: str, value: str) -> None:
        """Set a key; nothing happens where the node is gone."""
        self._ask(node, lambda store: store.set(key, value))

    def append(self, node: int, key: str, value: str) -> None:
        """Add to the end of a key's value; nothing happens where the node is gone."""
        self._ask(node, lambda store: store.append(key, value))

    def append_everywhere(self, key: str, value: str) -> None:
        """As `append`, in all stores at once: one that is silent delays no other."""
        asked = {
            node: self._put(node, lambda store: store.append(key, value))
            for node in range(len(self.addresses))
        }
        self._take(asked)

    def probe(self, nodes: Collection[int]) -> None:
        """Ask all these nodes at once for anything: who does not answer is gone afterwards.

        One after the other, a hundred that are cut off would cost a hundred timeouts.
        """
        for node in self.call(nodes):
            self._lose(node)
        self._take({n: self._put(n, lambda store: store.check([DEATHS_KEY])) for n in nodes})

    def call(self, nodes: Collection[int]) -> set[int]:
        """Connect to all these nodes at once, where that is not done; those that do not answer.

        They are not gone for that.
        """
        strangers = [n for n in nodes if n not in self._clients and n not in self.gone]
        if not strangers:
            return set()
        with ThreadPoolExecutor(max_workers=_MAX_CONNECTING) as pool:
            clients = dict(zip(strangers, pool.map(self._called, strangers), strict=True))
        self._clients |= {node: client for node, client in clients.items() if client is not None}
        return {node for node, client in clients.items() if client is None}

    def _called(self, node: int) -> SignedStore | None:
        with contextlib.suppress(UnreachableError):
            return self._connected(node)
        return None

    def write_first(self, node: int, key: str, value: str) -> str | None:
        """Set a key unless it is set; the value that stands (None: the node is gone)."""
        return self._ask(node, lambda store: _text(store.compare_set(key, "", value)))

    def _ask(self, node: int, question: Callable[[SignedStore], T]) -> T | None:
        """The answer, or None and the node is gone: broken, or silent for `answer_s`.

        A client has no deadline of its own: a frozen host would hold the caller for ever.
        """
        return self._take({node: self._put(node, question)}).get(node)

    def _put(
        self, node: int, question: Callable[[SignedStore], T]
    ) -> SimpleQueue[T | Exception] | None:
        """Ask and do not wait; None where the node is gone."""
        store = self.client(node)
        if store is None:
            return None
        desk = self._desks.get(node) or self._desks.setdefault(node, BackgroundWorker("store"))
        answer: SimpleQueue[T | Exception] = SimpleQueue()

        def ask() -> None:
            try:
                answer.put(question(store))
            except Exception as error:
                answer.put(error)

        desk.begin(ask)
        return answer

    def _take(self, asked: Mapping[int, SimpleQueue[T | Exception] | None]) -> dict[int, T | None]:
        """What each of them answers within `answer_s`, of all together; who does not is gone.

        Looked for a few times: it may be this process that was stopped during one of them.
        """
        waiting = {node: answer for node, answer in asked.items() if answer is not None}
        found: dict[int, T | Exception] = {}
        for _ in range(_POLLS_PER_ANSWER):
            until_s = time.monotonic() + self.answer_s / _POLLS_PER_ANSWER
            for node, answer in list(waiting.items()):
                with contextlib.suppress(Empty):
                    found[node] = answer.get(timeout=max(0.0, until_s - time.monotonic()))
                    del waiting[node]
        for node in waiting:
            found[node] = UnreachableError(f"the store of node {node} is silent")
        return {node: self._said(node, one) for node, one in found.items()}

    def _said(self, node: int, found: T | Exception) -> T | None:
        if isinstance(found, DistError | RuntimeError | UnreachableError):
            self._lose(node)
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def _lose(self, node: int) -> None:
        if node not in self.gone:
            _log.warning(
                "node %d is gone: its store at %s does not answer", node, self.addresses[node]
            )
        self.gone.add(node)
        self._forget(node)

    def close(self) -> None:
        """Ask nobody any more: all are gone for this process."""
        self.gone = set(range(len(self.addresses)))
        for node in list(self._clients):
            self._forget(node)

    def _forget(self, node: int) -> None:
        self._clients.pop(node, None)
        self._dedicated.pop(node, None)
        for asked in list(self._pending_gets):
            if asked[0] == node:
                self._pending_gets.pop(asked, None)
        self._desks.pop(node, None)  # it ends when what was asked is answered


def _text(data: bytes) -> str:
    """What is no text is no word of ours: whoever reads it says so."""
    return data.decode(errors="replace")


# Supervisors append "RANK@GROUP," when a rank's process has died: the last group it belonged to.
# A rank appends "RANK@GROUP," when it has done all its steps.
DEATHS_KEY = "deaths"
FINISHED_KEY = "finished"
# Set by any launcher that was asked to end the job: the others ask their own ranks, too.
STOP_KEY = "stop"


def notice(rank: int, group: str) -> str:
    """What is appended to DEATHS_KEY or FINISHED_KEY."""
    return f"{rank}@{group},"


def parse_notices(text: str | None) -> dict[int, str]:
    """The ranks in the value of DEATHS_KEY or FINISHED_KEY, each with its group.

    What names no rank is nobody's: all that is lost by that is the time for which one is waited.
    """
    parts = (part.partition("@") for part in (text or "").split(",") if part)
    named = ((number_in(rank), group) for rank, _, group in parts)
    return {rank: group for rank, group in named if rank is not None}


def fence_key(rank: int) -> str:
    """Set by anyone: kill this rank for good, it does not answer."""
    return f"fence/{rank}"


def group_key(rank: int) -> str:
    """Set by a rank in its own node's store, before it acts: the group it belongs to from now."""
    return f"group/{rank}"
