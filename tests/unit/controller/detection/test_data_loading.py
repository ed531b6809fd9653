"""Input that comes late is its own kind of finding: of the rank that waits for it, or of all."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.controller.state.events import OfferPlan
from pacekeeper.core.incidents.findings import Finding, FindingKind
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from support.examples import seeds
from support.machine_driver import QUICK, WARM, Driver, attachment, exited, started, step

FAULT = WARM + 30
USUAL_S = 0.004


class Loaders:
    """Seeded; the computing is that of `machine_driver.step`, and takes 0.12 s of a step."""

    def __init__(self, seed: int, *, tells_work: bool = True) -> None:
        self.draw = np.random.default_rng(seed)
        self.tells_work = tells_work

    def records(self, number: int, late_s: Mapping[int, float]) -> list[Record]:
        """All records of a step; `late_s`: what a rank waits beside the usual."""
        waits = {
            rank: USUAL_S * float(np.exp(self.draw.normal(0.0, 0.3))) + late_s.get(rank, 0.0)
            for rank in range(4)
        }
        longest_s = max(waits.values())
        return [
            replace(record, duration_s=0.12 + longest_s, input_wait_s=waits[record.rank])
            if isinstance(record, StepRecord)
            else record
            for record in step(number)
            if self.tells_work or not isinstance(record, MicroBatchRecord)
        ]


def run(driver: Driver, loaders: Loaders, first: int, end: int, late_s: Mapping[int, float]) -> int:
    """Steps [first, end); how many plans were offered."""
    plans = 0
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*loaders.records(number, late_s))
        plans += len(driver.all_said(OfferPlan))
    return plans


def found(driver: Driver) -> list[Finding]:
    return [incident.finding for incident in driver.job.incidents]


@pytest.mark.parametrize("seed", seeds(6))
def test_healthy_loaders_accuse_nobody(seed: int) -> None:
    driver = started(QUICK)
    run(driver, Loaders(seed), 0, 150, {})
    assert found(driver) == []


@pytest.mark.parametrize("seed", seeds(4))
@pytest.mark.parametrize("late_s", [0.03, 0.2])
def test_a_rank_that_waits_for_its_input_is_named_and_no_device_is(
    seed: int, late_s: float
) -> None:
    driver, loaders, rank = started(QUICK), Loaders(seed), seed % 4
    run(driver, loaders, 0, FAULT, {})
    assert run(driver, loaders, FAULT, FAULT + 8, {rank: late_s}) == 0
    (finding,) = found(driver)
    assert (finding.kind, finding.rank) == (FindingKind.INPUT, rank)
    assert finding.onset_step == FAULT
    assert finding.slowdown == pytest.approx(1.0 + late_s / (0.12 + USUAL_S), rel=0.06)
    assert "its loader, storage or host, not its device" in finding.reason
    assert driver.job.detection.evidence.slow == {}


def test_a_rank_whose_input_is_late_from_the_start_is_named() -> None:
    driver = started(QUICK)
    run(driver, Loaders(1), 0, FAULT, {2: 0.1})
    (finding,) = found(driver)
    assert (finding.kind, finding.rank) == (FindingKind.INPUT, 2)
    # Of the rest of a step, which holds nobody's wait for input.
    assert finding.slowdown == pytest.approx(1.0 + 0.1 / (0.12 + USUAL_S), rel=0.06)


def test_input_that_is_late_for_all_is_the_jobs() -> None:
    driver, loaders = started(QUICK), Loaders(2)
    run(driver, loaders, 0, FAULT + 40, {})
    run(driver, loaders, FAULT + 40, FAULT + 60, dict.fromkeys(range(4), 0.06))
    (finding,) = found(driver)
    assert (finding.kind, finding.rank) == (FindingKind.INPUT, None)
    assert finding.slowdown == pytest.approx(1.48, rel=0.06)
    assert "all ranks wait for their input" in finding.reason
    run(driver, loaders, FAULT + 60, FAULT + 90, {})
    (incident,) = driver.job.incidents
    assert not incident.is_open
    assert incident.actions[-1].startswith("the input of the ranks is there in time again")


def test_longer_steps_are_no_late_input() -> None:
    driver, loaders = started(QUICK), Loaders(3)
    run(driver, loaders, 0, FAULT, {})
    for number in range(FAULT, FAULT + 40):
        driver.report(
            *(
                replace(record, duration_s=record.duration_s * 2.0)
                if isinstance(record, StepRecord)
                else record
                for record in loaders.records(number, {})
            )
        )
    assert found(driver) == []


def test_a_loader_that_is_well_again_closes_its_incident() -> None:
    driver, loaders = started(QUICK), Loaders(4)
    run(driver, loaders, 0, FAULT, {})
    run(driver, loaders, FAULT, FAULT + 10, {1: 0.1})
    run(driver, loaders, FAULT + 10, FAULT + 24, {})
    (incident,) = driver.job.incidents
    assert not incident.is_open
    assert incident.actions[-1].endswith(" steps: transient")


def test_ranks_that_tell_no_compute_times_are_still_told_from_by_their_input() -> None:
    driver, loaders = Driver(config=QUICK), Loaders(5, tells_work=False)
    driver.agent("node-0")
    driver.report(attached=[attachment(rank, model=None) for rank in range(4)])
    run(driver, loaders, 0, FAULT, {})
    run(driver, loaders, FAULT, FAULT + 8, {3: 0.1})
    assert [(f.kind, f.rank) for f in found(driver)] == [(FindingKind.INPUT, 3)]


def test_an_open_finding_outlives_the_controller_and_ends_with_its_rank() -> None:
    driver, loaders = started(QUICK), Loaders(6)
    run(driver, loaders, 0, FAULT, {})
    run(driver, loaders, FAULT, FAULT + 8, {1: 0.1})
    driver.start_again()
    assert set(driver.job.detection.inputs.evidence.slow) == {1}
    driver.report(attached=[attachment(1)])
    driver.report(exited(1))
    assert driver.job.detection.inputs.evidence.slow == {}
    assert FindingKind.INPUT not in {i.finding.kind for i in driver.job.open_incidents}


def test_a_trainer_that_times_no_input_is_judged_by_all_else() -> None:
    driver = started(QUICK)
    for number in range(FAULT):
        driver.report(*step(number))
    assert driver.job.detection.inputs.evidence.num_seen == 0
    assert driver.job.detection.evidence.model is not None
