"""Before state is moved a probe is asked for, once; whatever comes of it, nothing waits for it."""

from dataclasses import replace

import pytest

from pacekeeper.controller.mitigation import probes
from pacekeeper.controller.state.events import OfferPlan, RequestProbe
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.telemetry.records import ProbeRecord
from support.machine_driver import JOB, WARM, Driver, exited, started, step, steps_of, train

# One host for each expert: shares alone can not relieve a slow rank, its experts must move.
LONE = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=1)
CONFIG = ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=0))
SLOW = 2


def told(driver: Driver, rank: int, *, slowdown: float = 1.0, number: int = 0) -> ProbeRecord:
    question = driver.job.detection.probe
    return ProbeRecord(
        rank=rank, step=driver.job.progress.step, generation=1,
        number=number or (0 if question is None else question.number),
        gemm_s=2e-3 * slowdown, copy_s=1e-3 * slowdown, exchange_s=1e-4, duration_s=0.02,
    )  # fmt: skip


def asking(*, can_probe: bool = True, config: ControllerConfig = CONFIG) -> Driver:
    """Rank 2 is slow, and its experts would be moved: the machine has just thought about it."""
    driver = started(config, LONE, can_probe=can_probe)
    train(driver, 0, WARM)
    for number in range(WARM, WARM + 12):
        driver.now_s += 0.2
        driver.report(*step(number, slow=SLOW))
        if driver.job.detection.probe is not None or driver.job.plan.desired is not None:
            break
    return driver


def answered(driver: Driver, slowdown: float) -> None:
    driver.report(
        *[told(driver, rank, slowdown=slowdown if rank == SLOW else 1.0) for rank in range(4)]
    )


def test_nothing_is_moved_before_the_probe_is_read() -> None:
    driver = asking()
    (asked,) = driver.all_said(RequestProbe)
    assert (asked.job, asked.nodes) == (JOB, ("node-0", "node-1"))
    assert driver.job.plan.desired is None
    assert f"probe={asked.number} requested to confirm that ranks {SLOW} " in driver.texts
    (incident,) = driver.job.open_incidents
    assert not incident.finding.probe


def test_a_probe_that_bears_it_out_confirms_and_lets_the_experts_move() -> None:
    driver = asking()
    answered(driver, 1.6)
    (incident,) = driver.job.open_incidents
    assert incident.finding.tier is Tier.CONFIRMED
    assert "product x1.60, copy x1.60" in incident.finding.probe
    driver.tick()
    assert driver.job.plan.desired is not None
    assert len(driver.job.plan.desired.experts[0][SLOW]) > 1
    assert driver.all_said(OfferPlan)
    assert not driver.all_said(RequestProbe)


def test_a_probe_that_does_not_bear_it_out_leaves_a_suspicion_and_the_experts() -> None:
    driver = asking()
    answered(driver, 1.0)
    (incident,) = driver.job.open_incidents
    assert incident.finding.tier is Tier.SUSPECTED
    last = driver.job.progress.step
    for number in range(last + 1, last + 12):
        driver.report(*step(number, slow=SLOW))
        driver.tick()
        desired = driver.job.plan.desired
        assert desired is None or [
            tuple(host.rank for host in hosts) for hosts in desired.experts[0]
        ] == [(0,), (1,), (2,), (3,)]
        assert driver.job.detection.probe is None  # never the same question twice


def test_a_trainer_that_can_not_probe_is_said_to_be_one_and_the_finding_stays_what_it_was() -> None:
    driver = asking(can_probe=False)
    (incident,) = driver.job.open_incidents
    assert incident.finding.probe == probes.UNSUPPORTED
    assert incident.finding.tier is Tier.PROBABLE
    assert driver.job.detection.probe is None
    driver.tick()
    assert driver.job.plan.desired is not None


def test_where_steps_are_long_a_question_waits_for_some_of_them() -> None:
    driver = asking()
    steps_of(driver, 30.0)
    driver.tick(119.0)
    assert driver.job.detection.probe is not None
    driver.tick(2.0)
    assert driver.job.detection.probe is None
    (incident,) = driver.job.open_incidents
    assert incident.finding.probe == "no probe: not answered for 2 min"


def test_a_question_is_said_again_until_it_is_answered_and_then_given_up() -> None:
    driver = asking()
    assert driver.job.detection.probe is not None
    number = driver.job.detection.probe.number
    said = []
    for _ in range(60):
        driver.tick(0.5)
        said += driver.all_said(RequestProbe)
        if driver.job.detection.probe is None:
            break
    assert {command.number for command in said} == {number}
    assert len(said) == pytest.approx(19, abs=2)
    for _ in range(20):
        driver.tick(0.5)
    (incident,) = driver.job.open_incidents
    assert incident.finding.probe == "no probe: not answered for 20 s"
    assert incident.finding.tier is Tier.PROBABLE


def test_answers_to_another_question_and_of_strangers_are_left() -> None:
    driver = asking()
    driver.report(*[told(driver, rank, number=3) for rank in range(4)])
    driver.report(told(driver, 9))
    assert driver.job.detection.probe is not None
    assert not driver.job.detection.probe.records
    answered(driver, 1.6)
    assert driver.job.detection.probe is None
    answered(driver, 1.0)  # told twice, of a question that is closed
    assert driver.job.open_incidents[0].finding.tier is Tier.CONFIRMED


def test_a_death_in_the_probe_gives_the_question_up() -> None:
    driver = asking()
    driver.report(told(driver, 0), told(driver, 1), exited(3))
    driver.tick()
    assert driver.job.detection.probe is None
    assert "given up" in driver.texts
    (incident,) = (i for i in driver.job.open_incidents if i.finding.rank == SLOW)
    assert not incident.finding.probe  # asked anew, if it is still needed then


def test_numbers_ascend_from_one_life_of_the_controller_to_the_next() -> None:
    driver = asking()
    assert driver.job.detection.probe is not None
    before = driver.job.detection.probe.number
    state = restored(
        [job_record(driver.state, JOB)],
        driver.job.incidents,
        next_incident_id=9,
        unix_offset_s=driver.state.unix_offset_s,
    )
    assert state.jobs[JOB].detection.probe is None
    assert round((driver.now_s + 1.0 + state.unix_offset_s) * 1e3) > before


def test_a_controller_that_only_observes_asks_for_nothing() -> None:
    observing = replace(CONFIG, policy=replace(CONFIG.policy, mode="observe"))
    driver = asking(config=observing)
    assert driver.job.open_incidents
    assert driver.job.detection.newest_probe == 0
