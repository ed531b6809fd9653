"""What is kept of incidents and jobs: enough to explain them, and never more than its bounds."""

from dataclasses import replace
from math import isnan

import pytest

from pacekeeper.controller.observability.timeline import (
    AFTER_STEPS,
    MAX_INCIDENT_TIMELINES,
    MAX_JOB_ROWS,
    MOST_NOTES,
    MOST_PLANS,
    MOST_ROWS,
    MOST_STACKS,
    RECENT_STEPS,
    IncidentTimeline,
    TimelineRecorder,
)
from pacekeeper.controller.observability.timeline_codec import (
    decode_incident_timeline,
    decode_job_timeline,
    encode_incident_timeline,
    encode_job_timeline,
)
from pacekeeper.controller.state.events import StepSummary
from pacekeeper.core.incidents.findings import (
    ConsideredLayout,
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.telemetry.sign_of_life import RankStack
from support.machine_driver import FIRST as EVEN


def summary(step: int, *, slow: float = 1.0, generation: int = 1, job: str = "moe") -> StepSummary:
    """Four ranks of 100 ms; rank 2 takes `slow` times as long."""
    return StepSummary(
        job=job,
        step=step,
        generation=generation,
        tokens=1000,
        duration_s=0.1 * slow,
        loss=None,
        ranks=(0, 1, 2, 3),
        observed_s=(0.1, 0.1, 0.1 * slow, 0.1),
        expected_s=(0.1, 0.1, 0.1, 0.1),
        slowdown=(1.0, 1.0, slow, 1.0),
        watch="healthy",
    )


def incident(
    *, rank: int | None = 2, actions: tuple[str, ...] = (), closed: bool = False
) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=rank,
        slowdown=1.6,
        onset_step=10,
        step=12,
        reason="slow",
    )
    return Incident(
        incident_id=7,
        job="moe",
        finding=finding,
        opened_unix_s=12.0,
        closed_unix_s=30.0 if closed else None,
        closed_step=30 if closed else None,
        actions=actions,
    )


def found(*, steps: int = 13, rank: int | None = 2) -> TimelineRecorder:
    """Rank 2 is slow from step 10 on, found at the newest."""
    recorder = TimelineRecorder()
    for step in range(steps):
        recorder.on_step(summary(step, slow=1.6 if step >= 10 else 1.0), float(step))
    recorder.on_incident(incident(rank=rank), float(steps))
    return recorder


def test_a_course_begins_before_the_onset_with_the_times_of_its_rank_and_its_peers() -> None:
    timeline = found().incident_timelines[7]
    assert [row.step for row in timeline.rows] == list(range(13))
    before, after = timeline.rows[9], timeline.rows[10]
    assert before.observed_s == pytest.approx(0.1) and after.observed_s == pytest.approx(0.16)
    assert after.expected_s == pytest.approx(0.1) and after.peers_slowdown == pytest.approx(1.0)
    assert after.step_s == pytest.approx(0.16) and (after.generation, after.num_steps) == (1, 1)


def test_what_is_nobodys_shows_the_median_of_all() -> None:
    assert found(rank=None).incident_timelines[7].rows[12].observed_s == pytest.approx(0.1)


def test_a_rank_that_tells_nothing_is_not_known_and_not_zero() -> None:
    row = found(rank=9).incident_timelines[7].rows[0]
    assert isnan(row.observed_s) and isnan(row.expected_s) and row.peers_slowdown == 1.0


def test_a_course_goes_on_for_some_steps_after_the_end_and_is_then_let_go() -> None:
    recorder = found()
    recorder.on_incident(incident(closed=True), 30.0)
    for step in range(31, 31 + AFTER_STEPS):
        assert 7 in recorder.incident_timelines
        recorder.on_step(summary(step), float(step))
    recorder.stored([7], ["moe"])
    assert not recorder.incident_timelines and not recorder.changed


def test_one_that_is_stored_and_open_goes_on() -> None:
    recorder = found()
    recorder.stored([7], ["moe"])
    assert not recorder.changed and not recorder.changed_jobs
    recorder.on_step(summary(13), 13.0)
    assert list(recorder.changed) == [7] and recorder.incident_timelines[7].rows[-1].step == 13


