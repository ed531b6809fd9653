"""What goes wrong inside the controller or under it: said once, counted, and nothing is lost."""

import asyncio
import os
import re
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.machine import machine
from pacekeeper.controller.state.events import (
    Event,
    NodeAttached,
    NodeReported,
    NodesReported,
    Tick,
)
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.errors import ExitCode
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.protos import control_pb2, status_pb2
from support.controllers import (
    HELLO,
    PATIENCE_S,
    ControllerProcess,
    ScriptedAgent,
    applied,
    attached,
    first_layout,
    killed,
    step_records,
    until,
)
from support.database_faults import small_disk

JOB = "train"
LAYOUT = first_layout()
SURVIVORS = shrink(LAYOUT, dead=[1], generation=2)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControllerProcess]:
    with ControllerProcess(tmp_path) as process:
        yield process


def incidents(controller: ControllerProcess) -> list[Any]:
    request = status_pb2.ListIncidentsRequest()
    return list(controller.status.ListIncidents(request, timeout=30.0).incidents)


def health(controller: ControllerProcess) -> list[str]:
    """Of the whole, of the agents' side, of those who ask."""
    stub: Any = health_pb2_grpc.HealthStub(controller.channel)
    names = ("", "pacekeeper.v1.AgentControlService", "pacekeeper.v1.StatusService")
    requests = [health_pb2.HealthCheckRequest(service=name) for name in names]
    answers = [stub.Check(request, timeout=30.0).status for request in requests]
    return [health_pb2.HealthCheckResponse.ServingStatus.Name(answer) for answer in answers]


def die_and_go_on(agent: ScriptedAgent) -> None:
    """Rank 1 is killed; the survivors write and run a layout of their own."""
    agent.report_and_wait(JobReport(job=JOB, records=(killed(1),)))
    layouts = ((SURVIVORS.generation, encode_layout(SURVIVORS)),)
    records = applied(SURVIVORS, step=5)
    agent.report_and_wait(JobReport(job=JOB, layouts=layouts, records=records))


def test_while_the_store_refuses_intake_waits_and_nothing_is_lost(
    controller: ControllerProcess, tmp_path: Path
) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # as a full disk would: no write gets through
    sequence = agent.report(JobReport(job=JOB, records=(killed(1),)))
    until("it is said", lambda: "refuses" in controller.log)
    until("probes see it", lambda: health(controller)[0] == "NOT_SERVING")
    assert health(controller) == ["NOT_SERVING", "NOT_SERVING", "SERVING"]
    assert agent.acknowledged < sequence, "what is not stored is not acknowledged"
    assert incidents(controller) == [], "asked, it answers; what is not stored is not told"
    assert agent.deaths() == []
    other.execute("ROLLBACK")
    other.close()
    until("it goes on", lambda: agent.acknowledged == sequence)
    assert [i.rank for i in incidents(controller)] == [1]
    assert "accepts writes again" in controller.log
    assert health(controller) == ["SERVING"] * 3
    agent.close()


def test_a_disk_that_fills_up_stops_intake_until_it_has_room(tmp_path: Path) -> None:
    with small_disk(16) as disk:
        if disk is None:
            pytest.skip("needs the right to mount")
        store = str(disk.folder / "store.sqlite")
        with ControllerProcess(tmp_path, "--store", store) as controller:
            agent = ScriptedAgent(controller.address)
            agent.report_and_wait(attached(JOB, LAYOUT))
            disk.fill()
            sequence = agent.report(JobReport(job=JOB, records=(killed(1),)))
            until("probes see it", lambda: health(controller)[0] == "NOT_SERVING")
            assert "full" in controller.log and agent.acknowledged < sequence
            disk.empty()
            until("it goes on", lambda: agent.acknowledged == sequence)
            assert [i.rank for i in incidents(controller)] == [1]
            controller.kill()
        with ControllerProcess(tmp_path, "--store", store) as again:
            assert [i.rank for i in incidents(again)] == [1], "what was acknowledged is stored"


def test_a_damaged_store_ends_the_controller_and_nothing_more_is_acknowledged(
    controller: ControllerProcess, tmp_path: Path
) -> None:
    agent = ScriptedAgent(controller.address)
    agent.report_and_wait(attached(JOB, LAYOUT))
    other = sqlite3.connect(tmp_path / "store.sqlite", isolation_level=None)
    other.execute("CREATE TABLE written_after (one)")  # so that pages are read from the file
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    with (tmp_path / "store.sqlite").open("r+b") as file:  # as a bad disk would
        size = file.seek(0, os.SEEK_END)
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    sequence = agent.report(JobReport(job=JOB, records=(killed(1),)))
    assert controller.process.wait(PATIENCE_S) == ExitCode.HOST
    until("the stream ends", lambda: not agent._listener.is_alive())
    told = [m.acknowledge.sequence for m in agent.heard if m.HasField("acknowledge")]
    assert max(told) < sequence
    assert agent.deaths() == []
    assert "is damaged" in controller.log and "move it away" in controller.log
    assert "Traceback" not in controller.log
    agent.close()


