"""A job is written once for all events, what may wait with all that waits, and nothing is left."""

from pacekeeper.controller.state.events import Command, ForgetJob, Log, SaveJob
from pacekeeper.controller.state.state import JobState, State
from pacekeeper.controller.storage.write_batch import SAVE_WITHIN_S, WriteBatch

STATE = State(jobs={name: JobState(name=name) for name in "ab"})
LATER = 1.0 + SAVE_WITHIN_S


def waiting(job: str) -> SaveJob:
    return SaveJob(job=job, may_wait=True)


def test_a_job_is_written_once_where_it_was_asked_for_last() -> None:
    asked: list[Command] = [SaveJob(job="a"), ForgetJob(job="c"), Log(text="x"), SaveJob(job="a")]
    assert WriteBatch().of(STATE, asked, 0.0) == [ForgetJob(job="c"), SaveJob(job="a")]


def test_a_job_that_is_gone_by_now_is_forgotten_and_not_written() -> None:
    asked: list[Command] = [SaveJob(job="gone"), ForgetJob(job="gone")]
    assert WriteBatch().of(STATE, asked, 0.0) == [ForgetJob(job="gone")]


def test_what_may_wait_is_written_later_and_all_of_it_at_once() -> None:
    writes = WriteBatch()
    assert writes.of(STATE, [waiting("a")], 1.0) == []
    assert writes.of(STATE, [waiting("b")], 1.5) == []
    due = writes.of(STATE, [], LATER)
    assert sorted(command.job for command in due if isinstance(command, SaveJob)) == ["a", "b"]
    writes.done(STATE, due)
    assert writes.of(STATE, [], LATER + 10.0) == []


def test_what_the_store_refused_is_still_to_be_written() -> None:
    writes = WriteBatch()
    writes.of(STATE, [waiting("a")], 1.0)
    assert len(writes.of(STATE, [], LATER)) == len(writes.of(STATE, [], LATER)) == 1


def test_what_waited_is_written_with_what_can_not_wait() -> None:
    writes = WriteBatch()
    writes.of(STATE, [waiting("a")], 1.0)
    writes.done(STATE, writes.of(STATE, [SaveJob(job="a")], 1.1))
    assert writes.of(STATE, [], LATER) == []


def test_a_job_that_is_gone_waits_no_more() -> None:
    writes = WriteBatch()
    writes.of(STATE, [waiting("gone")], 1.0)
    writes.done(STATE, [])
    assert writes.of(STATE, [], LATER) == []
