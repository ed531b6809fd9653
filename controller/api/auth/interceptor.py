"""gRPC interceptor: identifies each caller, checks its role and limits, and audits the decision.

Every method passes it, also those of health and reflection; a method that `rbac.METHODS` does not
name is rejected. It is also the `AttachPolicy` of agent streams. Handlers find their caller in
`PRINCIPAL`.
"""

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.attach_policy import (
    AttachPolicy,
    RejectedError,
    find_foreign_rank,
)
from pacekeeper.controller.api.auth.audit_log import AuditEvent, AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.auth.peer_identity import PeerIdentity, host_of, peer_identity
from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import METHODS, AccessDecision, Action, Principal, Role
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.security import LimitsConfig
from pacekeeper.core.telemetry.node_report import NodeReport

ATTACHES = Limit(per_s=1.0, at_once=20)  # of one node: an agent has one stream at a time
ATTACH = "/pacekeeper.v1.AgentControlService/Attach"
ANONYMOUS_READS = 4  # unauthenticated requests read at once: each may be as large as a report
READ_WITHIN_S = 20.0
NOT_AUDITED = "the audit log cannot be written, and no action is executed without an entry"
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here
_OPEN = Principal(name="open", role=Role.OPEN)
PRINCIPAL: ContextVar[Principal] = ContextVar("principal", default=_OPEN)


@dataclass(frozen=True, slots=True)
class _Rejection:
    code: grpc.StatusCode
    reason: str


