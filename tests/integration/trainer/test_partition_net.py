"""A network that tears under a running job: real processes, real namespaces, no connection breaks.

What is cut off is not told: bytes are lost, as behind a dead switch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents.rank_ranges import format_ranks
from pacekeeper.trainer.toy.engine.single_process import train_alone
from support.fleet import SMALL, Fleet
from support.networks import Network
from support.sabotage import Hasty

CONFIG = replace(SMALL, steps=60, replicas=4, peer_timeout_s=10.0)


@pytest.mark.parametrize(
    ("num_nodes", "cut", "winners"),
    [
        (2, 1, (0, 1)),  # 2|2: the side with the lowest rank, which also has the rendezvous
        (4, 0, (1, 2, 3)),  # 1|3: the majority, without the rendezvous and the lowest rank
    ],
    ids=["2|2", "1|3"],
)
def test_one_side_goes_on_and_the_other_says_why_it_does_not(
    tmp_path: Path, num_nodes: int, cut: int, winners: tuple[int, ...]
) -> None:
    losers = tuple(rank for rank in range(4) if rank not in winners)
    with (
        Network(num_nodes) as network,
        Fleet(
            directory=tmp_path,
            config=CONFIG,
            num_nodes=num_nodes,
            ranks_per_node=4 // num_nodes,
            network=network,
            body=Hasty(quorum_wait_s=3.0),
        ) as fleet,
    ):
        fleet.await_step(7, winners[-1])
        network.cut_off(cut)
        codes = fleet.codes()
        assert codes == [ExitCode.NO_QUORUM if n == cut else 0 for n in range(num_nodes)]
        said = fleet.launchers[cut].output()
        assert f"ranks {format_ranks(losers)} are no quorum" in said
        assert "mend the network" in said
        wanted = [loss for _, loss, _ in train_alone(CONFIG)]
        for rank in winners:
            assert_committed(fleet.steps(rank), wanted)
            assert len(fleet.steps(rank)) == CONFIG.steps
            assert len(fleet.events(rank, "regroup")) == 1
        for rank in losers:
            assert_committed(fleet.steps(rank), wanted)
            assert len(fleet.steps(rank)) < CONFIG.steps
            assert fleet.events(rank, "regroup") == [], "it never went on by itself"


def assert_committed(steps: list[dict[str, Any]], wanted: list[float]) -> None:
    """Every step once, in order, with the losses of the undisturbed run."""
    assert [line["step"] for line in steps] == list(range(len(steps)))
    assert [line["loss"] for line in steps] == pytest.approx(wanted[: len(steps)], rel=1e-9)
