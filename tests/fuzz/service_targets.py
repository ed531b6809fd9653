"""What is fuzzed of the services: questions, acts, pages, and what other services answer us.

Each runs the real code over a made-up fleet in a folder; no socket is opened. An answer that is a
refusal is told by its words, so that inputs which reach another refusal are damaged further.
"""

import asyncio
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from pacekeeper.cli.admin import ca
from pacekeeper.controller.api.auth import rbac
from pacekeeper.controller.api.auth.tokens import authenticate_token, decode_tokens
from pacekeeper.controller.api.operator_service import OperatorService
from pacekeeper.controller.api.status_service import StatusService
from pacekeeper.controller.observability.timeline_codec import (
    decode_incident_timeline,
    decode_job_timeline,
)
from pacekeeper.core.incidents import node_health
from pacekeeper.protos import operator_pb2, status_pb2
from support.web_scene import Scene, scene

Plain = tuple[Callable[[bytes], object], tuple[type[Exception], ...]]
QUESTIONS = ("ListJobs", "GetJob", "ListNodes", "ListIncidents", "ListProposals", "GetLayout",
             "GetExplanation", "GetPace", "ListOrders")  # fmt: skip
ACTS = ("ApproveProposal", "DenyProposal", "GiveOrder")
MOST_HEADERS = 64
_TARGET = re.compile(rb"[\x21-\x7e]+")


class AnsweredError(ValueError):
    """The service refused, as it may."""


def plain_targets(folder: Path) -> dict[str, Plain]:
    """By name: what runs a case, and the errors it states."""
    services = _Services(folder)
    return {
        "course": (decode_incident_timeline, (ValueError,)),
        "course-repacked": (
            lambda data: decode_incident_timeline(zlib.compress(data)),
            (ValueError,),
        ),
        "pace-repacked": (lambda data: decode_job_timeline(zlib.compress(data)), (ValueError,)),
        "node-verdict": (node_health.decode_node_health, (ValueError,)),
        "token-shown": (_token_shown, (ValueError,)),
        "identity": (_identity, (ValueError,)),
        "service-status": (services.question, (DecodeError, AnsweredError)),
        "service-operator": (services.act, (DecodeError, AnsweredError)),
        "web": (services.page, (AnsweredError,)),
    }  # fmt: skip


def certificate(path: Path) -> object:
    """As `pacekeeper certs show` reads it."""
    return ca.read_certificate(path)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


class _Services:
    """The status and operator services and the page, over one fleet that changes with the acts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: Scene | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def question(self, data: bytes) -> object:
        """First byte: which method; the rest is its request."""
        name = QUESTIONS[data[0] % len(QUESTIONS)] if data else QUESTIONS[0]
        request = getattr(status_pb2, f"{name}Request").FromString(data[1:])
        found = self._scene
        servicer = StatusService(
            state=lambda: found.state, past_layout=lambda job, at: None, history=found.history
        )
        return self._run(getattr(servicer, name)(request, Context()))

    def act(self, data: bytes) -> object:
        """Likewise, of the operators' service."""
        name = ACTS[data[0] % len(ACTS)] if data else ACTS[0]
        request = getattr(operator_pb2, f"{name}Request").FromString(data[1:])
        found = self._scene
        servicer = OperatorService(state=lambda: found.state, put=found.put)
        return self._run(getattr(servicer, name)(request, Context()))

    def page(self, data: bytes) -> object:
        """One request as it comes over a connection: line, headers, empty line, body."""
        scope, body = _http_scope(data)
        return self._run(_answer(self._scene.web().app(), scope, body))

    @property
    def _scene(self) -> Scene:
        """Made where it is first needed, and anew before its orders and audit fill the memory."""
        if self._made is None or len(self._made.heard) > 2000:
            home = self._folder / f"scene-{id(self._made)}"
            home.mkdir(exist_ok=True)
            for old in home.iterdir():
                old.unlink()
            self._made = scene(home, num_nodes=8, per_node=4)
        return self._made

    def _run(self, answer: Any) -> object:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(answer)


class Context:
    """What a method sees of gRPC: to refuse is to raise."""

    async def abort(self, code: Any, why: str) -> None:
        raise AnsweredError(f"{code.name} {why}")


def _http_scope(data: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = data.partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    method, _, rest = line.partition(b" ")
    target = rest.partition(b" ")[0]
    if not _TARGET.fullmatch(target):
        raise AnsweredError("400 as h11 refuses it, before us")
    path, _, query = target.partition(b"?")
    pairs = [header.partition(b":") for header in headers[:MOST_HEADERS]]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": method.decode("latin-1"), "path": path.decode("utf-8", "replace"),
        "raw_path": path, "query_string": query, "root_path": "", "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "headers": [(name.strip().lower(), value.strip()) for name, _, value in pairs],
    }  # fmt: skip
    return scope, body


async def _answer(app: Any, scope: dict[str, Any], body: bytes) -> bytes:
    told: list[bytes] = []
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        told.append(message.get("body", b""))

    await app(scope, receive, send)
    answered = b"".join(told)
    if status >= 400:
        raise AnsweredError(f"{status} {answered[:60].decode('utf-8', 'replace')}")
    return answered


def _identity(data: bytes) -> object:
    """Lines are the alternative names of a certificate: URIs, an empty line, DNS names."""
    uris, _, names = data.decode("utf-8", "replace").partition("\n\n")
    caller = rbac.principal_of_certificate(
        uris.splitlines(), names.splitlines(), "pacekeeper", True
    )
    if caller.role is rbac.Role.ANONYMOUS:
        raise ValueError(caller.why)
    return caller


def _token_shown(data: bytes) -> object:
    """A file of tokens, an empty line, and what somebody shows."""
    file, _, shown = data.rpartition(b"\n\n")
    caller = authenticate_token(shown.decode("utf-8", "replace"), decode_tokens(file), 0.5)
    if caller.role is rbac.Role.ANONYMOUS:
        raise ValueError(caller.why)
    return caller
