"""While a decision is made the controller answers: who asks, who reports, who beats."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pacekeeper.controller.app import effects
from pacekeeper.controller.app.controller import Controller
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.state.events import NodeReported
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Decision
from pacekeeper.core.layout.codec import encode_layout
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import Record
from pacekeeper.protos import status_pb2, status_pb2_grpc
from support.controllers import PATIENCE_S
from support.machine_driver import FIRST, JOB, QUICK, WARM, applied, attachment, step

Scene = Callable[[Controller, Any], Awaitable[None]]


def play(tmp_path: Path, scene: Scene) -> Controller:
    """The scene with a controller that serves, in this process; its inbox is consumed."""
    config = replace(
        QUICK, listen="127.0.0.1:0", api_listen="127.0.0.1:0", store=str(tmp_path / "store.sqlite")
    )
    controller = Controller(config)

    async def run() -> None:
        server, address = await controller._serve_people()
        consumer = asyncio.create_task(controller._consume())
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                async with asyncio.timeout(PATIENCE_S):
                    await scene(controller, status_pb2_grpc.StatusServiceStub(channel))
        finally:
            consumer.cancel()
            controller.planner.close()
            await server.stop(None)
            controller.store.close()

    asyncio.run(run())
    return controller


async def report(controller: Controller, *records: Record, **parts: Any) -> None:
    part = JobReport(job=JOB, records=records, **parts)
    whole = NodeReport(sequence=1, sent_mono_s=0.0, jobs=(part,))
    await controller._put(NodeReported(node="node-0", agent_incarnation="a", report=whole))


async def train_until_found(controller: Controller) -> int:
    """Four ranks, one of them slow, until it is found; the number of the next step."""
    await report(controller, attached=tuple(map(attachment, range(4))))
    await report(controller, *applied(FIRST), layouts=((1, encode_layout(FIRST)),))
    number = 0
    while not controller.state.jobs[JOB].open_incidents:
        await report(controller, *step(number, slow=2 if number >= WARM else None))
        await asyncio.sleep(0.01)
        number += 1
    return number


def test_status_and_reports_are_served_while_a_plan_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def slow(view: PlanningSnapshot, config: PolicyConfig) -> Decision:
        if view.slow:
            assert may_end.wait(PATIENCE_S)
        return decide(view, config)

    async def scene(controller: Controller, status: Any) -> None:
        number = await train_until_found(controller)
        for asked in range(3):
            await report(controller, *step(number + asked, slow=2))
            assert controller.state.jobs[JOB].plan.asked, "the decision is still being made"
            (job,) = (await status.ListJobs(status_pb2.ListJobsRequest(), timeout=60.0)).jobs
            assert (job.name, job.step, job.desired_generation) == (JOB, number + asked, 1)
        may_end.set()
        while controller.state.jobs[JOB].plan.desired is None:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(effects, "decide", slow)
    controller = play(tmp_path, scene)
    desired = controller.state.jobs[JOB].plan.desired
    assert desired is not None and desired.generation == 2


def test_a_bug_in_a_decision_is_counted_and_the_next_facts_are_decided_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    failures = iter([KeyError("a bug"), KeyError("a bug")])

    def failing(view: PlanningSnapshot, config: PolicyConfig) -> Decision:
        if view.slow and (error := next(failures, None)) is not None:
            raise error
        return decide(view, config)

    async def scene(controller: Controller, status: Any) -> None:
        number = await train_until_found(controller)
        while controller.state.jobs[JOB].plan.desired is None:
            await report(controller, *step(number, slow=2))
            await asyncio.sleep(0.01)
            number += 1

    monkeypatch.setattr(effects, "decide", failing)
    monkeypatch.setattr(
        "pacekeeper.controller.app.controller._log.error",
        lambda text, *a, **k: said.append(text % a),
    )
    controller = play(tmp_path, scene)
    assert said == ["no decision: job=moe: KeyError('a bug')"]
    metrics = controller.metrics.registry
    assert metrics.get_sample_value("pacekeeper_advance_failures_total") == 2
