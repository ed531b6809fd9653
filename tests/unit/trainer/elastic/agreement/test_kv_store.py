"""One store per node: it serves where it is told to; one that is gone is not asked again."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest

from pacekeeper.core.errors import HostError, UnreachableError
from pacekeeper.trainer.elastic.agreement import kv_store as stores_module
from pacekeeper.trainer.elastic.agreement.kv_store import (
    CONNECT_TIMEOUT_S,
    Stores,
    connect_store,
    host_store,
    notice,
    own_host_towards,
    parse_notices,
)
from pacekeeper.trainer.elastic.agreement.signed_store import SignedStore

PATIENCE_S = 60.0


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_port_in_use_is_said_with_a_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HostError, match=rf"127.0.0.1:{port}.*--rendezvous"):
            host_store("127.0.0.1", port)


def test_a_store_listens_on_the_given_address_only() -> None:
    server = host_store("127.0.0.1", 0)
    port = server.port
    socket.create_connection(("127.0.0.1", port), 5.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5.0)


def test_nodes_reach_the_others_by_the_interface_that_leads_to_the_first() -> None:
    assert own_host_towards("127.0.0.1:29400") == "127.0.0.1"
    with pytest.raises(UnreachableError, match="no way to"):
        own_host_towards("no-such-host.invalid:29400")


def test_nobody_there_is_known_at_once(nobody: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(UnreachableError, match=f"no store at {nobody}"):
        connect_store(nobody)
    assert time.monotonic() - began_s < CONNECT_TIMEOUT_S, "it does not keep knocking"


def test_who_takes_connections_and_never_answers_is_gone_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the kernel does for a frozen host; whoever waits for its greeting waits for ever."""
    monkeypatch.setattr(stores_module, "_MAX_ATTEMPTS", 2)
    before = threading.active_count()
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as frozen:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        for _ in range(4):
            with pytest.raises(UnreachableError, match="takes connections and has not answered"):
                pool.submit(connect_store, address, 0.2).result(PATIENCE_S)
        give_up_s = time.monotonic() + PATIENCE_S
        while threading.active_count() > before + 1 + 2:  # one that has given up is ending
            assert time.monotonic() < give_up_s, "however often it is tried"
            time.sleep(0.01)
    give_up_s = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:  # nothing is left behind once it is gone
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_what_one_writes_all_read_and_the_first_verdict_stands() -> None:
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    one, other = Stores((address,)), Stores((address,))
    assert other.read(0, "key") is None
    one.write(0, "key", "value")
    assert other.read(0, "key") == "value"
    assert one.write_first(0, "verdict", "mine") == "mine"
    assert other.write_first(0, "verdict", "yours") == "mine"
    one.append(0, "deaths", notice(3, "first"))
    other.append(0, "deaths", notice(12, "2-00ff00ff"))
    assert parse_notices(one.read(0, "deaths")) == {3: "first", 12: "2-00ff00ff"}
    assert parse_notices(None) == {}


def test_a_store_that_is_gone_answers_nothing_and_the_others_still_do(nobody: str) -> None:
    server = host_store("127.0.0.1", 0)
    stores = Stores((nobody, f"127.0.0.1:{server.port}"))
    assert stores.read(0, "key") is None
    stores.write(0, "key", "value")
    stores.append(0, "key", "value")
    assert stores.write_first(0, "key", "value") is None
    assert stores.client(0) is None
    assert stores.gone == {0}
    stores.write(1, "key", "value")
    assert stores.read(1, "key") == "value"


def test_who_is_done_leaves_no_thread_and_asks_nobody() -> None:
    server = host_store("127.0.0.1", 0)
    stores = Stores((f"127.0.0.1:{server.port}",))
    before = threading.active_count()
    stores.write(0, "key", "value")
    stores.close()
    give_up_s = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert stores.read(0, "key") is None


def test_a_store_that_goes_away_later_is_noticed_at_once() -> None:
    server = host_store("127.0.0.1", 0)
    stores = Stores((f"127.0.0.1:{server.port}",))
    stores.write(0, "key", "value")
    assert stores.read(0, "key") == "value"
    del server  # as when its launcher is killed: the connections break
    assert stores.read(0, "key") is None
    assert stores.gone == {0}


def test_many_are_asked_and_told_at_once_and_who_is_gone_is_known(nobody: str) -> None:
    server = host_store("127.0.0.1", 0)
    address = f"127.0.0.1:{server.port}"
    stores = Stores((nobody, address, nobody, address))
    stores.probe({0, 1, 2, 3})
    assert stores.gone == {0, 2}
    told = Stores((nobody, address))
    told.append_everywhere("deaths", notice(1, "first"))
    assert stores.read(3, "deaths") == "1@first,"


