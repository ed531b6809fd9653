"""What strikes many ranks of a job at once is one incident, and each of them stays known in it."""

from dataclasses import replace

from pacekeeper.controller.machine.rank_failures import GATHER_S
from pacekeeper.controller.machine.reports import ingest_report
from pacekeeper.controller.state.events import Log, SaveIncident
from pacekeeper.controller.state.state import State
from pacekeeper.controller.storage.rows import incident_of, incident_row
from pacekeeper.controller.storage.write_batch import last_of_each
from pacekeeper.core.incidents.findings import CoverageState, Incident
from pacekeeper.core.incidents.rank_failures import failed_ranks
from pacekeeper.core.layout.resize.shrink import shrink
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.records import RankExitRecord
from support.machine_driver import FIRST, FLOOR, JOB, Driver, applied, exited, started
from support.many_ranks import PER_NODE, job, killed

TWO = shrink(FIRST, dead=[1], generation=2, floor=FLOOR)


def only(driver: Driver) -> Incident:
    (incident,) = driver.job.incidents
    return incident


def test_a_nodes_ranks_are_one_incident_with_what_became_of_each() -> None:
    driver = started()
    driver.report(exited(2), exited(3, signal=0, exit_code=7), node="node-1")
    incident = only(driver)
    assert [(one.ranks, one.reason) for one in incident.rank_failures] == [
        (((2, 2),), "its process ended by signal 9"),
        (((3, 3),), "its process ended by exit code 7 (lost state)"),
    ]
    assert incident.finding.rank == 2 and incident.nodes == ("node-1",)
    assert incident.finding.reason == (
        "rank 2 is dead: its process ended by signal 9; "
        "rank 3 is dead: its process ended by exit code 7 (lost state)"
    )


def test_who_dies_shortly_after_belongs_to_it_and_is_told() -> None:
    driver = started()
    driver.report(exited(1))
    driver.now_s += 20.0
    driver.report(exited(3), node="node-1")
    incident = only(driver)
    assert [one.unix_s for one in incident.rank_failures] == [1100.0, 1120.0]
    assert (incident.opened_unix_s, incident.nodes) == (1100.0, ("node-0", "node-1"))
    assert driver.all_said(SaveIncident) == [SaveIncident(incident=incident)]
    assert driver.texts == (
        "job=moe incident=1 by now ranks 1 and 3 are dead: their processes ended by signal 9"
    )


def test_who_dies_later_is_an_incident_of_its_own() -> None:
    driver = started()
    driver.report(exited(1))
    driver.now_s += GATHER_S
    driver.report(exited(3), node="node-1")
    assert [i.finding.rank for i in driver.job.open_incidents] == [1, 3]


def test_once_the_job_went_on_the_next_death_is_an_incident_of_its_own() -> None:
    driver = started()
    driver.report(exited(1))
    driver.report(*applied(TWO), layouts=[TWO])
    driver.report(exited(3), node="node-1")
    assert [(i.finding.rank, i.is_open) for i in driver.job.incidents] == [(1, False), (3, True)]


def test_it_stays_open_for_those_that_the_layout_still_has() -> None:
    driver = started()
    driver.report(exited(1), *applied(TWO, ranks=[0, 2, 3]))
    driver.report(exited(2), node="node-1")
    driver.report(layouts=[TWO])
    incident = only(driver)
    assert incident.is_open and incident.unresolved_ranks == ((2, 2),)
    (note,) = incident.actions
    assert note.startswith("generation 2: the survivors 0, 2 and 3 went on by themselves")
    assert note.endswith(", without rank 1; not yet without rank 2")
    assert f"job={JOB} incident=1 {note}" in driver.texts
    three = shrink(TWO, dead=[2], generation=3, floor=FLOOR)
    driver.report(*applied(three), layouts=[three])
    incident = only(driver)
    assert not incident.is_open and len(incident.actions) == 2
    assert {one.ranks: one.closed_unix_s for one in incident.rank_failures} == {
        ((1, 1),): 1100.0,
        ((2, 2),): 1100.0,
    }


def test_who_dies_while_one_is_over_only_in_part_is_an_incident_of_its_own() -> None:
    driver = started()
    driver.report(exited(1), *applied(TWO, ranks=[0, 2, 3]))
    driver.report(exited(2), node="node-1")
    driver.report(layouts=[TWO])
    driver.report(exited(3), node="node-1")
    assert [i.unresolved_ranks for i in driver.job.open_incidents] == [((2, 2),), ((3, 3),)]
    three = shrink(TWO, dead=[2, 3], generation=3, floor=FLOOR)
    driver.report(*applied(three), layouts=[three])
    assert not driver.job.open_incidents


