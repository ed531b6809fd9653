"""What the front's port costs."""

import asyncio
import ssl
from asyncio import sslproto
from typing import Any

import pytest

from pacekeeper.controller.ingest.http2.listener import TLS_BYTES, hold_little


def test_a_connection_with_tls_holds_little_more_than_a_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", sslproto.SSLProtocol.max_size)
    hold_little()

    async def held() -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        loop = asyncio.get_running_loop()
        made: Any = sslproto.SSLProtocol(
            loop, asyncio.Protocol(), context, loop.create_future(), True
        )
        return len(made.get_buffer(-1))

    assert asyncio.run(held()) == TLS_BYTES
