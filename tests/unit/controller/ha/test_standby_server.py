"""The servers of a standby, over TLS: reads, refusals, and calls at the wrong port."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pacekeeper.cli.admin.ca import Kind
from pacekeeper.controller.ha.standby_reads import StandbyReads
from pacekeeper.controller.ha.standby_server import standby_servers
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.security import AccessConfig, TlsConfig
from pacekeeper.protos import control_pb2_grpc, status_pb2, status_pb2_grpc, tls
from pacekeeper.protos.stale_reads import AGE, LEADER
from support.authorities import Authority
from support.ports import free_port

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"
STATE = State(jobs={"train": JobState(name="train")})
Ask = Callable[[Any], Awaitable[Any]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def viewer_of(authority: Authority) -> TlsConfig:
    return authority.tls(authority.cert(Kind.VIEWER, "ann"))


def node_of(authority: Authority) -> TlsConfig:
    return authority.tls(authority.cert(Kind.NODE, "n1"))


def asked(
    folder: Path,
    authority: Authority,
    who: TlsConfig,
    ask: Ask,
    *,
    state: State | None = STATE,
    port: str = "api_listen",
) -> Any:
    """What a caller with these files gets of a standby that read `state` a minute ago."""
    config = ControllerConfig(
        listen=f"127.0.0.1:{free_port()}",
        api_listen=f"127.0.0.1:{free_port()}",
        store=NOWHERE,
        tls=authority.tls(authority.cert(Kind.CONTROLLER, "c", hosts=("127.0.0.1",))),
        access=AccessConfig(audit=str(folder / "audit.jsonl")),
    )

    async def scenario() -> Any:
        last = None if state is None else (state, time.monotonic() - 60.0)
        reads = StandbyReads(NOWHERE, last)
        metrics = ControllerMetrics.of(config)
        async with (
            standby_servers(config, reads, metrics, lambda: "10.0.0.1:7444"),
            tls.aio_channel(getattr(config, port), who) as channel,
        ):
            found = await ask(channel)
        await reads.close()
        return found

    return asyncio.run(scenario())


async def list_jobs(channel: Any) -> tuple[list[str], dict[str, str]]:
    stub: Any = status_pb2_grpc.StatusServiceStub(channel)
    call = stub.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0)
    answer = await call
    return [job.name for job in answer.jobs], dict(await call.initial_metadata())


async def attach(channel: Any) -> Any:
    stub: Any = control_pb2_grpc.AgentControlServiceStub(channel)
    return await stub.Attach().read()


def refusal(folder: Path, authority: Authority, who: TlsConfig, ask: Ask, **more: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refused:
        asked(folder, authority, who, ask, **more)
    return refused.value


def test_a_viewer_reads_and_sees_the_age(tmp_path: Path, authority: Authority) -> None:
    jobs, headers = asked(tmp_path, authority, viewer_of(authority), list_jobs)
    assert jobs == ["train"]
    assert float(headers[AGE]) >= 60.0 and headers[LEADER] == "10.0.0.1:7444"


def test_access_control_is_that_of_a_leader(tmp_path: Path, authority: Authority) -> None:
    agent = node_of(authority)
    error = refusal(tmp_path, authority, agent, list_jobs)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED


def test_what_was_never_read_is_not_shown(tmp_path: Path, authority: Authority) -> None:
    viewer = viewer_of(authority)
    error = refusal(tmp_path, authority, viewer, list_jobs, state=None)
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "10.0.0.1:7444" in error.details()


def test_a_watch_is_refused_with_the_leaders_address(tmp_path: Path, authority: Authority) -> None:
    async def watch(channel: Any) -> None:
        stub: Any = status_pb2_grpc.StatusServiceStub(channel)
        async for _ in stub.WatchIncidents(status_pb2.WatchIncidentsRequest(), timeout=30.0):
            pass

    error = refusal(tmp_path, authority, viewer_of(authority), watch)
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "10.0.0.1:7444" in error.details()


def test_agents_are_refused_at_their_own_port_with_the_leaders_address(
    tmp_path: Path, authority: Authority
) -> None:
    error = refusal(tmp_path, authority, node_of(authority), attach, port="listen")
    assert error.code() is grpc.StatusCode.UNAVAILABLE and "10.0.0.1:7444" in error.details()


@pytest.mark.parametrize(
    ("ask", "port", "code", "option"),
    [
        (attach, "api_listen", grpc.StatusCode.INVALID_ARGUMENT, "[controller] listen"),
        (list_jobs, "listen", grpc.StatusCode.UNIMPLEMENTED, "[controller] api_listen"),
    ],
)
def test_a_call_at_the_other_port_is_told_the_right_one(
    tmp_path: Path, authority: Authority, ask: Ask, port: str, code: grpc.StatusCode, option: str
) -> None:
    error = refusal(tmp_path, authority, node_of(authority), ask, port=port)
    assert error.code() is code and option in error.details()
