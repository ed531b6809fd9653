"""Which of several controllers a command asks."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pacekeeper.cli.common.client import open_channel
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.errors import UnreachableError

PATIENCE_S = 30.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Controller(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Says whether it leads once `may_answer`; lets `others` answer once it is asked that."""

    def __init__(self, status: Any, *, is_busy: bool, reads: Any = SERVING) -> None:
        self.others: list[Controller] = []
        self.num_asked = 0
        self._reads = reads
        self._status, self.may_answer = status, threading.Event()
        if not is_busy:
            self.may_answer.set()

    def Check(self, request: Any, context: Any) -> Any:
        if not request.service:
            self.num_asked += 1
            for other in self.others:
                other.may_answer.set()
        self.may_answer.wait(PATIENCE_S)
        status = self._reads if request.service else self._status
        return health_pb2.HealthCheckResponse(status=status)


@contextmanager
def serving(*controllers: Controller) -> Iterator[ClientConfig]:
    with ThreadPoolExecutor(8) as pool:
        servers, addresses = [], []
        for controller in controllers:
            server = grpc.server(pool)
            health_pb2_grpc.add_HealthServicer_to_server(controller, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            server.start()
            servers.append(server)
        try:
            yield ClientConfig(controller=",".join(addresses))
        finally:
            for controller in controllers:
                controller.may_answer.set()
            for server in servers:
                server.stop(None).wait()


def test_a_leader_that_is_busy_is_asked_no_less_for_that() -> None:
    """It answers when another one has long said that it stands by."""
    leader = Controller(SERVING, is_busy=True)
    standby = Controller(NOT_SERVING, is_busy=False)
    standby.others = [leader]
    with serving(leader, standby) as client, open_channel(client) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        asked = leader.num_asked
        health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert (leader.num_asked, standby.num_asked) == (asked + 1, 1)


def test_where_none_leads_one_that_answers_reads_is_asked() -> None:
    silent = Controller(NOT_SERVING, is_busy=False, reads=NOT_SERVING)
    standby = Controller(NOT_SERVING, is_busy=False)
    with serving(silent, standby) as client, open_channel(client) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert (silent.num_asked, standby.num_asked) == (1, 2)


def test_where_none_leads_that_is_said() -> None:
    standbys = [Controller(NOT_SERVING, is_busy=False, reads=NOT_SERVING) for _ in range(2)]
    with (
        serving(*standbys) as client,
        pytest.raises(UnreachableError, match=r"127\.0\.0\.1"),
        open_channel(client),
    ):
        pass
