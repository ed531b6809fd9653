"""Advice on how the work is spread: opened, shown, closed; nobody is accused, no plan is made."""

import random
from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import incident_view, job_view
from pacekeeper.controller.detection.incidents import note_action
from pacekeeper.controller.state.events import OfferPlan, SaveIncident
from pacekeeper.core.incidents.findings import FindingKind, Incident
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.predictor.imbalance.advice import WINDOW_STEPS
from support.machine_driver import QUICK, WARM, Driver, attachment, started, step
from support.partitioned import staged_layout

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
    assert driver.job.detection.evidence.slow == {}
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


def test_uneven_rows_of_experts_are_advice_of_their_own_kind() -> None:
    driver = started(QUICK)
    draw = random.Random(3)
    for number in range(LONG):
        driver.now_s += 0.2
        hot = draw.randrange(4)  # whose experts get twice the rows; the sequences are even
        driver.report(
            *(
                replace(
                    record,
                    expert_rows=record.expert_rows * (2 if record.rank == hot else 1),
                    compute_s=record.compute_s * (1.4 if record.rank == hot else 1.0),
                )
                if isinstance(record, MicroBatchRecord)
                else record
                for record in step(number)
            )
        )
    finding = only_open(driver).finding
    assert (finding.kind, finding.rank) == (FindingKind.EXPERT_IMBALANCE, None)
    assert driver.job.detection.evidence.slow == {}


def pipeline(number: int, *, heavy: float, num_ranks: int = 4, parts: int = 4) -> list[Record]:
    """A step of a pipeline of two stages, half of the ranks each; the last does `heavy` times the
    work of the first.
    """
    records: list[Record] = []
    for rank in range(num_ranks):
        work = heavy if rank >= num_ranks // 2 else 1.0
        records += [
            MicroBatchRecord(
                rank=rank, step=number, micro_batch=part, generation=0, tokens=1280,
                compute_s=0.05 * work * (1.0 + 0.002 * ((number + rank + part) % 5)),
            )
            for part in range(parts)
        ]  # fmt: skip
        records.append(
            StepRecord(
                rank=rank, step=number, generation=0, tokens=5120,
                duration_s=0.05 * (parts * heavy + 1.0),
            )
        )  # fmt: skip
    return records


def staged(*, heavy: float, num_ranks: int = 4, parts: int = 4) -> Driver:
    driver = Driver(config=QUICK)
    driver.agent("node-0")
    ranks = [
        replace(attachment(0, model=None), rank=rank, world_size=num_ranks, pid=100 + rank,
                role=f"stage-{rank // (num_ranks // 2)}")
        for rank in range(num_ranks)
    ]  # fmt: skip
    driver.report(attached=ranks)
    for number in range(LONG):
        driver.now_s += 0.2
        driver.report(*pipeline(number, heavy=heavy, num_ranks=num_ranks, parts=parts))
    return driver


def test_a_stage_with_more_work_than_the_others_is_advice_and_no_fault() -> None:
    driver = staged(heavy=1.5)
    finding = only_open(driver).finding
    assert (finding.kind, finding.rank) == (FindingKind.STAGE_IMBALANCE, None)
    # Of 7 units 3/4 of the excess over the mean stage, 0.25 x 4, are surely lost.
    assert finding.slowdown == pytest.approx(7.0 / 6.25, rel=0.02)
    assert driver.job.detection.evidence.slow == {}


def test_a_head_on_the_last_stage_of_the_layout_is_no_imbalance_of_sequences() -> None:
    """Ranks of one role that change their stages live: the layout says what work they have."""
    layout = staged_layout(data=2, tensor=1, layers=2, generation=1)
    driver = started(QUICK, layout)
    for number in range(LONG):
        driver.now_s += 0.2
        records: list[Record] = []
        for record in pipeline(number, heavy=1.0):
            if isinstance(record, MicroBatchRecord) and layout.place_of(record.rank)[0] == 1:
                record = replace(record, head_tokens=1280, compute_s=1.5 * record.compute_s)
            records.append(replace(record, generation=1))  # type: ignore[arg-type]
        driver.report(*records)
    assert only_open(driver).finding.kind is FindingKind.STAGE_IMBALANCE
    assert driver.job.detection.evidence.slow == {}


def test_even_stages_a_single_micro_batch_and_a_stage_of_one_rank_are_no_advice() -> None:
    for driver in (staged(heavy=1.0), staged(heavy=1.5, parts=1), staged(heavy=1.5, num_ranks=2)):
        assert driver.job.incidents == ()
