"""What happened is written little by little, of everybody, and goes on after a start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pacekeeper.controller.observability.timeline_writer import MOST_AT_ONCE, TimelineWriter
from pacekeeper.controller.state.events import SaveIncident, StepSummary
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.controller.storage.store import Store
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from support.stores import execute

NAMES = tuple(f"job-{number:02d}" for number in range(MOST_AT_ONCE + 8))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store.sqlite")
    yield opened
    opened.close()


def summary(step: int, job: str = "moe") -> StepSummary:
    return StepSummary(
        job=job,
        step=step,
        generation=1,
        tokens=1000,
        duration_s=0.1,
        loss=None,
        ranks=(0, 1),
        observed_s=(0.1, 0.1),
        expected_s=(0.1, 0.1),
        slowdown=(1.0, 1.0),
        watch="healthy",
    )


def incident(number: int) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=1,
        slowdown=1.6,
        onset_step=0,
        step=1,
        reason="rank 1 is slow",
    )
    return Incident(incident_id=number, job="moe", finding=finding, opened_unix_s=1.0)


def test_no_job_waits_for_ever_while_others_go_on(store: Store) -> None:
    history = TimelineWriter(store=store)
    for step in range(2):
        for name in NAMES:
            history.on_command(summary(step, name))
        assert history.write(), "more than goes at once"
    assert all(store.history_tables.job_timeline(name) for name in NAMES)


def test_at_a_clean_end_all_of_it_is_written(store: Store) -> None:
    history = TimelineWriter(store=store)
    for name in NAMES:
        history.on_command(summary(0, name))
    for number in range(1, MOST_AT_ONCE + 8):
        history.on_command(SaveIncident(incident=incident(number)))
    history.close()
    assert all(store.history_tables.job_timeline(name) for name in NAMES)
    assert all(
        store.history_tables.incident_timeline(number) for number in range(1, MOST_AT_ONCE + 8)
    )


def test_a_store_that_refuses_ends_the_end(store: Store, tmp_path: Path) -> None:
    history = TimelineWriter(store=store)
    history.on_command(summary(0))
    execute(store, "DROP TABLE job_timelines")
    history.close()
    assert not history.write()


def test_an_open_incident_goes_on_after_a_start(store: Store) -> None:
    before = TimelineWriter(store=store)
    before.on_command(summary(0))
    before.on_command(SaveIncident(incident=incident(7)))
    before.close()
    after = TimelineWriter(store=store)
    state = State(jobs={"moe": JobState(name="moe", incidents=(incident(7),))})
    after.on_tick(state)
    after.on_command(summary(1))
    told = after.explain(state, 7)
    assert told is not None and [row.step for row in told.rows] == [0, 1]


def test_what_can_not_be_read_was_never_kept(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    execute(store, "DROP TABLE incident_timelines")
    execute(store, "DROP TABLE job_timelines")
    history = TimelineWriter(store=store)
    history.on_command(summary(0))
    assert [row.step for row in history.job_timeline("moe")] == [0]
    state = State(jobs={"moe": JobState(name="moe", incidents=(incident(7),))})
    told = history.explain(state, 7)
    assert told is not None and not told.rows
    assert "incident 7" in caplog.text
