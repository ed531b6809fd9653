"""Storage that is late or fails is a state that is told once, and ends with the next whole one."""

from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.cli.observe import status
from pacekeeper.controller.api.messages import job_view
from pacekeeper.controller.machine.checkpoints import record_saves
from pacekeeper.controller.machine.reports import ingest_report
from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.state.events import Log
from pacekeeper.controller.state.job_parts import Saves, SaveTrouble, StepProgress
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import SAVE_OUTCOMES, CheckpointRecord, SnapshotRecord
from pacekeeper.trainer.checkpoint.async_writer import SaveStatus
from support.scrapes import value


def told(outcome: str, step: int, rank: int = 0, **values: Any) -> CheckpointRecord:
    return CheckpointRecord(
        **{"generation": 1, "duration_s": 2.0, "rank": rank, "step": step, **values},
        outcome=outcome,
    )


def after(*records: CheckpointRecord, before: Saves | None = None) -> tuple[Saves, str]:
    found, words = record_saves(before, records)
    assert found is not None
    return found, words


def test_ranks_say_what_records_hold() -> None:
    assert tuple(SaveStatus) == SAVE_OUTCOMES
    with pytest.raises(ValueError, match="outcome: expected one of"):
        told("lost", 1)


def test_of_nothing_nothing_is_known() -> None:
    assert record_saves(None, []) == (None, "")


def test_the_newest_complete_one_counts_whatever_comes_late() -> None:
    found, words = after(told("complete", 20), told("written", 30), told("complete", 10))
    assert (found.complete, found.trouble, words) == ((1, 20), None, "")
    found, _ = after(told("complete", 10, generation=2), before=found)
    assert found.complete == (2, 10), "it went back: the layout is a later one"


def test_late_storage_is_said_when_it_begins_and_counted() -> None:
    well, _ = after(told("complete", 10))
    late, words = after(
        told("skipped", 20, 1, reason="slow"), told("skipped", 20, reason="it"), before=well
    )
    assert words == "late step=20 rank 0: it"
    assert (late.trouble, late.since_step, late.missed, late.complete) == ("late", 20, 1, (1, 10))
    later, words = after(told("skipped", 30, 1, reason="slow"), before=late)
    assert (words, later.since_step, later.missed) == ("", 20, 2)


def test_the_reason_is_that_of_the_rank_that_told_first() -> None:
    found, words = after(told("failed", 20, 3, reason="No space left on device"))
    assert words == "failed step=20 rank 3: No space left on device"
    assert found.reason == "rank 3: No space left on device"


def test_one_that_failed_is_worse_than_one_that_is_late() -> None:
    found, _ = after(told("skipped", 20, 0, reason="busy"), told("failed", 20, 1, reason="full"))
    assert (found.trouble, found.reason, found.missed) == ("failed", "rank 1: full", 1)
    same, words = after(told("skipped", 20, 2, reason="busy"), before=found)
    assert (same, words) == (found, "")


def test_the_next_whole_one_ends_it_and_one_from_before_does_not() -> None:
    late, _ = after(told("skipped", 20, reason="slow"), told("skipped", 30))
    still, words = after(told("complete", 10, duration_s=99.0), before=late)
    assert (still.complete, still.trouble, words) == ((1, 10), "late", "")
    well, words = after(told("complete", 40), before=still)
    assert (well, words) == (Saves(complete=(1, 40), duration_s=2.0), "well step=40")


def test_a_trouble_that_is_over_is_not_told_again() -> None:
    well, _ = after(told("complete", 40))
    assert after(told("failed", 30, reason="full"), before=well) == (well, "")


LATE = Saves(
    complete=(1, 300), duration_s=1.25, trouble=SaveTrouble.LATE, reason="rank 1: busy",
    since_step=400,
    last=(1, 500), missed=2,
)  # fmt: skip


