"""The gate: found out, judged, written down, and only then the method runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.audit_log import AuditLog
from pacekeeper.controller.api.auth.authenticator import Authenticator
from pacekeeper.controller.api.auth.interceptor import PRINCIPAL, AuthInterceptor
from pacekeeper.controller.api.auth.rbac import METHODS, Action, Role
from pacekeeper.controller.api.auth.tokens import (
    TokenFile,
    TokenRecord,
    change_tokens,
    format_token,
    secret_digest,
)
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.security import AccessConfig, LimitsConfig
from pacekeeper.protos import operator_pb2, status_pb2

READ, WATCH, ATTACH = (
    "/pacekeeper.v1.StatusService/ListJobs",
    "/pacekeeper.v1.StatusService/WatchSteps",
    "/pacekeeper.v1.AgentControlService/Attach",
)
ACT = "/pacekeeper.v1.Test/Act"
HEALTH = "/grpc.health.v1.Health/Check"
SECRET = "s" * 43
FOR_EVER = 4e9
USUAL = LimitsConfig()


class Refused(Exception):
    """What `abort` does to a handler."""


class Context:
    """Of a call: who is at the other end, and how it was ended."""

    def __init__(self, *, token: str = "", uri: str = "", peer: str = "ipv4:192.0.2.1:5") -> None:
        self._peer = peer
        self._auth = {"x509_pem_cert": [b"pem"], "peer_uri": [uri.encode()]} if uri else {}
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.end: tuple[grpc.StatusCode, str] | None = None

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._auth

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(self, code: grpc.StatusCode, why: str) -> None:
        self.end = (code, why)
        raise Refused(why)


class World:
    """A gate with one token of each role, and what it wrote down."""

    def __init__(self, folder: Path, *, asks: bool = True, limits: LimitsConfig = USUAL) -> None:
        self.path = folder / "audit.jsonl"
        self.failures: list[None] = []
        self.audit = AuditLog(
            self.path,
            max_bytes=1 << 20,
            kept=2,
            on_failure=lambda: self.failures.append(None),
        )
        roles = {"1" * 8: Role.VIEWER, "2" * 8: Role.OPERATOR, "3" * 8: Role.AGENT}
        records = [record(number, role, FOR_EVER) for number, role in roles.items()]
        records.append(record("4" * 8, Role.VIEWER, 1.0))
        change_tokens(folder / "tokens", lambda _: tuple(records))
        self.tokens = {role: format_token(number, SECRET) for number, role in roles.items()}
        self.expired = format_token("4" * 8, SECRET)
        self.gate = AuthInterceptor(
            authenticator=Authenticator(
                is_required=asks,
                config=AccessConfig(),
                tokens=TokenFile(folder / "tokens"),
            ),
            limits=limits,
            audit=self.audit,
            state=State,
        )
        self.ran: list[str] = []
        self.num_read = 0  # requests

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def call(self, method: str, context: Context, request: Any = None) -> Any:
        """One call with one answer, through the gate."""

        async def inner(request: Any, context: Context) -> str:
            self.ran.append(PRINCIPAL.get().name)
            return "answer"

        async def scene() -> Any:
            handler = await self.gate.intercept_service(
                served(grpc.unary_unary_rpc_method_handler(inner)), SimpleNamespace(method=method)
            )
            question = status_pb2.ListJobsRequest() if request is None else request
            return await handler.stream_unary(self.sent(question), context)

        return asyncio.run(scene())

    async def sent(self, request: Any) -> AsyncIterator[Any]:
        self.num_read += 1
        yield request

    def refusal(self, method: str, context: Context, request: Any = None) -> grpc.StatusCode:
        with pytest.raises(Refused):
            self.call(method, context, request)
        assert context.end is not None
        return context.end[0]


def record(token_id: str, role: Role, ends: float) -> TokenRecord:
    return TokenRecord(
        token_id=token_id, secret_sha256=secret_digest(SECRET), role=role, name="x",
        created_unix_s=0.0, expires_unix_s=ends,
    )  # fmt: skip


async def one(request: Any) -> AsyncIterator[Any]:
    yield request


def served(handler: Any) -> Any:
    async def find(details: Any) -> Any:
        return handler

    return find


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(
        "pacekeeper.controller.api.auth.interceptor.METHODS", {**METHODS, ACT: Action.ACT}
    )
    return World(tmp_path)


def test_an_order_that_is_taken_back_is_written_down_as_that(world: World) -> None:
    """protobuf's own text leaves out what is false: on and off would read the same."""
    for is_on, word in ((False, "is_on: false"), (True, "is_on: true")):
        request = operator_pb2.GiveOrderRequest(kind="ORDER_KIND_DRY_RUN", is_on=is_on)
        world.call(ACT, Context(token=world.tokens[Role.OPERATOR]), request)
        assert word in world.lines()[-1]["about"]


def test_a_viewer_reads_and_no_line_is_written(world: World) -> None:
    assert world.call(READ, Context(token=world.tokens[Role.VIEWER])) == "answer"
    assert world.ran == ["viewer/x by token"]
    assert world.lines() == []


def test_who_is_nobody_is_refused_before_the_request_is_read(world: World) -> None:
    """A dozen requests of the largest size, of nobody, took two gigabytes and kept them."""
    for shown in (world.expired, ""):
        assert world.refusal(READ, Context(token=shown)) is grpc.StatusCode.UNAUTHENTICATED
    assert world.num_read == 0
    assert world.call(READ, Context(token=world.tokens[Role.VIEWER])) == "answer"
    assert world.call(HEALTH, Context()) == "answer"
    assert world.num_read == 2


