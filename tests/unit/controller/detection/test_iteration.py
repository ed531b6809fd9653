"""A pipeline's iterations: predicted from work and schedule; what no rank computes is found."""

import random
from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.detection.iteration import paths_of, schedule_of
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry.microbatch_table import table_from_records
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.predictor.cost.features import work_of
from support.machine_driver import QUICK, Driver, started
from support.partitioned import staged_layout

LAYOUT = staged_layout(data=2, tensor=1, layers=2, generation=1)
PARTS = 4
BEYOND_S = 0.03
SETTLED = 100  # steps


def iteration(
    number: int, draw: random.Random, *, waits: float = 1.0, slow: int | None = None
) -> list[Record]:
    """A step of two pipelines of two stages; micro-batches differ in tokens from step to step.

    `waits`: the factor by which it takes longer than its computing; `slow` computes at x1.5.
    """
    tokens = [draw.choice((600, 1000, 1400)) for _ in range(PARTS)]
    records: list[Record] = []
    ends_s = []
    for pipeline in sorted({at for _, at in LAYOUT.places.values()}):
        chunk_s = []
        for rank, place in LAYOUT.places.items():
            if place[1] != pipeline:
                continue
            factor = 1.5 if rank == slow else 1.0
            noise = [draw.gauss(1.0, 0.004) for _ in tokens]
            chunk_s.append([0.05e-3 * factor * n * e for n, e in zip(tokens, noise, strict=True)])
            records += [
                MicroBatchRecord(
                    rank=rank, step=number, micro_batch=part, generation=1, tokens=tokens[part],
                    compute_s=chunk_s[-1][part],
                )
                for part in range(PARTS)
            ]  # fmt: skip
        ends_s.append(two_stages_s(*chunk_s))
    duration_s = (max(ends_s) + BEYOND_S) * waits * draw.gauss(1.0, 0.002)
    return records + [
        StepRecord(
            rank=rank, step=number, generation=1, tokens=2 * sum(tokens), duration_s=duration_s
        )
        for rank in LAYOUT.ranks
    ]


def two_stages_s(first: list[float], second: list[float]) -> float:
    """1F1B of two stages without messages, played by hand: forward a third, backward the rest."""
    forwards, free, done = [], 0.0, [0.0] * PARTS
    begin = 0.0
    for part in range(2):  # the first stage runs one forward ahead
        begin += first[part] / 3.0
        forwards.append(begin)
    for part in range(PARTS):
        free = max(free, forwards[part]) + second[part]
        done[part] = free
        begin = max(begin, done[part]) + first[part] * 2.0 / 3.0
        if part + 2 < PARTS:
            begin += first[part + 2] / 3.0
            forwards.append(begin)
    return begin


def train(
    driver: Driver, first: int, end: int, *, waits: float = 1.0, slow: int | None = None
) -> None:
    for number in range(first, end):
        driver.now_s += 0.3
        draw = random.Random(number)
        driver.report(*iteration(number, draw, waits=waits, slow=slow))


def settled() -> Driver:
    driver = started(QUICK, LAYOUT)
    train(driver, 0, SETTLED)
    return driver


def kinds(driver: Driver) -> set[FindingKind]:
    return {incident.finding.kind for incident in driver.job.incidents}


def test_each_iteration_is_predicted_from_its_own_micro_batches() -> None:
    driver = started(QUICK, LAYOUT)
    train(driver, 0, 40)
    errors, inside, durations = [], 0, []
    for number in range(40, SETTLED):
        train(driver, number, number + 1)
        newest = driver.job.detection.iteration.newest
        assert newest is not None and newest.step == number
        errors.append(abs(newest.expected_s / newest.duration_s - 1.0))
        durations.append(newest.duration_s)
        inside += newest.least_s <= newest.duration_s <= newest.most_s
    assert max(durations) > 1.3 * min(durations)  # a constant would be far off
    assert sum(errors) / len(errors) < 0.02
    assert inside >= 0.85 * len(errors)
    assert newest is not None
    assert newest.beyond_s == pytest.approx(BEYOND_S, rel=0.1)
    assert driver.job.incidents == ()
    assert f"step {newest.step} took" in job_view(driver.state, driver.job).iteration