def test_records_of_ranks_become_the_state_of_their_job() -> None:
    own = Attachment(job="train", rank=2, world_size=4, pid=7, run_id=1)
    records = (told("failed", 9, 2, reason="full"),)
    report = JobReport(job="train", run_id=1, attached=(own,), records=records)
    state, said = ingest_report(State(), "node", report, 0.0)
    saves = state.jobs["train"].progress.saves
    assert saves is not None and saves.trouble == "failed"
    assert Log(text="job=train checkpoints=failed step=9 rank 2: full") in said
    state, _ = ingest_report(state, "node", JobReport(job="train", run_id=2), 0.0)
    assert state.jobs["train"].progress.saves is None, "another life has storage of its own"


def test_people_are_shown_what_is_missed_and_what_there_is() -> None:
    unknown = job_view(State(), JobState(name="train"))
    assert not unknown.HasField("checkpoints")
    view = job_view(State(), JobState(name="train", progress=StepProgress(saves=LATE))).checkpoints
    assert (view.step, view.since_step, view.missed, view.trouble) == (300, 400, 2, "late")
    line = status._saves("checkpoints", view)
    assert "checkpoints late:" in line and "2 missed since step 400: rank 1: busy" in line
    assert line.endswith("newest complete at step 300, written in 1.25 s")
    first = Saves(trouble=SaveTrouble.FAILED, reason="rank 0: full", since_step=10, missed=1)
    none = job_view(State(), JobState(name="train", progress=StepProgress(saves=first))).checkpoints
    assert not none.HasField("step") and none.missed == 1
    assert status._saves("checkpoints", none).endswith("rank 0: full; none complete")
    well = job_view(
        State(), JobState(name="train", progress=StepProgress(saves=Saves(complete=(1, 7))))
    ).checkpoints
    assert status._saves("checkpoints", well) == (
        "checkpoints: newest complete at step 7, written in 0 s"
    )


def test_programs_are_told_in_series_that_end_with_the_trouble() -> None:
    metrics = ControllerMetrics()

    def told(name: str, **labels: str) -> float | None:
        return value(metrics, f"job_checkpoint_{name}", job_name="train", **labels)

    metrics.update(State(jobs={"train": JobState(name="train", progress=StepProgress(saves=LATE))}))
    assert told("step") == 300 and told("seconds") == 1.25
    assert told("trouble", cause="late") == 1
    metrics.update(
        State(
            jobs={
                "train": JobState(
                    name="train", progress=StepProgress(saves=Saves(complete=(1, 600)))
                )
            }
        )
    )
    assert told("step") == 600
    assert told("trouble", cause="late") is None


def test_snapshots_in_memory_are_told_beside_and_change_nothing_of_checkpoints() -> None:
    own = Attachment(job="train", rank=2, world_size=4, pid=7, run_id=1)
    late = SnapshotRecord(
        rank=2, step=30, generation=1, outcome="skipped", duration_s=0.0, reason="on its way"
    )
    well = SnapshotRecord(rank=2, step=20, generation=1, outcome="complete", duration_s=0.25)
    report = JobReport(job="train", run_id=1, attached=(own,), records=(told("complete", 9), well))
    state, said = ingest_report(State(), "node", report, 0.0)
    assert not [one for one in said if isinstance(one, Log) and "=well" in one.text]
    state, said = ingest_report(state, "node", replace(report, records=(late,)), 0.0)
    assert Log(text="job=train snapshots=late step=30 rank 2: on its way") in said
    job = state.jobs["train"]
    assert job.progress.saves == Saves(complete=(1, 9), duration_s=2.0)
    view = job_view(state, job)
    assert view.snapshots.trouble == "late" and not view.checkpoints.trouble
    line = status._saves("snapshots", view.snapshots)
    assert "snapshots late:" in line
    assert line.endswith("rank 2: on its way; newest complete at step 20, copied in 250 ms")
    metrics = ControllerMetrics()
    metrics.update(state)
    assert value(metrics, "job_snapshot_step", job_name="train") == 20
    assert value(metrics, "job_snapshot_trouble", job_name="train", cause="late") == 1
    assert value(metrics, "job_checkpoint_trouble", job_name="train", cause="late") is None