def test_a_client_that_is_left_costs_nobody_the_store() -> None:
    server = host_store("127.0.0.1", 0)
    stores = Stores((f"127.0.0.1:{server.port}",))
    stores.write(0, "key", "value")
    line = stores.dedicated_client(0)
    assert line is not None and stores.dedicated_client(0) is line
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(line.get, "never")
        stores.leave_dedicated_client(0)
        another = stores.dedicated_client(0)
        assert another is not None and another.get("key") == b"value"
        assert stores.read(0, "key") == "value" and not stores.gone
        stores.write(0, "never", "after all")
        assert waiting.result(PATIENCE_S) == b"after all"


class Silent:
    """A client of a store that does not answer before it is told to; it counts its questions."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return self.may_answer.wait(PATIENCE_S)

    def get(self, key: str) -> bytes:
        return b"value"


def test_try_get_of_a_silent_store_does_not_block_and_asks_once() -> None:
    stores, client = Stores(("127.0.0.1:1",)), Silent()
    stores._clients[0] = cast(SignedStore, client)
    assert [stores.try_get(0, "key") for _ in range(3)] == [None] * 3
    assert client.num_asked == 1 and not stores.gone
    client.may_answer.set()
    give_up_s = time.monotonic() + PATIENCE_S
    while stores.try_get(0, "key") != "value":
        assert time.monotonic() < give_up_s
    assert not stores.gone


def test_who_is_silent_for_as_long_as_is_stated_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for as long as somebody who states nothing would wait."""
    monkeypatch.setattr(stores_module, "ANSWER_TIMEOUT_S", 10 * PATIENCE_S)
    stores, client = Stores(("127.0.0.1:1",), 0.05), Silent()
    stores._clients[0] = cast(SignedStore, client)
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(stores.read, 0, "key").result(PATIENCE_S) is None
        finally:
            client.may_answer.set()
    assert stores.gone == {0}


class Shared(dict[Any, Any]):
    """What another thread takes away between two looks of this one."""

    def __contains__(self, key: object) -> bool:
        was_there = super().__contains__(key)
        self.pop(key, None)
        return was_there

    def __iter__(self) -> Iterator[Any]:
        keys = list(self.keys())
        self.clear()
        return iter(keys)


def test_a_node_that_two_threads_lose_at_once_is_lost_and_no_more() -> None:
    """One of them sends a snapshot beside the training; a mistake here would end the rank."""
    stores, client = Stores(("127.0.0.1:1",)), Silent()
    stores._clients[0] = cast(SignedStore, client)
    stores._pending_gets = Shared({(0, "key"): SimpleQueue()})
    stores._lose(0)
    assert stores.gone == {0} and not stores._pending_gets
    again = Stores(("127.0.0.1:1",))
    client.may_answer.set()
    again._clients[0] = cast(SignedStore, client)
    again.read(0, "key")
    again._desks = Shared(again._desks)
    assert again.read(0, "key") == "value"
    again.close()


class Stopped(SimpleQueue[Any]):
    """A queue whose process is stopped in the middle of its first look, beyond the time for it."""

    was_stopped = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout is not None and not self.was_stopped:  # not the thread that asks
            self.was_stopped = True
            raise Empty
        return super().get(block, timeout)


def test_who_was_stopped_itself_while_it_asked_does_not_take_a_store_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores_module, "SimpleQueue", Stopped)
    stores, client = Stores(("127.0.0.1:1",)), Silent()
    client.may_answer.set()
    stores._clients[0] = cast(SignedStore, client)
    assert stores.read(0, "key") == "value"
    assert not stores.gone


class Clock:
    """Time that goes by only where somebody waits for an answer, which never comes."""

    now_s = 0.0

    @classmethod
    def monotonic(cls) -> float:
        return cls.now_s


class Unanswered(SimpleQueue[Any]):
    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        assert timeout is not None, "nobody waits for ever"
        Clock.now_s += timeout
        raise Empty


def test_many_that_are_silent_cost_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "SimpleQueue", Unanswered)
    stores, client = Stores(("127.0.0.1:1",) * 100, 2.0), Silent()
    client.may_answer.set()
    for node in range(100):
        stores._clients[node] = cast(SignedStore, client)
    monkeypatch.setattr(stores_module, "time", Clock)
    began_s = Clock.now_s
    stores.probe(range(100))
    assert Clock.now_s - began_s == pytest.approx(2.0)
    assert stores.gone == set(range(100))
