"""Rejects calls that a port does not serve, with the address of the port that does.

Agents and people have a port each ([controller] listen and api_listen); a standby also rejects
agents at their own. Used by the ingest process, the controller and standbys.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

AGENT_CALLS = "/pacekeeper.v1.AgentControlService/"


class RefusedCalls(grpc.GenericRpcHandler):
    """Ends each call of the methods that it is for, before anything of it is read.

    Args:
        code: The status.
        reason: Returns the details.
        prefix: Of the names of methods; empty: all.
    """

    def __init__(self, code: grpc.StatusCode, reason: Callable[[], str], prefix: str = "") -> None:
        self._code, self._reason, self._prefix = code, reason, prefix

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a method; None for methods that are not refused."""
        if not handler_call_details.method.startswith(self._prefix):
            return None
        return refusal(self._code, self._reason())


def refusal(code: grpc.StatusCode, reason: str) -> Any:
    """A handler that ends its call with this status."""

    async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
        await context.abort(code, reason)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)


def for_people_only(listen: str) -> RefusedCalls:
    """Refuses agents at the port of people; `listen`: where agents attach."""
    text = f"this port serves commands; agents attach to {listen} ([controller] listen)"
    return RefusedCalls(grpc.StatusCode.INVALID_ARGUMENT, lambda: text, AGENT_CALLS)


def for_agents_only(api_listen: str) -> RefusedCalls:
    """Refuses all calls at the port of agents; `api_listen`: where commands are served."""
    text = f"this port serves agents; commands call {api_listen} ([controller] api_listen)"
    return RefusedCalls(grpc.StatusCode.UNIMPLEMENTED, lambda: text)
