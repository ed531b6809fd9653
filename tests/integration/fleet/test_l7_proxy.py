"""Agents behind a real proxy that ends HTTP/2 (haproxy), which restarts."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.protos import control_pb2, status_pb2
from pacekeeper.protos.convert import reports
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import Node, rings_of
from support.commands import Started
from support.controllers import (
    ControllerProcess,
    ScriptedAgent,
    first_layout,
    step_records,
    until,
)
from support.ports import free_port

CONFIG = """
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
    timeout tunnel 1h
frontend agents
    bind 127.0.0.1:{port} proto h2
    default_backend controller
backend controller
    server one {address} proto h2
"""

LAYOUT = first_layout()

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason="haproxy is not installed (apt-get install haproxy)"
)


class Proxy:
    """haproxy before a controller; may be started again on the same port."""

    def __init__(self, folder: Path, address: str) -> None:
        self.port = free_port()
        self._config = folder / "haproxy.cfg"
        self._config.write_text(CONFIG.format(port=self.port, address=address))
        self.start()

    def start(self) -> None:
        """Start it in the foreground."""
        self._process = subprocess.Popen(["haproxy", "-db", "-q", "-f", str(self._config)])
        until("it listens", self._listens)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 10.0).close()
        except ConnectionRefusedError:
            return False
        return True

    def stop(self) -> None:
        """Break all its connections."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60.0)


def test_an_agent_reports_through_a_proxy_and_is_back_after_it_restarts(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        proxy = Proxy(tmp_path, controller.address)
        node = Node(tmp_path, proxy.port)
        rings = rings_of(node, "behind", LAYOUT)
        flags = ["--controller", f"127.0.0.1:{proxy.port}", "--ring-dir", str(node.rings)]
        with Started("agent", *flags, "--node", "far", "--metrics-listen", ""):
            try:
                for number in range(2):
                    _write_step(rings, number)
                until("reports are there", lambda: _steps(controller) == [1])
                proxy.stop()
                until("the stream is lost", lambda: not _nodes(controller)["far"])
                for number in range(2, 5):
                    _write_step(rings, number)
                proxy.start()
                until("the agent is back", lambda: _nodes(controller)["far"])
                until("the outage's steps are there", lambda: _steps(controller) == [4])
            finally:
                proxy.stop()


def _write_step(rings: Mapping[int, Ring], number: int) -> None:
    for record in step_records(number, LAYOUT):
        rings[record.rank].write(record)


def _steps(controller: ControllerProcess) -> list[int]:
    return [job.step for job in controller.status.ListJobs(status_pb2.ListJobsRequest()).jobs]


def _nodes(controller: ControllerProcess) -> dict[str, bool]:
    nodes = controller.status.ListNodes(status_pb2.ListNodesRequest()).nodes
    return {node.name: node.is_connected for node in nodes}


def test_many_streams_share_the_proxys_connections(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path) as controller:
        proxy = Proxy(tmp_path, controller.address)
        try:
            agents = [ScriptedAgent(f"127.0.0.1:{proxy.port}", _hello(i)) for i in range(16)]
            for agent in agents:
                until("it is welcome", lambda: agent.is_welcome)  # noqa: B023
                agent.report_and_wait(JobReport(job="j", records=()))
            assert len(_nodes(controller)) == 16
            agents[0].close()
            until("one is away", lambda: list(_nodes(controller).values()).count(False) == 1)
            agents[1].report_and_wait()
        finally:
            proxy.stop()


def _hello(number: int) -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=reports.PROTOCOL_VERSION, node=f"n{number}", agent_incarnation="x"
    )
