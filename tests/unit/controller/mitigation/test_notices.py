"""Deaths are told at once; a large job that is killed does not keep the controller busy with it."""

from pacekeeper.controller.mitigation.notices import PAUSE_RANKS, PAUSE_S, announce_deaths
from pacekeeper.controller.mitigation.rollout import repeat_notices
from pacekeeper.controller.state.events import Command, NotifyDeaths, SaveIncident
from pacekeeper.controller.state.state import State
from support.machine_driver import JOB
from support.many_ranks import NOW_S, PER_NODE, job, killed


def notices(commands: list[Command]) -> list[NotifyDeaths]:
    return [one for one in commands if isinstance(one, NotifyDeaths)]


def test_what_one_report_tells_of_deaths_is_one_notice() -> None:
    state, said = killed(State(jobs={JOB: job(4 * PER_NODE)}), 1)
    (notice,) = notices(said)
    assert notice.ranks == tuple(range(PER_NODE, 2 * PER_NODE))
    assert sum(isinstance(one, SaveIncident) for one in said) == 1
    assert state.jobs[JOB].dead == notice.ranks


def test_of_a_small_job_each_report_is_told_at_once() -> None:
    state, first = killed(State(jobs={JOB: job(4 * PER_NODE)}), 0)
    state, second = killed(state, 1)
    assert len(notices(first)) == len(notices(second)) == 1


def test_a_large_job_that_is_killed_is_told_of_now_and_then_and_whole() -> None:
    num_nodes = 2 * PAUSE_RANKS // PER_NODE
    state = State(jobs={JOB: job(num_nodes * PER_NODE)})
    said: list[Command] = []
    for node in range(num_nodes - 1):  # one lives
        state, more = killed(state, node)
        said += more
    assert len(notices(said)) == 1, "of the first report"
    early, said = repeat_notices(state.jobs[JOB], NOW_S + PAUSE_S)
    assert not notices(said) and early.notices.has_unsent_deaths
    after, said = repeat_notices(early, NOW_S + 2 * PAUSE_S)
    (notice,) = notices(said)
    assert notice.ranks == after.dead and len(notice.ranks) == (num_nodes - 1) * PER_NODE
    assert not after.notices.has_unsent_deaths


def test_the_pause_grows_with_the_job() -> None:
    after, said = announce_deaths(job(PAUSE_RANKS - 1, dead=1), NOW_S)
    assert notices(said) and notices(announce_deaths(after, NOW_S)[1])
    after, said = announce_deaths(job(4 * PAUSE_RANKS, dead=1), NOW_S)
    assert notices(said)
    assert not notices(announce_deaths(after, NOW_S + 3.9 * PAUSE_S)[1])
    assert notices(announce_deaths(after, NOW_S + 4.1 * PAUSE_S)[1])


def test_where_nobody_is_left_nobody_is_told() -> None:
    after, said = announce_deaths(job(3, dead=3), NOW_S)
    assert not said and not after.notices.has_unsent_deaths
