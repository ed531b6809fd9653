"""Who calls is found out, judged by the table and written down before any method runs.

Every method passes here, also those of health and reflection; one that `rbac.METHODS` does not
name is refused. The handler finds its caller in `CALLER`.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from pacekeeper.controller.api.auth import rbac, report_ownership
from pacekeeper.controller.api.auth.audit_log import AuditEvent, AuditLog, host_of
from pacekeeper.controller.api.auth.rate_limit import Limit, RateLimiter
from pacekeeper.controller.api.auth.rbac import METHODS, Action, Principal, Role
from pacekeeper.controller.api.auth.tokens import TokenFile, authenticate_token
from pacekeeper.controller.ingest.agent_service import AttachPolicy, RejectedError
from pacekeeper.controller.ingest.http2.proxy import Relayed, relayed
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.security import AccessConfig, LimitsConfig
from pacekeeper.core.telemetry.node_report import NodeReport

ATTACHES = Limit(per_s=1.0, at_once=20)  # of one node: an agent has one stream at a time
ATTACH = "/pacekeeper.v1.AgentControlService/Attach"
STRANGERS = 4  # nobodies whose request is read at once: each may be as large as a report
READ_WITHIN_S = 20.0
_BEARER = "bearer "
_log = logging.getLogger(__name__)
Context = Any  # grpc.aio.ServicerContext: its type parameters say nothing here
_OPEN = Principal(name="open", role=Role.OPEN)
PRINCIPAL: ContextVar[Principal] = ContextVar("caller", default=_OPEN)


class AuthInterceptor(grpc.aio.ServerInterceptor, AttachPolicy):
    """The interceptor. `asks`: whether callers must show who they are."""

    def __init__(
        self,
        *,
        asks: bool,
        config: AccessConfig,
        limits: LimitsConfig,
        tokens: TokenFile | None,
        audit: AuditLog,
        state: Callable[[], State],
    ) -> None:
        self._asks, self._config, self._limits = asks, config, limits
        self._tokens, self._audit, self._state = tokens, audit, state
        self._calls = RateLimiter(
            limit=Limit(per_s=limits.calls_per_s, at_once=limits.calls_at_once)
        )
        self._attaches = RateLimiter(limit=ATTACHES)
        self._watches: Counter[str] = Counter()
        self._strangers = asyncio.Semaphore(STRANGERS)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """The method's own handler behind the gate; None for a method nobody serves."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return self._guarded(handler, handler_call_details.method)

    async def let_in(self, shown: Relayed) -> Principal:
        """Who opens an agent's stream. Raises Refused."""
        context = _Opening(shown)
        with await self._let_in(ATTACH, (True, True), None, context):
            return PRINCIPAL.get()

    def may_attach(self, caller: Principal, node: str, peer: str) -> str:
        """Why this caller may not report of that node; empty: it may. Both are audited."""
        verdict = rbac.authorise_attach(caller, node)
        self._audit.note(
            AuditEvent(
                action=Action.ATTACH,
                caller=caller.name,
                is_allowed=verdict.is_allowed,
                peer=peer,
                about=f"node={node}",
                reason=verdict.reason,
            )
        )
        return verdict.reason

    def foreign(self, caller: Principal, node: str, report: NodeReport) -> str:
        """What a known caller's report says of another node; empty: nothing. Audited."""
        if caller.role is Role.OPEN:
            return ""
        why = report_ownership.find_foreign_rank(self._state(), node, report)
        if why:
            self._audit.note(
                AuditEvent(
                    action="report",
                    caller=caller.name,
                    is_allowed=False,
                    about=f"node={node}",
                    reason=why,
                )
            )
        return why

    def _guarded(self, handler: Any, method: str) -> Any:
        streams = (handler.request_streaming, handler.response_streaming)
        inner = getattr(handler, _KINDS[streams])
        # To gRPC all requests are streams: it would read a single one whole before it asks us.
        make = _MAKERS[streams[1]]
        guarded: Callable[..., Any]
        if inspect.isasyncgenfunction(inner):

            async def answers(requests: Any, context: Context) -> AsyncIterator[Any]:
                request = requests if streams[0] else await self._one(method, requests, context)
                with await self._let_in(method, streams, request, context):
                    async with contextlib.aclosing(inner(request, context)) as messages:
                        async for message in messages:
                            yield message

            guarded = answers
        else:
            assert inspect.iscoroutinefunction(inner), f"{method}: a handler of another kind"

            async def answer(requests: Any, context: Context) -> Any:
                request = requests if streams[0] else await self._one(method, requests, context)
                with await self._let_in(method, streams, request, context):
                    return await inner(request, context)

            guarded = answer
        return make(
            guarded,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _one(self, method: str, requests: Any, context: Context) -> Any:
        """The one request of a call; who is nobody is refused before it is read."""
        caller = self.caller(relayed(context))
        if caller.role is not Role.NOBODY:
            return await _first(requests, context)
        if not rbac.authorise(caller, METHODS.get(method)).is_allowed:
            await self._let_in(method, (False, False), None, context)
        async with self._strangers:
            return await _first(requests, context)

    async def _let_in(
        self, method: str, streams: tuple[bool, bool], request: Any, context: Context
    ) -> contextlib.AbstractContextManager[None]:
        """Judge a call; ends it where it is refused. What is returned lasts as long as the call."""
        shown = relayed(context)
        action, peer = METHODS.get(method), shown.peer()
        caller = self.caller(shown)
        key = host_of(peer) if caller.role in (Role.OPEN, Role.NOBODY) else caller.name
        is_watch = streams == (False, True)
        code, why = self._judge(caller, action, key, None if streams[0] else request)
        if not why and is_watch and self._watches[key] >= self._limits.watches:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            why = f"{caller.name} has {self._watches[key]} watches open"
        deed = AuditEvent(
            action=action or method,
            caller=caller.name,
            is_allowed=not why,
            peer=peer,
            about=method.rpartition("/")[2] + _in_words(request, action),
            reason=why,
        )
        is_noted = True
        if why or action is Action.ACT:
            is_noted = self._audit.note(deed)
        if why:
            await context.abort(code, why)
        if not is_noted:
            why = "the audit log can not be written, and nothing is done unseen"
            await context.abort(grpc.StatusCode.UNAVAILABLE, why)
        PRINCIPAL.set(caller)
        return self._counted(key) if is_watch else contextlib.nullcontext()

    def caller(self, context: Context) -> Principal:
        """Who calls: by the token that is shown, else by the certificate."""
        if not self._asks:
            return Principal(name=f"{rbac.OPEN_AT}{host_of(context.peer())}", role=Role.OPEN)
        by_certificate = self._by_certificate(context.auth_context())
        for name, value in context.invocation_metadata() or ():
            if name.lower() == "authorization":
                return rbac.combine(self._by_token(value), by_certificate)
        return by_certificate or rbac.anonymous("neither a certificate nor a token was shown")

    def _by_certificate(self, shown: Mapping[str, Any]) -> Principal | None:
        if not shown.get("x509_pem_cert"):
            return None
        uris, names = (
            [bytes(value).decode(errors="replace") for value in shown.get(kind, ())]
            for kind in ("peer_uri", "peer_dns")
        )
        config = self._config
        return rbac.principal_of_certificate(uris, names, config.trust_domain, config.nodes_by_dns)

    def _by_token(self, value: str | bytes) -> Principal:
        text = value if isinstance(value, str) else ""
        if self._tokens is None:
            return rbac.anonymous("no tokens are taken here")
        if text[: len(_BEARER)].lower() != _BEARER:
            return rbac.anonymous("what was shown is no bearer token")
        return authenticate_token(text[len(_BEARER) :].strip(), self._tokens.records(), time.time())

    def _judge(
        self, caller: Principal, action: Action | None, key: str, question: Any
    ) -> tuple[grpc.StatusCode, str]:
        """The code and the reason for which a call is refused; no reason: it is not."""
        verdict = rbac.authorise(caller, action)
        if not verdict.is_allowed:
            if caller.role is Role.NOBODY:
                return grpc.StatusCode.UNAUTHENTICATED, verdict.reason
            return grpc.StatusCode.PERMISSION_DENIED, verdict.reason
        code, now_s = grpc.StatusCode.RESOURCE_EXHAUSTED, time.monotonic()
        if action is Action.ATTACH:
            # Behind one address there may be a whole fleet of which nobody is known.
            if caller.role is not Role.OPEN and not self._attaches.is_granted(key, now_s):
                return code, f"{caller.name} attaches more often than an agent does"
        elif not self._calls.is_granted(key, now_s):
            return code, f"{caller.name} makes more than {self._limits.calls_per_s:g} calls/s"
        if question is not None and question.ByteSize() > self._limits.max_question_bytes:
            return code, f"a question of {question.ByteSize()} bytes"
        return grpc.StatusCode.OK, ""

    @contextlib.contextmanager
    def _counted(self, key: str) -> Any:
        self._watches[key] += 1
        try:
            yield
        finally:
            self._watches[key] -= 1
            if not self._watches[key]:
                del self._watches[key]


class _Opening(Relayed):
    """The opening of an agent's stream, as a call that can be refused."""

    def __init__(self, caller: Relayed) -> None:
        super().__init__(caller.shown)

    async def abort(self, code: grpc.StatusCode, why: str) -> None:
        """As a gRPC context does it: by raising."""
        raise RejectedError(code, why)


def _in_words(request: Any, action: Action | None) -> str:
    """What an action is asked for, in one line, with what is false: an order taken back says so."""
    if action is not Action.ACT:
        return ""
    fields = request.DESCRIPTOR.fields
    off = [f.name for f in fields if f.type == f.TYPE_BOOL and not getattr(request, f.name)]
    return " " + " ".join([*str(request).split(), *(f"{name}: false" for name in off)])


async def _first(requests: Any, context: Context) -> Any:
    """Ends the call where none comes."""
    with contextlib.suppress(StopAsyncIteration, TimeoutError):
        async with asyncio.timeout(READ_WITHIN_S):
            return await anext(requests)
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no request came")


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
