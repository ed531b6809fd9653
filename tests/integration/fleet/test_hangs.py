"""Real ranks hang: a deadlock in user code, SIGSTOP, storage that does not answer.

The job is a plain DDP job on gloo that attaches by one line; agent and controller are the commands.
"""

from typing import Any

from benchmarks.hangs import CULPRIT, READ, READ_ALL, SIZE, STOP, HangJob, job_of, wait_for
from benchmarks.hung_ranks import BETWEEN, IN_PASS


def struck(job: HangJob, kind: str) -> Any:
    """The incident after a fault of this kind."""
    job.strike(kind)
    wait_for("a hang is named", job.hangs)
    (incident,) = job.hangs()
    return incident


def test_a_deadlock_in_user_code_is_named_with_the_line_that_waits() -> None:
    for kind in (IN_PASS, BETWEEN):
        with job_of(0.05) as job:
            incident = struck(job, kind)
            assert (incident.kind, incident.rank) == ("hang", CULPRIT)
            (stack,) = job.stacks(incident.incident_id)
            assert (stack.rank, stack.source) == (CULPRIT, "faulthandler")
            assert "in deadlocks" in stack.text.splitlines()[1]


def test_a_stopped_rank_is_named_for_certain_and_the_job_goes_on_when_it_does() -> None:
    with job_of(0.05) as job:
        incident = struck(job, STOP)
        assert (incident.rank, incident.tier) == (CULPRIT, "confirmed")
        (stack,) = job.stacks(incident.incident_id)
        assert stack.source != "faulthandler", "a stopped process answers no signal"
        steps = job.steps()
        job.resume()
        wait_for("it trains again", lambda: job.steps() > steps + 1)
        wait_for("it is over", lambda: job.hangs()[0].HasField("closed_unix_s"))
        assert len(job.hangs()) == 1


def test_storage_that_does_not_answer_is_named_for_one_rank_and_for_all() -> None:
    with job_of(0.05, with_mount=True) as job:
        incident = struck(job, READ)
        assert incident.rank == CULPRIT
        assert "phase loading" in incident.reason
    with job_of(0.05, with_mount=True) as job:
        incident = struck(job, READ_ALL)
        assert not incident.HasField("rank")
        assert "input" in incident.reason
        wait_for("all stacks", lambda: len(job.stacks(incident.incident_id)) == SIZE)
