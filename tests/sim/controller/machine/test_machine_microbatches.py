"""Gradient accumulation in the closed loop: four micro-batches a step, a network that loses parts.

A slow rank is named, measured and relieved, and the layout comes home, as with one micro-batch.
"""

from random import Random
from statistics import mean

import pytest

from pacekeeper.controller.state.events import RequestDecision
from pacekeeper.core.incidents.findings import FindingKind
from support.closed_loop import CONFIG, WARM_STEPS, is_baseline, until
from support.examples import seeds
from support.paper_cluster import PaperCluster
from support.paper_work import shares_of

MICRO_BATCHES = 4


@pytest.mark.parametrize("seed", seeds(30))
def test_slow_rank_is_found_and_relieved_and_the_layout_returns_home(seed: int) -> None:
    victim, slowdown = seed % 4, Random(seed).uniform(1.3, 2.2)
    cluster = PaperCluster(
        seed=seed, config=CONFIG, loss=0.3, offer_loss=0.5, num_microbatches=MICRO_BATCHES
    )
    cluster.run(2 * WARM_STEPS)
    healthy_s = mean(cluster.step_s[-10:])
    assert not cluster.faults
    assert len(cluster.applied) == 1

    cluster.speeds[victim] = 1.0 / slowdown
    until(cluster, lambda: len(cluster.applied) > 1)
    (found,) = cluster.faults.values()
    assert (found.finding.kind, found.finding.rank) == (FindingKind.DEVICE, victim)
    assert found.finding.slowdown == pytest.approx(slowdown, rel=0.1)
    assert min(shares_of(cluster.layout), key=shares_of(cluster.layout).__getitem__) == victim
    cluster.run(12 + WARM_STEPS)
    fluid_s = healthy_s * 4 / (3 + 1 / slowdown)
    assert mean(cluster.step_s[-10:]) < fluid_s / 0.85
    plans_while_slow = len(cluster.applied) - 1
    assert plans_while_slow <= 2

    cluster.speeds.clear()
    until(cluster, lambda: is_baseline(cluster) and not cluster.has_open_fault)
    cluster.run(WARM_STEPS)
    assert is_baseline(cluster)
    assert len(cluster.applied) - 1 <= plans_while_slow + 2
    assert len(cluster.faults) == 1


def test_the_planner_prices_as_many_micro_batches_as_the_ranks_run() -> None:
    cluster = PaperCluster(seed=3, config=CONFIG, loss=0.3, num_microbatches=MICRO_BATCHES)
    cluster.run(2 * WARM_STEPS)
    views = [command.view for command in cluster.commands if isinstance(command, RequestDecision)]
    counts = [view.workload.num_microbatches for view in views if view.model is not None]
    assert counts and set(counts) == {MICRO_BATCHES}
