"""Advice on how the work is spread: opened, shown, closed; nobody is accused, no plan is made."""

from dataclasses import replace

from pacekeeper.controller.events import OfferPlan, SaveIncident
from pacekeeper.controller.incidents import note_action
from pacekeeper.controller.views import incident_view, job_view
from pacekeeper.core.findings import FindingKind, Incident
from pacekeeper.core.records import MicroBatchRecord, Record
from pacekeeper.predictor.advice import WINDOW_STEPS
from support.machine_driver import QUICK, WARM, Driver, started, step

LONG = WARM + WINDOW_STEPS + 8


def uneven(number: int, *, slow: int | None = None, often: float = 1.6) -> list[Record]:
    """A step in which rank 2 has more tokens than its peers, and computes for longer by that."""
    return [
        replace(
            record,
            tokens=round(record.tokens * often),
            sum_len_squared=round(record.sum_len_squared * often),
            compute_s=record.compute_s * (1.0 + 0.45 * (often - 1.0)),
        )
        if isinstance(record, MicroBatchRecord) and record.rank == 2
        else record
        for record in step(number, slow=slow)
    ]


def train(driver: Driver, first: int, end: int, *, often: float, slow: int | None = None) -> int:
    """Steps [first, end); how many plans were offered."""
    plans = 0
    for number in range(first, end):
        driver.now_s += 0.2
        driver.report(*uneven(number, often=often, slow=slow))
        plans += len(driver.all_said(OfferPlan))
    return plans


def advised() -> Driver:
    driver = started(QUICK)
    assert train(driver, 0, LONG, often=1.6) == 0
    return driver


def only_open(driver: Driver) -> Incident:
    (incident,) = driver.job.open_incidents
    return incident


def test_uneven_sequences_are_advice_that_names_nobody_and_plans_nothing() -> None:
    driver = advised()
    finding = only_open(driver).finding
    assert (finding.kind, finding.rank) == (FindingKind.SEQUENCE_IMBALANCE, None)
    assert 1.03 < finding.slowdown < 1.5
    assert driver.job.evidence.slow == {}
    view = job_view(driver.state, driver.job)
    assert list(view.advice) == [finding.reason]
    assert view.watch == "healthy"
    assert not incident_view(driver.state, only_open(driver)).HasField("rank")


def test_advice_is_closed_once_the_work_is_even() -> None:
    driver = advised()
    train(driver, LONG, LONG + 2 * WINDOW_STEPS, often=1.0)
    assert driver.job.open_incidents == ()
    (incident,) = driver.job.incidents
    assert incident.actions == ("the work is spread evenly now",)
    assert list(job_view(driver.state, driver.job).advice) == []


def test_while_a_rank_is_slow_the_spread_is_not_judged() -> None:
    driver = started(QUICK)
    for number in range(WARM):
        driver.report(*uneven(number, often=1.0))
    for number in range(WARM, LONG + WINDOW_STEPS):
        driver.now_s += 0.2
        driver.report(*uneven(number, often=1.6, slow=1))
    kinds = {incident.finding.kind for incident in driver.job.incidents}
    assert kinds == {FindingKind.DEVICE}


def test_advice_outlives_the_controller_and_is_not_told_twice() -> None:
    driver = advised()
    fresh = started(QUICK)
    job = replace(fresh.job, incidents=driver.job.incidents)
    fresh.state = replace(fresh.state, jobs={job.name: job}, next_incident_id=2)
    train(fresh, 0, LONG, often=1.6)
    assert len(fresh.job.incidents) == 1
    train(fresh, LONG, LONG + 2 * WINDOW_STEPS, often=1.0)
    assert fresh.job.open_incidents == ()


def test_a_plan_is_noted_on_the_slow_rank_and_not_on_advice_about_sequences() -> None:
    driver = advised()
    train(driver, LONG, LONG + 8, often=1.6, slow=1)
    job, _ = note_action(driver.job, "other token shares")
    actions = {incident.finding.kind: incident.actions for incident in job.open_incidents}
    assert actions == {
        FindingKind.SEQUENCE_IMBALANCE: (),
        FindingKind.DEVICE: ("other token shares",),
    }


def test_each_change_of_advice_is_stored() -> None:
    driver = started(QUICK)
    stored: list[Incident] = []
    for number in range(LONG):
        driver.report(*uneven(number))
        stored += [command.incident for command in driver.all_said(SaveIncident)]
    assert [incident.finding.kind for incident in stored] == [FindingKind.SEQUENCE_IMBALANCE]