def test_a_bug_of_ours_costs_one_event_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: the machine of the test fails on one node's reports."""
    real = machine.advance

    def failing(state: State, event: Event, *, config: ControllerConfig, now_s: float) -> Any:
        if isinstance(event, NodeAttached) and event.node == "unlucky":
            raise KeyError("a bug")
        return real(state, event, config=config, now_s=now_s)

    async def scene(controller: Controller) -> None:
        consumer = asyncio.create_task(controller._consume())
        for node in ("unlucky", "unlucky", "lucky"):
            await controller._put(
                NodeAttached(node=node, product_version="0", agent_incarnation="x")
            )
        await controller._put(Tick())
        consumer.cancel()

    monkeypatch.setattr(machine, "advance", failing)
    said: list[str] = []
    monkeypatch.setattr(
        "pacekeeper.controller.app.controller._log.error",
        lambda text, *a, **k: said.append(text % a),
    )
    config = replace(
        ControllerConfig(),
        listen="127.0.0.1:0",
        api_listen="127.0.0.1:0",
        store=str(tmp_path / "store"),
    )
    controller = Controller(config)
    asyncio.run(scene(controller))
    assert set(controller.state.nodes) == {"lucky"}
    assert said == ["event dropped: NodeAttached: KeyError('a bug')"]
    failures = controller.metrics.registry.get_sample_value("pacekeeper_advance_failures_total")
    assert failures == 2


def test_of_reports_taken_together_only_that_is_dropped_that_fails_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = machine.advance

    def failing(state: State, event: Event, *, config: ControllerConfig, now_s: float) -> Any:
        if isinstance(event, NodesReported) and "b" in {one.node for one in event.reports}:
            raise KeyError("a bug")
        return real(state, event, config=config, now_s=now_s)

    def reported(node: str) -> NodeReported:
        report = NodeReport(sequence=1, sent_mono_s=0.0, jobs=(attached(f"job-{node}", LAYOUT),))
        return NodeReported(node=node, agent_incarnation="x", report=report)

    async def scene(controller: Controller) -> None:
        consumer = asyncio.create_task(controller._consume())
        await controller._put_all(
            [
                NodeAttached(node=node, product_version="0", agent_incarnation="x")
                for node in ("a", "b", "c")
            ]
        )
        await controller._put_all([reported(node) for node in ("a", "b", "c")])
        consumer.cancel()

    monkeypatch.setattr(machine, "advance", failing)
    controller = Controller(
        replace(
            ControllerConfig(),
            listen="127.0.0.1:0",
            api_listen="127.0.0.1:0",
            store=str(tmp_path / "store"),
        )
    )
    asyncio.run(scene(controller))
    assert set(controller.state.jobs) == {"job-a", "job-c"}
    value = controller.metrics.registry.get_sample_value
    assert value("pacekeeper_advance_failures_total") == 1
    assert value("pacekeeper_reports_total") == 2


def test_a_wall_clock_that_is_set_while_it_runs_dates_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(controller: Controller) -> None:
        before_s, real = controller.state.unix_offset_s, time.time
        monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
        parts = [asyncio.create_task(part) for part in (controller._consume(), controller._tick())]
        async with asyncio.timeout(PATIENCE_S):
            while controller.state.unix_offset_s < before_s + 3599.0:
                await asyncio.sleep(0.01)
        for part in parts:
            part.cancel()

    config = replace(ControllerConfig(), store=str(tmp_path / "store"), tick_interval_s=0.01)
    asyncio.run(scene(Controller(config)))


def test_a_disk_that_can_not_be_read_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def unreadable(connection: sqlite3.Connection) -> int:
        asked.append(tmp_path)
        raise sqlite3.OperationalError("disk I/O error")

    async def scene(controller: Controller) -> None:
        parts = [asyncio.create_task(one) for one in (controller._consume(), controller._tick())]
        while len(asked) < 3:
            await asyncio.sleep(0)
            assert not any(part.done() for part in parts)
        for part in parts:
            part.cancel()

    monkeypatch.setattr("pacekeeper.controller.storage.sqlite_file.used_bytes", unreadable)
    config = replace(
        ControllerConfig(),
        listen="127.0.0.1:0",
        api_listen="127.0.0.1:0",
        store=str(tmp_path / "store"),
    )
    asyncio.run(scene(Controller(replace(config, tick_interval_s=0.01))))


def test_metrics_count_what_came_in_and_what_was_refused(tmp_path: Path) -> None:
    with ControllerProcess(tmp_path, "--metrics-listen", "127.0.0.1:0") as controller:
        found = re.search(r"metrics=(\S+)", controller.log)
        assert found is not None
        url = f"http://{found.group(1)}/metrics"
        agent = ScriptedAgent(controller.address)
        agent.report_and_wait(attached(JOB, LAYOUT))
        for step in range(3):
            agent.report(JobReport(job=JOB, records=step_records(step, LAYOUT)))
        agent.report_and_wait()
        die_and_go_on(agent)
        agent.say(control_pb2.AttachRequest(hello=HELLO))
        agent.wait_for_end()
        wanted = {
            "pacekeeper_reports_total 7.0",
            "pacekeeper_reports_rejected_total 1.0",
            'pacekeeper_incidents_total{kind="death"} 1.0',
            'pacekeeper_incidents_open{kind="death"} 0.0',
            "pacekeeper_jobs 1.0",
            "pacekeeper_nodes_connected 0.0",
            'pacekeeper_job_generation{job_name="train"} 2.0',
            'pacekeeper_job_step{job_name="train"} 2.0',
        }

        def lines() -> set[str]:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return set(answer.read().decode().splitlines())

        until("gauges follow on ticks", lambda: wanted <= lines())