def test_after_a_restart_it_goes_on_where_it_was() -> None:
    driver = started()
    driver.report(exited(1), *applied(TWO, ranks=[0, 2, 3]))
    driver.start_again()
    driver.attach_again(FIRST)
    driver.report(exited(3), node="node-1")
    assert only(driver).unresolved_ranks == ((1, 1), (3, 3))


def test_one_that_was_stored_with_its_finding_only_is_about_that_rank() -> None:
    driver = started()
    driver.report(exited(1), *applied(TWO, ranks=[0, 2, 3]))
    older = replace(only(driver), rank_failures=(), nodes=())
    known = replace(driver.job, incidents=(older,))
    driver.state = replace(driver.state, jobs={JOB: known})
    assert older.unresolved_ranks == ((1, 1),)
    driver.report(layouts=[TWO])
    incident = only(driver)
    assert not incident.is_open and failed_ranks(incident.rank_failures) == ((1, 1),)
    assert incident.rank_failures[0].reason == "its process ended by signal 9"


def test_a_job_that_is_started_anew_waits_for_none_of_its_dead() -> None:
    driver = started()
    driver.report(exited(1), exited(0))
    driver.report(run_id=7)
    incident = only(driver)
    assert incident.unresolved_ranks == () and not any(
        one.is_open for one in incident.rank_failures
    )
    assert incident.actions == ("the job was started anew",)


def test_a_job_of_8192_ranks_that_is_killed_is_one_incident_of_a_few_lines() -> None:
    num_ranks = 8192
    state = State(jobs={JOB: job(num_ranks)})
    said: list[object] = []
    for node in range(0, num_ranks // PER_NODE):
        state, more = killed(state, (node * 389) % (num_ranks // PER_NODE))
        said += last_of_each(more)
    (incident,) = state.jobs[JOB].incidents
    (deaths,) = incident.rank_failures
    assert deaths.ranks == ((0, num_ranks - 1),) and len(incident.nodes) == num_ranks // PER_NODE
    assert incident.finding.reason == ("ranks 0-8191 are dead: their processes ended by signal 15")
    assert sum(isinstance(one, Log) for one in said) == 1, "what follows is told in parts"
    row = incident_row(incident)
    assert incident_of(row) == incident
    assert sum(len(str(value)) for value in row) < 20_000, "most of it the names of nodes"


def test_many_changes_of_one_incident_at_once_are_written_and_told_as_one() -> None:
    state = State(jobs={JOB: job(4 * PER_NODE), "other": replace(job(1), name="other")})
    said: list[object] = []
    for node in range(3):
        state, more = killed(state, node)
        said += more
    end = RankExitRecord(rank=0, pid=1000, exit_code=1, signal=0)
    state, more = ingest_report(state, "node-0000", JobReport(job="other", records=(end,)), 100.0)
    state, last = killed(state, 3)
    once = last_of_each([*said, *more, *last])  # type: ignore[list-item]
    saved = [one.incident for one in once if isinstance(one, SaveIncident)]
    assert [one.incident_id for one in saved] == [1, 2], "each where it first came"
    assert saved[0] == state.jobs[JOB].incidents[0]


def test_the_last_of_a_job_that_ends_is_in_the_log() -> None:
    driver = started()
    driver.report(exited(0))
    known = replace(driver.job, notices=replace(driver.job.notices, has_unsent_deaths=True))
    driver.state = replace(driver.state, jobs={JOB: known})
    driver.report(*(exited(rank) for rank in (1, 2, 3)))
    driver.state = replace(
        driver.state,
        jobs={
            JOB: replace(driver.job, notices=replace(driver.job.notices, has_unsent_deaths=True))
        },
    )
    driver.tick()
    assert (
        driver.job.coverage.state is CoverageState.ENDED
        and not driver.job.notices.has_unsent_deaths
    )
    assert "by now ranks 0-3 are dead" in driver.texts


def test_one_that_was_stored_with_its_finding_only_and_is_over_takes_in_nobody() -> None:
    driver = started()
    driver.report(exited(1))
    driver.report(*applied(TWO), layouts=[TWO])
    older = replace(only(driver), rank_failures=(), nodes=())
    driver.state = replace(driver.state, jobs={JOB: replace(driver.job, incidents=(older,))})
    driver.report(exited(3), node="node-1")
    assert [i.unresolved_ranks for i in driver.job.incidents] == [(), ((3, 3),)]
