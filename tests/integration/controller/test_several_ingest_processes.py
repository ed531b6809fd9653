"""Several ingest processes on one port, under a real controller."""

import os
import signal
from pathlib import Path

from pacekeeper.core.errors import ExitCode
from pacekeeper.protos import control_pb2, status_pb2
from pacekeeper.protos.convert import reports
from support.commands import pacekeeper
from support.controllers import ControllerProcess, ScriptedAgent, children, until

NUM_AGENTS = 24


def hello(number: int) -> control_pb2.Hello:
    return control_pb2.Hello(
        protocol_version=reports.PROTOCOL_VERSION, node=f"n{number}", agent_incarnation="x"
    )


def test_agents_are_spread_over_the_processes_and_a_dead_one_takes_its_own_with_it(
    tmp_path: Path,
) -> None:
    config = tmp_path / "controller.toml"
    config.write_text("[controller]\ningest_processes = 2\n")
    with ControllerProcess(tmp_path, "--config", str(config)) as controller:
        processes = children(controller.process.pid)
        assert len(processes) == 2
        agents = [ScriptedAgent(controller.address, hello(i)) for i in range(NUM_AGENTS)]
        for agent in agents:
            agent.report_and_wait()
        os.kill(processes[0], signal.SIGKILL)

        def is_connected() -> dict[str, bool]:
            nodes = controller.status.ListNodes(status_pb2.ListNodesRequest()).nodes
            return {node.name: node.is_connected for node in nodes}

        lost = until("its agents are away", lambda: [a for a in agents if a.error is not None])
        until("the controller knows", lambda: list(is_connected().values()).count(False) > 0)
        until("it is started again", lambda: len(children(controller.process.pid)) == 2)
        stayed = [agent for agent in agents if agent.error is None]
        assert lost and stayed, "with 24 connections one process has all of them once in 8 million"
        for agent in stayed:
            agent.report_and_wait()
        assert controller.stop() == 0


def test_a_port_that_is_taken_is_not_shared(tmp_path: Path) -> None:
    config = tmp_path / "controller.toml"
    config.write_text("[controller]\ningest_processes = 2\n")
    with ControllerProcess(tmp_path, "--config", str(config)) as controller:
        second = pacekeeper(
            "controller",
            *("--config", str(config), "--listen", controller.address),
            *("--store", str(tmp_path / "second.sqlite")),
        )
        assert second.returncode == ExitCode.HOST
        assert controller.address in second.stderr