class AuthInterceptor(grpc.aio.ServerInterceptor, AttachPolicy):
    """Access control of all gRPC calls and agent streams of one controller."""

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        limits: LimitsConfig,
        audit: AuditLog,
        state: Callable[[], State],
    ) -> None:
        """Create the interceptor.

        Args:
            authenticator: Identifies callers.
            limits: Rates and sizes of calls.
            audit: Receives rejections, attachments and actions.
            state: Returns the newest state: which node has attached which rank.
        """
        self._authenticator, self._limits = authenticator, limits
        self._audit, self._state = audit, state
        self._calls = RateLimiter(
            limit=Limit(per_s=limits.calls_per_s, at_once=limits.calls_at_once)
        )
        self._attaches = RateLimiter(limit=ATTACHES)
        self._watches: Counter[str] = Counter()
        self._anonymous_reads = asyncio.Semaphore(ANONYMOUS_READS)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Wrap the handler of a method; None for a method without a handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._guarded(handler, handler_call_details.method)

    async def authenticate(self, identity: PeerIdentity) -> Principal:
        """Identify the opener of an agent's stream. Raises RejectedError."""
        principal, _, rejection = self._check(ATTACH, (True, True), None, identity)
        if rejection is not None:
            raise RejectedError(rejection.code, rejection.reason)
        PRINCIPAL.set(principal)
        return principal

    def check_attach(self, principal: Principal, node: str, peer: str) -> AccessDecision:
        """Whether `principal` may report for `node`; audited either way."""
        decision = rbac.authorise_attach(principal, node)
        self._audit.note(
            AuditEvent(
                action=Action.ATTACH,
                principal=principal,
                is_allowed=decision.is_allowed,
                peer=peer,
                about=f"node={node}",
                reason=decision.reason,
            )
        )
        return decision

    def check_report(self, principal: Principal, node: str, report: NodeReport) -> AccessDecision:
        """Whether a report mentions ranks of its own node only; rejections are audited."""
        if principal.role is Role.OPEN:
            return rbac.ALLOWED
        reason = find_foreign_rank(self._state(), node, report)
        if not reason:
            return rbac.ALLOWED
        self._audit.note(
            AuditEvent(
                action="report",
                principal=principal,
                is_allowed=False,
                about=f"node={node}",
                reason=reason,
            )
        )
        return AccessDecision(is_allowed=False, reason=reason)

    def _guarded(self, handler: Any, method: str) -> Any:
        streams = (handler.request_streaming, handler.response_streaming)
        inner = getattr(handler, _KINDS[streams])
        # Registered with a request stream in any case: gRPC would otherwise read a single request
        # whole before the caller is checked.
        make = _MAKERS[streams[1]]
        guarded: Callable[..., Any]
        if inspect.isasyncgenfunction(inner):

            async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
                request = requests if streams[0] else await self._read(method, requests, context)
                with await self._admit(method, streams, request, context):
                    async with contextlib.aclosing(inner(request, context)) as messages:
                        async for message in messages:
                            yield message

            guarded = answers
        else:
            assert inspect.iscoroutinefunction(inner), f"{method}: a handler of another kind"

            async def answer(requests: Any, context: Context) -> Any:
                request = requests if streams[0] else await self._read(method, requests, context)
                with await self._admit(method, streams, request, context):
                    return await inner(request, context)

            guarded = answer
        return make(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _read(self, method: str, requests: Any, context: Context) -> Any:
        """Read the request of a call; an anonymous caller is rejected before it is read."""
        principal = self._authenticator.identify(peer_identity(context))
        if principal.role is not Role.ANONYMOUS:
            return await _first(requests, context)
        if not rbac.authorise(principal, METHODS.get(method)).is_allowed:
            await self._admit(method, (False, False), None, context)
        async with self._anonymous_reads:
            return await _first(requests, context)

    async def _admit(
        self, method: str, streams: tuple[bool, bool], request: Any, context: Context
    ) -> contextlib.AbstractContextManager[None]:
        """Check a call and end it if it is rejected.

        Returns:
            A context manager that lasts as long as the call.
        """
        principal, key, rejection = self._check(method, streams, request, peer_identity(context))
        if rejection is not None:
            await context.abort(rejection.code, rejection.reason)
        PRINCIPAL.set(principal)
        return self._counted(key) if _is_watch(streams) else contextlib.nullcontext()

    def _check(
        self, method: str, streams: tuple[bool, bool], request: Any, identity: PeerIdentity
    ) -> tuple[Principal, str, _Rejection | None]:
        """Identify, check and audit a call: its principal, its key for limits, its rejection."""
        action = METHODS.get(method)
        principal = self._authenticator.identify(identity)
        is_unidentified = principal.role in (Role.OPEN, Role.ANONYMOUS)
        key = host_of(identity.peer) if is_unidentified else principal.name
        rejection = self._reject(principal, action, key, None if streams[0] else request)
        if rejection is None and _is_watch(streams) and self._watches[key] >= self._limits.watches:
            rejection = _Rejection(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{principal.name} has {self._watches[key]} watches open",
            )
        if rejection is not None or action is Action.ACT:
            is_noted = self._audit.note(
                AuditEvent(
                    action=action or method,
                    principal=principal,
                    is_allowed=rejection is None,
                    peer=identity.peer,
                    about=method.rpartition("/")[2] + _request_text(request, action),
                    reason="" if rejection is None else rejection.reason,
                )
            )
            if rejection is None and not is_noted:
                rejection = _Rejection(grpc.StatusCode.UNAVAILABLE, NOT_AUDITED)
        return principal, key, rejection

    def _reject(
        self, principal: Principal, action: Action | None, key: str, request: Any
    ) -> _Rejection | None:
        """Why a call is rejected by its role, its rate or its size; None: it is not."""
        decision = rbac.authorise(principal, action)
        if not decision.is_allowed:
            is_anonymous = principal.role is Role.ANONYMOUS
            code = (
                grpc.StatusCode.UNAUTHENTICATED
                if is_anonymous
                else grpc.StatusCode.PERMISSION_DENIED
            )
            return _Rejection(code, decision.reason)
        code, now_s = grpc.StatusCode.RESOURCE_EXHAUSTED, time.monotonic()
        if action is Action.ATTACH:
            # A whole fleet of unidentified agents may share one address.
            if principal.role is not Role.OPEN and not self._attaches.is_granted(key, now_s):
                return _Rejection(code, f"{principal.name} attaches more often than an agent does")
        elif not self._calls.is_granted(key, now_s):
            limit = f"{self._limits.calls_per_s:g} calls/s"
            return _Rejection(code, f"{principal.name} makes more than {limit}")
        if request is not None and request.ByteSize() > self._limits.max_question_bytes:
            return _Rejection(code, f"the request has {request.ByteSize()} bytes")
        return None

    @contextlib.contextmanager
    def _counted(self, key: str) -> Iterator[None]:
        self._watches[key] += 1
        try:
            yield
        finally:
            self._watches[key] -= 1
            if not self._watches[key]:
                del self._watches[key]


def _is_watch(streams: tuple[bool, bool]) -> bool:
    return streams == (False, True)


def _request_text(request: Any, action: Action | None) -> str:
    """The request of an action on one line, false flags included: protobuf's text omits them."""
    if action is not Action.ACT:
        return ""
    fields = request.DESCRIPTOR.fields
    off = [f.name for f in fields if f.type == f.TYPE_BOOL and not getattr(request, f.name)]
    return " " + " ".join([*str(request).split(), *(f"{name}: false" for name in off)])


async def _first(requests: Any, context: Context) -> Any:
    """Read the only request of a call; ends the call if none arrives."""
    with contextlib.suppress(StopAsyncIteration, TimeoutError):
        async with asyncio.timeout(READ_WITHIN_S):
            return await anext(requests)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")


_KINDS: Mapping[tuple[bool, bool], str] = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}
_MAKERS = {  # by whether it answers with a stream
    False: grpc.stream_unary_rpc_method_handler,
    True: grpc.stream_stream_rpc_method_handler,
}
