"""A network that tears under a running job: real processes, real namespaces, no connection breaks.

What is cut off is not told: bytes are lost, as behind a dead switch.
"""

from pathlib import Path

import pytest

from pacekeeper.core.errors import ExitCode
from pacekeeper.core.incidents.rank_ranges import format_ranks
from support.exact_jobs import assert_losses, exact_job
from support.fleet import Fleet
from support.networks import Network
from support.sabotage import Hasty

pytest.importorskip("transformers")


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
    config = exact_job(tmp_path, steps=60, replicas=4, peer_timeout_s=10.0)
    with (
        Network(num_nodes) as network,
        Fleet(
            directory=tmp_path,
            config=config,
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
        fleet.assert_exact(winners)
        for rank in winners:
            assert len(fleet.events(rank, "regroup")) == 1
        for rank in losers:
            steps = fleet.steps(rank)
            assert len(steps) < config.steps
            assert_losses(steps, config, 0, len(steps))
            assert fleet.events(rank, "regroup") == [], "it never went on by itself"
