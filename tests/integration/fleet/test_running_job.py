"""One running job with real processes: a cordon, a slow rank, deaths."""

import signal
from collections.abc import Iterator

import pytest

from pacekeeper.cli.demo.fleet import Fleet
from pacekeeper.cli.demo.recorder import read_step_log
from support.asking import Asking, assert_no_step_is_lost, quick_fleet, quick_job, until
from support.commands import pacekeeper

pytest.importorskip("transformers")

VICTIM, KILLED, CORDONED = 2, 1, 3


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One job for the tests that follow, which leave it healthy; the last one kills a rank."""
    folder = tmp_path_factory.mktemp("loop")
    with quick_fleet(folder, quick_job(folder, seed=1)) as fleet:
        until("the cost model is fitted", lambda: Asking(fleet.address).job().watch == "healthy")
        yield fleet


def test_a_cordoned_rank_stands_by_until_it_is_uncordoned(running: Fleet) -> None:
    ask = Asking(running.address)
    where = ("--controller", running.address)
    first = ask.layout()

    assert pacekeeper("cordon", f"loop/{CORDONED}", *where).returncode == 0
    until("it stands by", lambda: ask.layout().standing_by == (CORDONED,))
    layout, at = ask.layout(), ask.job().step
    assert CORDONED not in layout.working and layout.ranks == first.ranks
    assert all(len(hosts) >= 2 for layer in layout.experts for hosts in layer)
    until("the others train on", lambda: ask.job().step > at + 10)
    assert {rank.state for rank in ask.job().ranks} == {"alive"}
    assert ask.faults() == [], "nobody is accused"

    assert pacekeeper("uncordon", f"loop/{CORDONED}", *where).returncode == 0
    until("it is home", lambda: ask.layout().standing_by == ())
    home, at = ask.layout(), ask.job().step
    assert (home.mesh, home.experts) == (first.mesh, first.experts)
    until("all train on", lambda: ask.job().step > at + 5)
    assert_no_step_is_lost(running, range(4))


def test_the_loop_survives_the_death_of_the_controller_and_of_a_rank(running: Fleet) -> None:
    fleet, folder = running, running.run_dir
    ask = Asking(fleet.address)
    until("the watch is healthy", lambda: ask.job().watch == "healthy")
    known, generation = len(ask.faults()), ask.job().generation
    fleet.set_fault(VICTIM, 1.6)
    until("the layout follows the finding", lambda: ask.job().generation == generation + 1)
    (found,) = ask.faults()[known:]
    assert (found.kind, found.rank) == ("device", VICTIM)
    assert found.slowdown == pytest.approx(1.6, rel=0.1)
    share = dict(ask.layout().batch_shares)
    assert share[VICTIM] < min(s for rank, s in share.items() if rank != VICTIM)

    # kill -9 the controller: training goes on, and a new one knows what the old one knew.
    fleet.processes["controller"].send_signal(signal.SIGKILL)
    fleet.processes["controller"].wait()
    before = len(read_step_log(folder / "train" / "steps-0.jsonl"))
    until(
        "training goes on without a controller",
        lambda: len(read_step_log(folder / "train" / "steps-0.jsonl")) > before + 2,
    )
    fleet._spawn(
        "controller",
        ["controller", "--listen", fleet.listen, "--api-listen", fleet.address]
        + ["--store", str(folder / "controller.sqlite")],
    )
    until("the new controller answers", lambda: ask.job().name == "loop")
    (again,) = ask.faults()[known:]
    assert (again.incident_id, again.rank) == (found.incident_id, VICTIM)
    assert not again.HasField("closed_unix_s")
    assert ask.job().generation == generation + 1
    until("agents are back", lambda: len(ask.job().ranks) == 4 and ask.job().step > before)

    # It measures anew, sees the end of the fault, and goes home.
    until("it has measured again", lambda: ask.job().watch == "degraded")
    fleet.set_fault(VICTIM, 1.0)
    until("the incident is closed", lambda: ask.faults()[known].HasField("closed_unix_s"))
    even = pytest.approx([0.25] * 4)
    until("the layout goes home", lambda: [s for _, s in ask.layout().batch_shares] == even)

    fleet.kill_rank(KILLED)
    until("the survivors' layout is known", lambda: KILLED not in ask.layout().ranks)
    layout = ask.layout()
    assert all(len(hosts) >= 2 for layer in layout.experts for hosts in layer)
    assert [i.kind for i in ask.faults()[known:]] == ["device", "death"]
    until("the death is closed", lambda: ask.faults()[-1].HasField("closed_unix_s"))
    states = {rank.rank: rank.state for rank in ask.job().ranks}
    assert states == {0: "alive", 1: "dead", 2: "alive", 3: "alive"}
    assert_no_step_is_lost(fleet, (0, 2, 3))
