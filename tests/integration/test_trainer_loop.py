"""Deaths at any moment: survivors go on in the step they were in, and the losses stay the same."""

import random
import signal
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path

import pytest

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout import Host, Layout, even_layout
from pacekeeper.trainer import loop, mover
from pacekeeper.trainer.commit import Phase
from pacekeeper.trainer.rank import Rank, RankSpec, first_layout
from pacekeeper.trainer.solo import train_alone
from support.fleet import SMALL, Fleet

FIRST = first_layout(SMALL, 4)


@cache
def undisturbed(config: TrainConfig) -> tuple[float, ...]:
    """The losses of one process that holds everything and that nobody disturbs."""
    return tuple(loss for _, loss, _ in train_alone(config))


def assert_exact(fleet: Fleet, ranks: tuple[int, ...]) -> None:
    """`ranks` committed every step once, with the losses of the undisturbed run."""
    wanted = undisturbed(fleet.config)
    for rank in ranks:
        steps = fleet.steps(rank)
        assert [line["step"] for line in steps] == list(range(fleet.config.steps)), rank
        assert [line["loss"] for line in steps] == pytest.approx(wanted, rel=1e-9), rank


def survivable(count: int) -> list[tuple[int, ...]]:
    """Sets of ranks whose death leaves every expert of FIRST a host."""
    return [
        victims
        for victims in combinations(range(4), count)
        if all(
            any(host.rank not in victims for host in hosts)
            for layer in FIRST.experts
            for hosts in layer
        )
    ]


def test_nobody_dies(tmp_path: Path) -> None:
    with Fleet(directory=tmp_path, num_nodes=2, ranks_per_node=2) as fleet:
        assert fleet.codes() == [0, 0]
        assert_exact(fleet, (0, 1, 2, 3))
        assert fleet.layout(1, node=0) == fleet.layout(1, node=1) == FIRST


@pytest.mark.parametrize("victim", range(4))
def test_any_rank_may_be_killed(tmp_path: Path, victim: int) -> None:
    """Rank 0 is the leader."""
    step = random.Random(victim).randint(3, 20)
    with Fleet(directory=tmp_path, num_nodes=2, ranks_per_node=2) as fleet:
        fleet.await_step(step, victim)
        fleet.signal(victim, signal.SIGKILL)
        assert fleet.codes() == [0, 0]
        survivors = tuple(rank for rank in range(4) if rank != victim)
        assert_exact(fleet, survivors)
        for rank in survivors:
            assert [event["generation"] for event in fleet.events(rank, "regroup")] == [2]
            print([(e["step"], e["took_s"]) for e in fleet.events(rank, "regroup")])
        for node in (0, 1):
            layout = fleet.layout(2, node)
            assert layout.ranks == survivors
            assert all(len(hosts) >= 2 for layer in layout.experts for hosts in layer)
