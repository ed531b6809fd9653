"""Forwards calls that are no agent's stream from the ingest process to the controller's server.

The controller serves them on a socket that only its own user can open. The identity of the caller
stands in one header, which the ingest process sets; headers of that name from callers are removed.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.api.auth.peer_identity import CALLER_HEADER, connection_identity
from pacekeeper.protos.convert import reports

LOOKS, LOOK_S = 200, 0.01
_OURS = "x-pacekeeper-"
_CUT_OFF = "Internal error from Core"  # grpc.aio's text for a message that could not be sent
_HOPS = ("grpc-", ":", "te", "content-type", "user-agent")  # headers of one connection
End = tuple[grpc.StatusCode, str | None, Any]
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here


class GrpcProxy(grpc.GenericRpcHandler):
    """Forwards calls to `address`, all kinds as streams: on the wire they are the same."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=reports.GRPC_OPTIONS_CLIENT)

    def service(self, handler_call_details: Any) -> Any:
        """The handler of any method."""
        method = handler_call_details.method

        async def forward(requests: AsyncIterator[bytes], context: Context) -> None:
            stub: Any = self._channel.stream_stream(method)
            call = stub(requests, metadata=_headers(context), timeout=context.time_remaining())
            outcome = CallOutcome(call)
            try:
                async for message in call:
                    await context.write(message)
                await call.code()
            except grpc.aio.AioRpcError:
                pass  # it is among its outcomes
            finally:
                call.cancel()
            code, details, trailing = await outcome.answer()
            context.set_trailing_metadata(_own(trailing))
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details or "")

        return grpc.stream_stream_rpc_method_handler(forward)

    async def close(self) -> None:
        """Close the connection; open calls end."""
        await self._channel.close()


class CallOutcome:
    """The status of a forwarded call.

    grpc.aio reports more than one where a call is rejected while its request is still being sent:
    INTERNAL, before or after the answer itself.
    """

    def __init__(self, call: Any) -> None:
        self._answer: End | None = None
        self._last: End | None = None
        call.add_done_callback(self._add)

    async def answer(self) -> End:
        """The other side's status; the last one where it gave none."""
        for _ in range(LOOKS):
            if self._answer is not None:
                break
            await asyncio.sleep(LOOK_S)
        end = self._answer or self._last
        assert end is not None, "the call is over"
        return end

    def _add(self, call: Any) -> None:
        self._last = _known(call.code()), _known(call.details()), _known(call.trailing_metadata())
        is_answer = self._last[:2] != (grpc.StatusCode.INTERNAL, _CUT_OFF)
        self._answer = self._answer or (self._last if is_answer else None)


def _known(answer: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine of a call that is over, which does not wait."""
    try:
        answer.send(None)
    except StopIteration as said:
        return said.value
    raise AssertionError("the call is over")


def _headers(context: Context) -> list[tuple[str, str | bytes]]:
    own = _own(context.invocation_metadata())
    kept = [(name, value) for name, value in own if not name.lower().startswith(_OURS)]
    return [*kept, (CALLER_HEADER, connection_identity(context).to_bytes())]


def _own(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((name, value) for name, value in metadata or () if not name.startswith(_HOPS))
