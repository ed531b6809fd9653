"""A cordon with real processes: the rank stands by while the others train, and comes back."""

from pathlib import Path

from pacekeeper.cli.demo.recorder import read_step_log
from support.asking import Asking, quick_fleet, until
from support.commands import pacekeeper

CORDONED = 3


def test_a_cordoned_rank_stands_by_until_it_is_uncordoned(tmp_path: Path) -> None:
    with quick_fleet(tmp_path, seed=1) as fleet:
        ask = Asking(fleet.address)
        where = ("--controller", fleet.address)
        until("the cost model is fitted", lambda: ask.job().watch == "healthy")
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
        assert (home.stages, home.experts) == (first.stages, first.experts)
        until("all train on", lambda: ask.job().step > at + 5)
        for rank in range(4):
            log = read_step_log(fleet.run_dir / "train" / f"steps-{rank}.jsonl")
            assert [one.step for one in log] == list(range(len(log))), "no step is lost or twice"
