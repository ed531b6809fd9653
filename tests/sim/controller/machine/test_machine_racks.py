"""Racks in the closed loop: what agents told decides whether a job outlives one, network or not."""

import pytest

from pacekeeper.controller.policy.failure_domains import fatal_domains
from pacekeeper.core.errors import LostStateError
from support.closed_loop import CONFIG, WARM_STEPS, until
from support.examples import seeds
from support.paper_cluster import PaperCluster

NODES = {f"node-{node}": (2 * node, 2 * node + 1) for node in range(4)}
RACKS = {"node-0": "r0", "node-1": "r0", "node-2": "r1", "node-3": "r1"}
RACK_OF = {rank: RACKS[node] for node, ranks in NODES.items() for rank in ranks}


def cluster_of(seed: int, racks: dict[str, str]) -> PaperCluster:
    return PaperCluster(
        seed=seed, config=CONFIG, loss=0.3, offer_loss=0.5, nodes=NODES, racks=racks
    )


def dies(cluster: PaperCluster, rack: str) -> None:
    cluster.kill(*(rank for rank in RACK_OF if RACK_OF[rank] == rack))


@pytest.mark.parametrize("seed", seeds(6))
def test_a_rack_dies_and_every_expert_still_has_a_live_copy(seed: int) -> None:
    cluster = cluster_of(seed, RACKS)
    assert fatal_domains(cluster.layout.experts, RACK_OF), "the first layout knows nodes only"
    until(cluster, lambda: not fatal_domains(cluster.layout.experts, RACK_OF))
    if seed % 3 == 0:
        cluster.restart_controller()
    if seed % 3 == 1:  # a plan made around a slow rank keeps them apart, too
        cluster.run(WARM_STEPS)
        before = len(cluster.applied)
        cluster.speeds[seed % 8] = 0.5
        until(cluster, lambda: len(cluster.applied) > before)
    cluster.run(WARM_STEPS)
    assert not fatal_domains(cluster.layout.experts, RACK_OF)
    dies(cluster, f"r{seed % 2}")  # raises where an expert is lost
    cluster.run(WARM_STEPS)
    assert {RACK_OF[rank] for rank in cluster.layout.ranks} == {f"r{1 - seed % 2}"}
    until(cluster, lambda: cluster.job.layouts.current == cluster.layout)


@pytest.mark.parametrize("told", [(), ("node-0", "node-1", "node-2")])
def test_where_not_all_nodes_have_told_their_rack_nothing_moves_and_a_rack_takes_experts(
    told: tuple[str, ...],
) -> None:
    cluster = cluster_of(1, {node: RACKS[node] for node in told})
    cluster.run(2 * WARM_STEPS)
    assert len(cluster.applied) == 1
    decision = cluster.job.plan.last_decision
    assert decision is not None and decision.exposure is not None
    assert decision.exposure.nodes_without_rack == (("node-3",) if told else ())
    with pytest.raises(LostStateError):
        dies(cluster, "r0")
