"""Links of a running job: a slow one is named as a link, with its place, and nobody's computing."""

from collections.abc import Mapping

import pytest

from pacekeeper.controller.state.events import OfferPlan
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.core.incidents.findings import Finding, FindingKind
from support.examples import seeds
from support.fabrics import Fabric
from support.machine_driver import QUICK, WARM, Driver, started, step

FAULT = WARM + 20


def run(
    driver: Driver, fabric: Fabric, first: int, end: int, slow: Mapping[int, float] | None = None
) -> int:
    """Steps [first, end); how many plans were offered."""
    plans = 0
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*fabric.records(number, slow or {}))
        plans += len(driver.all_said(OfferPlan))
    return plans


def found(driver: Driver) -> list[Finding]:
    return [incident.finding for incident in driver.job.incidents]


@pytest.mark.parametrize("seed", seeds(6))
def test_healthy_links_accuse_nobody(seed: int) -> None:
    driver = started(QUICK)
    run(driver, Fabric(seed), 0, 150)
    assert found(driver) == []


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("slowdown", [1.5, 4.0])
def test_a_slow_link_of_one_rank_is_named_as_a_link_and_no_computing(
    seed: int, slowdown: float
) -> None:
    driver, fabric, rank = started(QUICK), Fabric(seed), seed % 4
    run(driver, fabric, 0, FAULT)
    assert run(driver, fabric, FAULT, FAULT + 8, {rank: slowdown}) == 0
    (finding,) = found(driver)
    assert (finding.kind, finding.rank) == (FindingKind.LINK, rank)
    assert finding.slowdown == pytest.approx(slowdown, rel=0.1)
    assert finding.onset_step == FAULT
    assert "its link" in finding.reason
    assert driver.job.detection.evidence.slow == {}


@pytest.mark.parametrize(
    ("seed", "ends", "named", "place"),
    [
        (7, (0, 2), {0, 2}, "between ranks 0 and 2"),
        (8, (2, 3), {2, 3}, "the link of node node-1"),
        (
            9,
            (0, 1, 2, 3),
            {None},
            "the fabric, a node or port that all exchange with, or all hosts",
        ),
    ],
)
def test_a_link_is_named_by_what_its_slow_ends_share(
    seed: int, ends: tuple[int, ...], named: set[int | None], place: str
) -> None:
    driver, fabric = started(QUICK), Fabric(seed)
    run(driver, fabric, 0, FAULT)
    run(driver, fabric, FAULT, FAULT + 8, dict.fromkeys(ends, 3.0))
    assert {finding.rank for finding in found(driver)} == named
    assert all(place in finding.reason for finding in found(driver))


def test_a_link_that_is_well_again_closes_its_incident() -> None:
    driver, fabric = started(QUICK), Fabric(10)
    run(driver, fabric, 0, FAULT)
    run(driver, fabric, FAULT, FAULT + 10, {1: 2.5})
    run(driver, fabric, FAULT + 10, FAULT + 24)
    (incident,) = driver.job.incidents
    assert not incident.is_open
    (action,) = incident.actions
    assert action.startswith("transfers of rank 1 are back at their usual time after ")
    assert action.endswith(" steps: transient")


def test_a_trainer_that_times_no_transfers_is_judged_by_its_computing_only() -> None:
    driver = started(QUICK)
    for number in range(FAULT):
        driver.report(*step(number))
    assert driver.job.detection.links.num_seen == 0
    assert driver.job.detection.evidence.model is not None


def test_after_a_restart_an_open_link_is_remembered_as_a_link() -> None:
    driver, fabric = started(QUICK), Fabric(11)
    run(driver, fabric, 0, FAULT)
    run(driver, fabric, FAULT, FAULT + 8, {1: 2.5})
    record = job_record(driver.state, driver.job.name)
    state = restored([record], driver.job.incidents, next_incident_id=9, unix_offset_s=0.0)
    (job,) = state.jobs.values()
    assert (set(job.detection.links.slow), job.detection.evidence.slow) == ({1}, {})
