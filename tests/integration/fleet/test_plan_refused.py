"""A plan that a rank refuses, from its hooks over ring, agent and wire to the controller's log."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.layout.codec import encode_layout, layout_crc
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.telemetry.attachment import Clock
from pacekeeper.core.telemetry.records import PlanRefusedRecord
from pacekeeper.protos import status_pb2
from pacekeeper.trainer.hooks import hooks
from support.agents import Node, until
from support.controllers import SHAPE, ControllerProcess, first_layout, step_records
from support.engine_jobs import small_job
from support.fleet import Fleet
from support.rings import records_in

JOB, SLOW, REFUSING = "train", 1, 3
LAYOUT = first_layout()
WHY = "no room for its rows"


def attached(rings: Path) -> list[hooks.Hooks]:
    """All ranks of the job on one node, running LAYOUT."""
    paces = [
        hooks.attach(
            job=JOB, rank=rank, world_size=4, ring_dir=str(rings), clock=Clock.EMULATED, model=SHAPE
        )
        for rank in LAYOUT.ranks
    ]
    paces[0].ring.write_layout(LAYOUT.generation, encode_layout(LAYOUT))
    for pace in paces:
        crc = layout_crc(LAYOUT)
        pace.report_plan_applied(step=0, generation=LAYOUT.generation, layout_crc=crc)
    return paces


async def train_until_offered(paces: list[hooks.Hooks], controller: ControllerProcess) -> Any:
    """Steps, one rank slow from the 20th on, until its plan is on offer everywhere."""

    def is_judged(step: int) -> bool:
        return bool(asked(controller).step >= step)

    for step in range(1, 80):
        for record in step_records(step, LAYOUT, {SLOW: 1.65} if step >= 20 else None):
            paces[record.rank].ring.write(record)
        await until(lambda: is_judged(step), f"step {step}")  # noqa: B023
        if asked(controller).desired_generation > LAYOUT.generation:
            await until(lambda: all(pace.offered_plan() for pace in paces), "the offer")
            return paces[REFUSING].offered_plan()
    raise AssertionError("never: an offer")


def asked(controller: ControllerProcess) -> Any:
    jobs = controller.status.ListJobs(status_pb2.ListJobsRequest(), timeout=30.0).jobs
    return next((job for job in jobs if job.name == JOB), status_pb2.Job())


def actions(controller: ControllerProcess) -> list[str]:
    request = status_pb2.ListIncidentsRequest(job=JOB)
    (incident,) = controller.status.ListIncidents(request, timeout=30.0).incidents
    return list(incident.actions)


def test_the_controller_hears_of_a_refusal_at_once_with_the_reason(tmp_path: Path) -> None:
    async def body(controller: ControllerProcess) -> None:
        node = Node(tmp_path, int(controller.address.rpartition(":")[2]))
        paces = attached(node.rings)
        await node.start()
        try:
            offer = await train_until_offered(paces, controller)
            number = offer.generation
            paces[REFUSING].refuse_plan(number, WHY)
            said = f"plan {number} given up: rank {REFUSING} refused plan {number}: {WHY}"
            await until(lambda: actions(controller), "the refusal")
            assert actions(controller)[0].startswith(said)
            line = f"plan={number} given up: rank {REFUSING} refused"
            await until(lambda: line in controller.log, "its line in the log")
            assert "not applied for" not in controller.log
            assert paces[REFUSING].offered_plan() != offer
        finally:
            await node.kill()

    with ControllerProcess(tmp_path) as controller:
        asyncio.run(body(controller))


def refusals(fleet: Fleet, rank: int) -> list[PlanRefusedRecord]:
    found = records_in(fleet.ring_path(rank))
    return [record for record in found if isinstance(record, PlanRefusedRecord)]


def test_a_trainer_that_can_not_follow_a_plan_says_so_once_and_trains_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = small_job(tmp_path, steps=30, replicas=2, slots_per_rank=2)
    crowded: Layout = even_layout(
        ranks=range(4), num_layers=2, num_experts=4, replicas=4, generation=2
    )
    with Fleet(directory=tmp_path, config=config) as fleet:
        fleet.await_step(4, 0)
        fleet.offer(crowded, base_generation=1)
        fleet.await_(lambda: all(refusals(fleet, rank) for rank in range(4)))
        fleet.offer(crowded, base_generation=1)  # said again
        assert fleet.codes() == [0]
        told = [refusals(fleet, rank) for rank in range(4)]
    assert [record for own in told for record in own] == [
        PlanRefusedRecord(
            rank=rank,
            generation=1,
            plan_generation=2,
            layout_crc=layout_crc(crowded),
            reason=told[0][0].reason,
        )
        for rank in range(4)
    ]
    assert "2 slots" in told[0][0].reason
