"""Who never finishes asking keeps nobody from the page, and is let go."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs pacekeeper[web]")
from pacekeeper.controller.api.web import web_protocol
from pacekeeper.controller.api.web.server import WebServer
from pacekeeper.core.config.security import TlsConfig

WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LATE = WHOLE.replace(b"/ ", b"/late ", 1)
FORM = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body first, as forms are read."""
    while (await receive()).get("more_body", False):
        pass
    if scope["path"] == "/late":
        await asyncio.sleep(0.5)
    head = [(b"content-length", b"4")]  # else its last word would not be the page's
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"page"})


def served(scene: Callable[[int], Awaitable[None]]) -> None:
    async def run() -> None:
        server = WebServer(page, ("127.0.0.1", 0), TlsConfig())
        task = asyncio.create_task(server.serve())
        try:
            await scene(server.port)
        finally:
            await server.close(task)

    asyncio.run(run())


async def said(port: int, words: bytes) -> Streams:
    streams = await asyncio.open_connection("127.0.0.1", port)
    streams[1].write(words)
    return streams


async def answer(streams: Streams) -> bytes:
    """Up to the page's last word; b"" where the connection was ended before."""
    found = b""
    while not found.endswith(b"page") and (more := await streams[0].read(1000)):
        found += more
    return found


@pytest.mark.parametrize("half", [b"", b"GET / HTTP/1.1\r\nx: ", FORM])
def test_the_oldest_that_wait_make_room(half: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_protocol, "MOST_WAITING", 4)

    async def scene(port: int) -> None:
        slow = [await said(port, half) for _ in range(4)]
        asked = await said(port, WHOLE)
        assert b"200" in await answer(asked)
        assert await answer(slow[0]) == b""
        for _, writer in (*slow, asked):
            writer.close()

    served(scene)


def test_who_has_said_half_is_let_go_and_whom_we_let_wait_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_protocol, "REQUEST_WITHIN_S", 0.05)

    async def scene(port: int) -> None:
        late = await said(port, LATE)
        slow = await said(port, b"GET / HTT")
        assert await answer(slow) == b""
        assert b"200" in await answer(late)
        assert await answer(late) == b"", "it asks nothing more"
        for _, writer in (slow, late):
            writer.close()

    served(scene)