def test_a_call_without_a_request_ends(world: World) -> None:
    async def scene() -> None:
        async def inner(request: Any, context: Context) -> str:
            raise AssertionError("it does not run")

        async def nothing() -> AsyncIterator[Any]:
            return
            yield

        handler = await world.gate.intercept_service(
            served(grpc.unary_unary_rpc_method_handler(inner)), SimpleNamespace(method=READ)
        )
        await handler.stream_unary(nothing(), context)

    context = Context(token=world.tokens[Role.VIEWER])
    with pytest.raises(Refused):
        asyncio.run(scene())
    assert context.end is not None and context.end[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_viewers_token_on_an_operators_call_is_refused_and_audited(world: World) -> None:
    code = world.refusal(ACT, Context(token=world.tokens[Role.VIEWER]))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert world.ran == []
    (line,) = world.lines()
    assert (line["verdict"], line["action"], line["caller"]) == (
        "refused", "act", "viewer/x by token",
    )  # fmt: skip
    assert "operator" in line["reason"]


def test_an_operators_action_is_written_down_before_it_is_done(world: World) -> None:
    request = status_pb2.GetJobRequest(job="moe")
    world.call(ACT, Context(token=world.tokens[Role.OPERATOR]), request)
    (line,) = world.lines()
    assert (line["verdict"], line["peer"]) == ("allowed", "ipv4:192.0.2.1:5")
    assert line["about"] == 'Act job: "moe"'


def test_an_action_that_can_not_be_written_down_is_not_done(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pacekeeper.controller.api.auth.audit_log.os.write", full_disk)
    code = world.refusal(ACT, Context(token=world.tokens[Role.OPERATOR]))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (world.ran, world.failures) == ([], [None])
    assert world.call(READ, Context(token=world.tokens[Role.VIEWER])) == "answer", "who asks may"


@pytest.mark.parametrize(
    ("token", "words"),
    [("", "certificate"), ("pk1.x", "not a token"), ("expired", "expired")],
)
def test_who_shows_nothing_that_counts_is_refused_and_audited(
    world: World, token: str, words: str
) -> None:
    shown = world.expired if token == "expired" else token
    assert world.refusal(READ, Context(token=shown)) is grpc.StatusCode.UNAUTHENTICATED
    (line,) = world.lines()
    assert words in line["reason"] and line["verdict"] == "refused"
    assert SECRET not in world.path.read_text()


def test_health_answers_everybody(world: World) -> None:
    assert world.call("/grpc.health.v1.Health/Check", Context()) == "answer"


def test_a_served_method_that_the_table_does_not_name_is_refused_to_all(world: World) -> None:
    shown = Context(token=world.tokens[Role.OPERATOR])
    assert world.refusal("/other.Service/Do", shown) is grpc.StatusCode.PERMISSION_DENIED
    (line,) = world.lines()
    assert line["action"] == "/other.Service/Do"


def test_a_method_that_nobody_serves_stays_unknown(world: World) -> None:
    async def scene() -> Any:
        return await world.gate.intercept_service(served(None), SimpleNamespace(method="/x/Y"))

    assert asyncio.run(scene()) is None


def test_a_certificates_identity_is_a_caller(world: World) -> None:
    uri = "spiffe://pacekeeper/viewer/ann"
    assert world.call(READ, Context(uri=uri)) == "answer"
    assert world.refusal(READ, Context(uri="spiffe://pacekeeper/node/a")) is (
        grpc.StatusCode.PERMISSION_DENIED
    )


def test_an_agent_that_speaks_for_another_node_is_refused_and_audited(world: World) -> None:
    caller = rbac.principal_of_certificate(["spiffe://pacekeeper/node/a"], [], "pacekeeper", False)
    assert world.gate.check_attach(caller, "a", "ipv4:192.0.2.1:5").is_allowed
    assert not world.gate.check_attach(caller, "b", "ipv4:192.0.2.1:5").is_allowed
    assert [line["verdict"] for line in world.lines()] == ["allowed", "refused"]


def test_an_open_controller_asks_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, asks=False)
    assert world.call(READ, Context()) == "answer"
    assert world.call(READ, Context(token="nonsense")) == "answer"


def test_too_many_calls_and_too_large_questions_are_refused(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        limits=LimitsConfig(calls_per_s=1e-9, calls_at_once=2, max_question_bytes=1024),
    )
    shown = world.tokens[Role.VIEWER]
    large = status_pb2.GetJobRequest(job="x" * 2000)
    assert world.refusal(READ, Context(token=shown), large) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert world.call(READ, Context(token=shown)) == "answer"
    assert world.refusal(READ, Context(token=shown)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    other = Context(token=world.tokens[Role.OPERATOR])
    assert world.call(READ, other) == "answer", "each caller has a limit of its own"


def test_one_caller_may_not_open_watches_without_end(tmp_path: Path) -> None:
    world = World(tmp_path, limits=LimitsConfig(watches=1))
    shown = world.tokens[Role.VIEWER]

    async def steps(request: Any, context: Context) -> AsyncIterator[str]:
        yield "first"
        yield "second"

    async def scene() -> list[Any]:
        handler = await world.gate.intercept_service(
            served(grpc.unary_stream_rpc_method_handler(steps)), SimpleNamespace(method=WATCH)
        )
        request = status_pb2.WatchStepsRequest()
        first = handler.stream_stream(one(request), Context(token=shown))
        told = [await anext(first)]
        second = Context(token=shown)
        with pytest.raises(Refused):
            await anext(handler.stream_stream(one(request), second))
        told.append(second.end)
        await first.aclose()
        told.append(await anext(handler.stream_stream(one(request), Context(token=shown))))
        return told

    first, refused, again = asyncio.run(scene())
    assert (first, again) == ("first", "first"), "a watch that ended leaves its place"
    assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
