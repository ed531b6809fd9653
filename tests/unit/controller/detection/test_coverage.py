"""Measuring, blind and healthy are three states, and each says why."""

from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Blindness, CoverageState
from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.predictor.detector import update
from support.machine_driver import QUICK, WARM, Driver, attachment, started, step, train
from support.scrapes import value

QUIET = ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=0))


def state_of(driver: Driver) -> tuple[CoverageState, Blindness | None]:
    return driver.job.coverage.state, driver.job.coverage.blind


def healthy() -> Driver:
    driver = started(QUICK)
    train(driver, 0, WARM)
    assert state_of(driver) == (CoverageState.HEALTHY, None)
    return driver


def test_measuring_says_how_far_the_warm_up_is() -> None:
    driver = started(QUICK)
    train(driver, 0, 5)
    assert state_of(driver) == (CoverageState.MEASURING, None)
    assert driver.job.coverage.reason == "warm-up: 3 of 8 steps"


def test_healthy_says_what_it_would_see() -> None:
    driver = healthy()
    sensitivity = driver.job.coverage.sensitivity
    assert sensitivity is not None
    assert 1.02 < sensitivity.slowdown < 1.10
    assert f"able to see x{sensitivity.slowdown:.2f} within 10 steps" in driver.job.coverage.reason


def test_long_steps_are_no_silence_also_of_a_job_that_is_only_watched() -> None:
    """A job without a layout: its step times are known, and shown, as those of others are."""
    driver, step_s = Driver(config=QUICK), 2.0 * QUICK.blind_after_s
    driver.agent("node-0")
    driver.report(attached=[attachment(rank, model=None) for rank in range(4)])
    for number in range(WARM):
        driver.now_s += step_s
        records = step(number, generation=0)
        driver.report(
            *(replace(r, duration_s=step_s) if isinstance(r, StepRecord) else r for r in records)
        )
    assert driver.job.layouts.current is None
    assert job_view(driver.state, driver.job).step_s == step_s
    driver.tick(after_s=step_s)
    assert state_of(driver) == (CoverageState.HEALTHY, None)
    driver.tick(after_s=2.5 * step_s)
    assert state_of(driver)[0] is CoverageState.BLIND


def test_blind_names_the_silent_ranks_and_coming_back_is_told() -> None:
    driver = healthy()
    driver.now_s += 31.0
    driver.report(*step(WARM, ranks=[0, 1]))
    driver.tick(0.1)
    assert state_of(driver) == (CoverageState.BLIND, Blindness.NO_RECORDS)
    assert driver.job.coverage.reason == "no record of ranks 2 and 3 for 30 s"
    assert list(driver.job.coverage.silent) == [2, 3]
    driver.report(*step(WARM, ranks=[2, 3]), node="node-1")
    assert state_of(driver) == (CoverageState.HEALTHY, None)
    assert not driver.job.coverage.silent
    assert "watch=healthy was=blind" in driver.texts


def test_records_that_make_no_step_are_blind_and_say_whose_are_missing() -> None:
    driver = healthy()
    for number in range(WARM, WARM + 40):
        driver.now_s += 1.0
        kept = [
            record
            for record in step(number)
            if not (isinstance(record, MicroBatchRecord) and record.rank == 2)
        ]
        driver.report(*kept)  # rank 2 ends its steps, but says nothing of its work
        driver.tick(0.0)
    assert state_of(driver) == (CoverageState.BLIND, Blindness.NO_STEPS)
    assert f"of step {WARM} ranks 2 are missing" in driver.job.coverage.reason


def test_steps_longer_than_the_limit_are_waited_for() -> None:
    driver = started(QUICK)
    for number in range(WARM):
        driver.now_s += 50.0
        records = [
            replace(record, duration_s=50.0) if isinstance(record, StepRecord) else record
            for record in step(number)
        ]
        driver.report(*records)
    driver.tick(60.0)
    assert state_of(driver) == (CoverageState.HEALTHY, None)
    driver.tick(100.0)
    assert state_of(driver) == (CoverageState.BLIND, Blindness.NO_RECORDS)


def test_a_watch_whose_noise_hides_half_speed_is_blind_though_nothing_is_wrong() -> None:
    hopeless = DetectorConfig(warmup_steps=8, sigma_floor=0.4)
    driver = started(ControllerConfig(detector=hopeless))
    train(driver, 0, WARM)
    assert state_of(driver) == (CoverageState.BLIND, Blindness.NOISE)
    assert "one step's noise is 40.0%" in driver.job.coverage.reason


def test_a_degraded_job_that_would_miss_more_stays_degraded_and_says_so() -> None:
    driver = healthy()
    train(driver, WARM, WARM + 12, slow=2)
    assert state_of(driver) == (CoverageState.DEGRADED, None)
    config = replace(driver.config.detector, recover_slowdown=1.01, blind_slowdown=1.02)
    driver.config = replace(driver.config, detector=config)
    last = driver.job.progress.step
    driver.report(*step(last + 1, slow=2))
    assert state_of(driver) == (CoverageState.DEGRADED, Blindness.NOISE)
    assert "x1.02" in driver.job.coverage.reason


def with_canaries() -> ControllerConfig:
    return ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=20))


def test_a_canary_that_is_found_proves_the_watch_and_changes_nothing_else() -> None:
    watched, alone = started(with_canaries()), started(QUIET)
    for driver in (watched, alone):
        train(driver, 0, 60)
    last = watched.job.detection.canaries.last
    assert last is not None
    assert last.is_found
    assert alone.job.detection.canaries.last is None
    assert not watched.job.incidents
    assert watched.job.plan.desired is None
    assert watched.job.plan.last_decision == alone.job.plan.last_decision
    assert watched.job.ranks == alone.job.ranks
    assert state_of(watched) == state_of(alone) == (CoverageState.HEALTHY, None)


def test_a_broken_detector_is_blind_alarmed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "raise_alarms", lambda config, known, *_: (known, ()))
    driver = started(with_canaries())
    told = ""
    for number in range(WARM + 15):
        train(driver, number, number + 1)
        told += driver.texts
    assert state_of(driver) == (CoverageState.BLIND, Blindness.CANARY)
    assert "alert=canary_missed" in told
    assert "watch=blind was=healthy (the canary was missed" in told
    assert not driver.job.incidents
    metrics = ControllerMetrics()
    metrics.update(driver.state)
    found = value(metrics, "canary_found", job_name=driver.job.name)
    assert found == 0.0
    monkeypatch.undo()
    train(driver, WARM + 15, WARM + 30)
    assert state_of(driver) == (CoverageState.HEALTHY, None)
    metrics.update(driver.state)
    found = value(metrics, "canary_found", job_name=driver.job.name)
    assert found == 1.0