@pytest.mark.parametrize("experts", [0, 4])
def test_pipelines_with_other_rows_at_each_stage_wait_for_each_other(experts: int) -> None:
    driver = settled()
    apart = staged_layout(data=2, tensor=1, layers=2, experts=experts, generation=1)
    shares = ((0.75, 0.25), (0.25, 0.75))
    pipelines = tuple(
        replace(pipeline, stage_shares=of_stages)
        for pipeline, of_stages in zip(apart.pipelines, shares, strict=True)
    )
    records = [
        MicroBatchRecord(
            rank=rank, step=SETTLED, micro_batch=part, generation=1, compute_s=1.0,
            tokens=round(2000 * shares[pipeline][stage]),
        )
        for rank, (stage, pipeline) in apart.places.items()
        for part in range(PARTS)
    ]  # fmt: skip
    work = work_of([table_from_records(records)])

    def expected_s(layout: Layout) -> float:
        layouts = replace(driver.job.layouts, current=layout)
        paths = paths_of(replace(driver.job, layouts=layouts), work)
        assert paths is not None
        return paths.expected_s

    # 1,500 tokens at each stage in each micro-batch, on one pipeline or the other.
    longest_s = 1500 * 0.05e-3
    assert expected_s(replace(apart, pipelines=pipelines)) == pytest.approx(
        two_stages_s([longest_s] * PARTS, [longest_s] * PARTS), rel=0.01
    )
    if not experts:  # meet at the end of the step only
        assert expected_s(apart) < 0.95 * expected_s(replace(apart, pipelines=pipelines))


def test_what_no_rank_computes_is_found_and_closed_again() -> None:
    driver = settled()
    train(driver, SETTLED, SETTLED + 50, waits=1.2)
    (incident,) = driver.job.open_incidents
    finding = incident.finding
    assert (finding.kind, finding.rank) == (FindingKind.HOST, None)
    assert finding.slowdown == pytest.approx(1.2, rel=0.03)
    assert SETTLED - 10 <= finding.onset_step <= SETTLED + 10
    assert "no rank's computing" in finding.reason
    newest = driver.job.detection.iteration.newest
    assert newest is not None
    assert newest.unexplained_s == pytest.approx(newest.duration_s / 6.0, rel=0.1)
    train(driver, SETTLED + 50, SETTLED + 150)
    assert driver.job.open_incidents == ()
    assert driver.job.detection.evidence.slow == {}


def test_a_slow_rank_explains_its_iterations() -> None:
    driver = settled()
    train(driver, SETTLED, SETTLED + 60, slow=3)
    assert kinds(driver) == {FindingKind.DEVICE}
    newest = driver.job.detection.iteration.newest
    assert newest is not None
    assert newest.slow_s > 0.1 * newest.duration_s
    assert abs(newest.unexplained_s) < 0.02 * newest.duration_s


def test_another_layout_is_measured_anew() -> None:
    driver = settled()
    layouts = replace(driver.job.layouts, current=replace(LAYOUT, generation=2))
    job = replace(driver.job, layouts=layouts)
    driver.state = replace(driver.state, jobs={job.name: job})
    for number in range(SETTLED, SETTLED + 4):
        driver.now_s += 0.3
        records = iteration(number, random.Random(number), waits=2.0)
        driver.report(*(replace(record, generation=2) for record in records))  # type: ignore[arg-type]
    known = driver.job.detection.iteration
    assert (known.generation, len(known.beyond_s), known.newest) == (2, 4, None)
    assert driver.job.incidents == ()


def test_a_schedule_without_a_program_predicts_nothing() -> None:
    driver = settled()
    shape = driver.job.shape
    assert shape is not None and schedule_of(driver.job) is Schedule.ONE_F_ONE_B
    ranks = {
        rank: replace(
            known,
            attachment=replace(known.attachment, model=replace(shape, schedule=None)),
        )
        for rank, known in driver.job.ranks.items()
    }
    job = replace(driver.job, ranks=ranks)
    assert schedule_of(job) is None
    driver.state = replace(driver.state, jobs={job.name: job})
    newest = driver.job.detection.iteration.newest
    train(driver, SETTLED, SETTLED + 3)
    assert driver.job.detection.iteration.newest is newest