def test_rows_are_bounded_and_speak_of_every_step_once() -> None:
    recorder = found()
    for step in range(13, 5000):
        recorder.on_step(summary(step, slow=1.6), float(step))
    for rows, most in (
        (recorder.incident_timelines[7].rows, MOST_ROWS),
        (recorder.job_timeline("moe"), MAX_JOB_ROWS),
    ):
        assert len(rows) == most
        assert sum(row.num_steps for row in rows) == 5000
        ends = [row.step + row.num_steps for row in rows]
        assert [row.step for row in rows[1:]] == ends[:-1]
    timeline = recorder.incident_timelines[7]
    assert [row.num_steps for row in timeline.rows[:20]] == [1] * 20, "the onset stays as it was"
    assert timeline.rows[-1].observed_s == pytest.approx(0.16)
    assert (
        max(row.num_steps for row in recorder.job_timeline("moe")) <= 16 < 5000 / MAX_JOB_ROWS * 2
    )


def test_two_layouts_are_merged_last() -> None:
    recorder = TimelineRecorder()
    for step in range(3 * MAX_JOB_ROWS):
        recorder.on_step(summary(step, generation=1 + step // 700), float(step))
    cuts = {row.step for row in recorder.job_timeline("moe") if row.step in (700, 1400)}
    assert cuts == {700, 1400}


def test_the_newest_steps_with_all_ranks_are_bounded() -> None:
    recorder = TimelineRecorder()
    for step in range(RECENT_STEPS + 30):
        recorder.on_step(summary(step), float(step))
    recorder.on_incident(incident(), 100.0)
    assert recorder.incident_timelines[7].rows[0].step == 30


def test_actions_are_noted_once_with_the_step_and_time_they_came() -> None:
    recorder = found()
    recorder.on_incident(incident(actions=("proposal 1",)), 20.0)
    recorder.on_step(summary(13), 21.0)
    recorder.on_incident(incident(actions=("proposal 1", "generation 2")), 22.0)
    notes = recorder.incident_timelines[7].notes
    assert [(n.step, n.unix_s, n.text) for n in notes] == [
        (12, 20.0, "proposal 1"),
        (13, 22.0, "generation 2"),
    ]


def test_decisions_are_kept_with_what_was_passed_over_and_no_plan_again_is_said_once() -> None:
    recorder = found()
    nothing = Decision(level=MitigationLevel.NOTHING, layout=None, reason="too little")
    recorder.decided("moe", nothing, 14.0)
    recorder.decided("moe", nothing, 15.0)
    considered = ConsideredLayout(
        level=MitigationLevel.MOVE_REPLICAS,
        planned_step_s=0.1,
        cost_s=2.0,
        moved_bytes=5,
        why_not="dear",
    )
    plan = Decision(
        level=MitigationLevel.BATCH_SHARES, layout=EVEN, reason="faster", considered=(considered,)
    )
    recorder.decided("moe", plan, 16.0)
    recorder.decided("other", plan, 17.0)
    first, second = recorder.incident_timelines[7].plans
    assert (first.unix_s, first.generation, first.reason) == (15.0, None, "too little")
    assert second.generation == EVEN.generation and second.considered == (considered,)


def test_plans_and_notes_are_bounded_and_the_first_stays() -> None:
    timeline = found().incident_timelines[7]
    recorder = TimelineRecorder(incident_timelines={7: timeline})
    for i in range(100):
        plan = Decision(level=MitigationLevel.BATCH_SHARES, layout=EVEN, reason=str(i))
        recorder.decided("moe", plan, float(i))
        recorder.on_incident(incident(actions=(f"note {i}",)), float(i))
    assert len(timeline.plans) == MOST_PLANS and len(timeline.notes) == MOST_NOTES
    assert (timeline.plans[0].reason, timeline.plans[-1].reason) == ("0", "99")
    assert (timeline.notes[0].text, timeline.notes[-1].text) == ("note 0", "note 99")


def test_what_was_stored_before_a_restart_goes_on() -> None:
    before = found()
    timeline = decode_incident_timeline(encode_incident_timeline(before.incident_timelines[7]))
    job_timeline = decode_job_timeline(encode_job_timeline(before.job_timeline("moe")))
    after = TimelineRecorder(
        stored_incident_timeline=lambda number: timeline,
        stored_job_timeline=lambda job: job_timeline,
    )
    after.on_step(summary(13, slow=1.6), 13.0)
    after.on_incident(incident(actions=("plan",)), 14.0)
    after.on_step(summary(14, slow=1.6), 15.0)
    assert [row.step for row in after.incident_timelines[7].rows] == [*range(13), 14]
    assert [row.step for row in after.job_timeline("moe")] == list(range(15))


def test_jobs_that_are_over_are_let_go_once_they_are_stored() -> None:
    recorder = found()
    recorder.forget([])
    assert recorder.incident_timelines, "not stored yet"
    recorder.stored([7], ["moe"])
    recorder.forget([])
    assert not recorder.incident_timelines
    assert not recorder.job_timeline("moe")


def test_an_incident_that_is_open_at_a_start_goes_on_with_the_next_step() -> None:
    before = found()
    kept = {7: before.incident_timelines[7]}
    after = TimelineRecorder(stored_incident_timeline=kept.get)
    after.go_on([incident(), replace(incident(), incident_id=8)])
    assert set(after.incident_timelines) == {7}, "nothing was kept of the other one"
    assert not after.changed
    after.forget(["moe"])
    after.on_step(summary(99), 99.0)
    assert after.incident_timelines[7].rows[-1].step == 99


def test_what_strikes_many_ranks_at_once_is_told_of_some() -> None:
    recorder = found()
    for number in range(1000, 1000 + 2 * MAX_INCIDENT_TIMELINES):
        recorder.on_incident(replace(incident(), incident_id=number), 20.0)
    recorder.on_incident(replace(incident(), incident_id=9000, job="other"), 20.0)
    assert len(recorder.incident_timelines) == MAX_INCIDENT_TIMELINES + 1
    assert {7, 9000} <= recorder.incident_timelines.keys()


def test_who_has_waited_longest_is_written_first() -> None:
    recorder = TimelineRecorder()
    for name in ("c", "a", "b"):
        recorder.on_step(summary(0, job=name), 0.0)
    recorder.on_step(summary(1, job="c"), 1.0)  # it waits since then
    assert list(recorder.changed_jobs) == ["c", "a", "b"]
    recorder.stored([], ["c"])
    recorder.on_step(summary(2, job="c"), 2.0)
    assert list(recorder.changed_jobs) == ["a", "b", "c"]


def test_a_course_survives_the_store_as_it_is() -> None:
    recorder = found(rank=9)  # some values are not known
    recorder.on_incident(incident(rank=9, actions=("a",)), 3.0)
    nothing = Decision(level=MitigationLevel.NOTHING, layout=None, reason="no")
    recorder.decided("moe", nothing, 4.0)
    timeline = recorder.incident_timelines[7]
    again = decode_incident_timeline(encode_incident_timeline(timeline))
    assert repr(again) == repr(timeline), "NaN is equal to nothing, but reads alike"


@pytest.mark.parametrize(
    "data", [b"", b"x", encode_job_timeline([])[:-3], encode_job_timeline([]) + b"x" * 3]
)
def test_what_is_damaged_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_job_timeline(data)
    with pytest.raises(ValueError):
        decode_incident_timeline(data)


def test_a_pace_is_no_course() -> None:
    with pytest.raises(ValueError, match="incident"):
        decode_incident_timeline(encode_job_timeline([]))


def test_a_step_of_no_time_has_no_rate() -> None:
    recorder = TimelineRecorder()
    one = summary(0, slow=0.0)
    recorder.on_step(one, 0.0)
    (row,) = recorder.job_timeline("moe")
    assert isnan(row.tokens_per_s) and row.slowest == 1.0
    assert decode_job_timeline(encode_job_timeline([row]))[0].slowest == 1.0


def test_courses_of_jobs_do_not_mix() -> None:
    recorder = found()
    recorder.on_step(summary(99, job="other"), 1.0)
    assert isinstance(recorder.incident_timelines[7], IncidentTimeline)
    assert [row.step for row in recorder.incident_timelines[7].rows] == list(range(13))


def test_the_newest_stack_of_each_rank_is_kept_and_stored() -> None:
    recorder = TimelineRecorder()
    recorder.on_stack(7, RankStack(rank=0, source="py-spy", text="of no incident"))
    recorder.on_incident(incident(), 0.0)
    for number in range(MOST_STACKS + 2):
        recorder.on_stack(7, RankStack(rank=number, source="", text="first"))
        recorder.on_stack(7, RankStack(rank=number, source="py-spy", text=f"Thread 1\n  {number}"))
    again = decode_incident_timeline(encode_incident_timeline(recorder.incident_timelines[7]))
    assert again.stacks == [
        RankStack(rank=number, source="py-spy", text=f"Thread 1\n  {number}")
        for number in range(2, MOST_STACKS + 2)
    ]
    assert 7 in recorder.changed
