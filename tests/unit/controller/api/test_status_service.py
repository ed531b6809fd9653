"""Watches: the newest is never lost, the slow one loses the oldest, nothing is left behind."""

import asyncio
from typing import Any

from pacekeeper.controller.api.status_service import WATCH_QUEUE, StatusService
from pacekeeper.controller.state.events import StepSummary
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.protos import status_pb2


def summary(step: int, job: str = "train") -> StepSummary:
    return StepSummary(
        job=job,
        step=step,
        generation=1,
        tokens=1,
        duration_s=1.0,
        loss=None,
        ranks=(),
        observed_s=(),
        expected_s=(),
        slowdown=(),
        watch="healthy",
    )


def incident(number: int, slowdown: float = 1.5, job: str = "train") -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=0,
        slowdown=slowdown,
        onset_step=1,
        step=2,
        reason="slow",
    )
    return Incident(incident_id=number, job=job, finding=finding, opened_unix_s=0.0)


def service(state: State | None = None) -> StatusService:
    known = State() if state is None else state
    return StatusService(state=lambda: known, past_layout=lambda job, generation: None)


def test_a_watcher_that_lags_loses_the_oldest_and_keeps_the_newest() -> None:
    async def scene() -> list[int]:
        status = service()
        watch: Any = status.WatchSteps(status_pb2.WatchStepsRequest(job="train"), None)
        first = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        for step in range(WATCH_QUEUE + 500):
            status.publish_step(summary(step))
            status.publish_step(summary(step, job="other"))
        told = [(await first).step]
        told += [(await anext(watch)).step for _ in range(WATCH_QUEUE - 1)]
        await watch.aclose()
        assert status._step_watchers == {}, "who is gone is forgotten"
        return told

    assert asyncio.run(scene()) == list(range(500, WATCH_QUEUE + 500))


def test_an_incident_that_changes_while_the_known_ones_are_told_is_told_again() -> None:
    known = State(jobs={"train": JobState(name="train", incidents=(incident(1), incident(2)))})

    async def scene() -> list[tuple[int, float]]:
        status = service(known)
        watch: Any = status.WatchIncidents(status_pb2.WatchIncidentsRequest(), None)
        told = [await anext(watch)]
        status.publish_incident(incident(1, slowdown=2.5))
        told += [await anext(watch), await anext(watch)]
        await watch.aclose()
        return [(m.incident.incident_id, m.incident.slowdown) for m in told]

    assert asyncio.run(scene()) == [(1, 1.5), (2, 1.5), (1, 2.5)]
