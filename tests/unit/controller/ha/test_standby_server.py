"""A browser that asks a controller which stands by is told who leads; the port is free at once."""

import asyncio
from pathlib import Path

import pytest

from pacekeeper.controller.ha import standby_server
from pacekeeper.controller.ha.standby_server import MOST_BYTES, MOST_OPEN, open_page
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import HostError

WHY = "this controller stands by; the last to lead is <b>h:1</b>"
CONFIG = ControllerConfig(web="127.0.0.1:0")


def port_of(page: asyncio.Server) -> int:
    return int(page.sockets[0].getsockname()[1])


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "request_",
    [b"GET / HTTP/1.1\r\n\r\n", b"POST /act/order HTTP/1.1\r\nHost: x\r\n\r\nkind=pause"],
)
def test_whatever_is_asked_the_answer_is_who_leads(request_: bytes) -> None:
    async def run() -> bytes:
        page = await open_page(CONFIG, lambda: WHY)
        assert page is not None
        try:
            return await asked(port_of(page), request_)
        finally:
            page.close()

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ") and b"default-src 'none'" in head
    assert f"content-length: {len(body)}".encode() in head
    assert b"the last to lead is &lt;b&gt;h:1&lt;/b&gt;" in body, "what a record says is no markup"


def test_who_never_finishes_asking_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_server, "REQUEST_WITHIN_S", 0.05)

    async def run() -> None:
        page = await open_page(CONFIG, lambda: WHY)
        assert page is not None
        port = port_of(page)
        slow = [asyncio.create_task(asked(port, b"GET / HTT")) for _ in range(MOST_OPEN + 8)]
        assert await asyncio.gather(*slow) == [b""] * len(slow)
        assert await asked(port, b"x" * (4 * MOST_BYTES)) == b""
        assert b"503" in await asked(port, b"GET / HTTP/1.1\r\n\r\n")
        page.close()

    asyncio.run(run())


def test_its_port_is_free_as_soon_as_it_closes_and_no_others(tmp_path: Path) -> None:
    async def run() -> None:
        page = await open_page(CONFIG, lambda: WHY)
        assert page is not None
        address = f"127.0.0.1:{port_of(page)}"
        with pytest.raises(HostError, match="--web"):
            await open_page(ControllerConfig(web=address), lambda: WHY)
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(page))
        page.close()  # with somebody connected
        again = await open_page(ControllerConfig(web=address), lambda: WHY)
        assert again is not None
        again.close()
        writer.close()

    asyncio.run(run())


def test_where_no_page_is_wanted_there_is_none() -> None:
    assert asyncio.run(open_page(ControllerConfig(), lambda: WHY)) is None
