"""The port of a front: TLS before anything else, both families, and its end."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pacekeeper.cli.authority import Kind
from pacekeeper.controller import lanes, listener
from pacekeeper.controller.lanes import Lane, Rules
from pacekeeper.controller.listener import listening
from pacekeeper.core.security_config import TlsConfig
from pacekeeper.protos import secure
from support.authorities import Authority

PATIENCE_S = 20.0
SETTINGS_FRAME = bytes(3) + b"\4" + bytes(5)


class Nobody:
    """A host that nobody reaches."""


def rules(tls: TlsConfig | None = None) -> Rules:
    nobody: Any = Nobody()
    files = None if tls is None else secure.ServerContexts(tls)
    return Rules(
        host=nobody,
        pipes=nobody,
        max_message_bytes=1 << 20,
        age_s=None,
        tls=lambda: None if files is None else files.now(),
    )


@contextlib.asynccontextmanager
async def connected(
    port: int, host: str = "127.0.0.1", **values: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port, **values)
    try:
        yield reader, writer
    finally:
        writer.close()


def play(scene: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("127.0.0.1:0", ["127.0.0.1"]),
        ("[::1]:0", ["::1"]),
        ("[::]:0", ["::1", "127.0.0.1"]),
    ],
)
def test_it_listens_where_it_is_told_to(address: str, hosts: list[str]) -> None:
    async def scene() -> None:
        async with listening(address, rules()) as port:
            for host in hosts:
                async with connected(port, host) as (reader, _):
                    assert await reader.readexactly(9) == SETTINGS_FRAME

    play(scene)


def test_its_end_is_told_to_all_and_the_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.001)
    tasks = 0

    async def scene() -> None:
        nonlocal tasks
        async with contextlib.AsyncExitStack() as stack:
            async with listening("127.0.0.1:0", rules()) as port:
                reader, writer = await stack.enter_async_context(connected(port))
                await reader.readexactly(9)
                await asyncio.sleep(0.01)
                leaving = asyncio.create_task(leave(reader, writer))
            goodbye = await leaving
            assert goodbye[3] == 7
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.01)
        tasks = len(asyncio.all_tasks())

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        goodbye = await reader.readexactly(17)
        writer.close()
        return goodbye

    play(scene)
    assert tasks == 1, "nobody looks any more"


def test_its_end_waits_for_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "DRAIN_S", 0.01)

    async def scene() -> None:
        held = contextlib.AsyncExitStack()
        async with listening("127.0.0.1:0", rules()) as port:
            reader, _ = await held.enter_async_context(connected(port))
            await reader.readexactly(9)
        await held.aclose()

    play(scene)


def test_each_of_thousands_is_looked_at_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "LOOK_S", 0.001)
    monkeypatch.setattr(listener, "LOOKED_AT_ONCE", 10)
    looked, turns = list[int](), list[int]()

    class Seen:
        def look(self, now_s: float) -> None:
            looked.append(len(turns))

    async def scene() -> None:
        seen: Any = {Seen() for _ in range(35)}
        looking = asyncio.create_task(listener._look(seen))
        while len(looked) < 35:
            turns.append(1)
            await asyncio.sleep(0)
        looking.cancel()

    play(scene)
    assert len(set(looked[:35])) == 4


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def context(authority: Authority, *, h2: bool = True, known: bool = True) -> ssl.SSLContext:
    """Of a caller; `known`: with a certificate."""
    made = ssl.create_default_context(cafile=str(authority.ca))
    made.check_hostname = False
    if known:
        cert = authority.cert(Kind.NODE, "n-1")
        made.load_cert_chain(cert, cert.with_suffix(".key"))
    if h2:
        made.set_alpn_protocols(["h2"])
    return made


def secured(authority: Authority) -> Rules:
    return rules(authority.tls(authority.cert(Kind.CONTROLLER, "c", hosts=("localhost",))))


def test_with_tls_it_speaks_after_the_handshake(authority: Authority) -> None:
    async def scene() -> None:
        async with (
            listening("127.0.0.1:0", secured(authority)) as port,
            connected(port, ssl=context(authority)) as (reader, writer),
        ):
            assert await reader.readexactly(9) == SETTINGS_FRAME
            writer.write(b"GET / HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "what came behind it is read"

    play(scene)


@pytest.mark.parametrize("how", ["no h2", "no certificate", "no TLS", "leaves"])
def test_who_does_not_finish_the_handshake_as_it_should_is_let_go(
    how: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes_left = list[set[Lane]]()
    real = listener._look

    def look(seen: set[Lane]) -> Any:
        lanes_left.append(seen)
        return real(seen)

    monkeypatch.setattr(listener, "_look", look)
    monkeypatch.setattr(lanes, "HANDSHAKE_S", 0.3)

    async def scene() -> None:
        async with listening("127.0.0.1:0", secured(authority)) as port:
            tls = None
            if how.startswith("no ") and how != "no TLS":
                tls = context(authority, h2=how != "no h2", known=how != "no certificate")
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                async with connected(port, ssl=tls) as (reader, writer):
                    if how == "no TLS":
                        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    if how != "leaves":
                        assert await reader.read() == b""
            while not lanes_left or lanes_left[0]:
                await asyncio.sleep(0.005)

    play(scene)
