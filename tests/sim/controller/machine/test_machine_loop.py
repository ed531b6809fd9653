"""The closed loop in virtual time over a bad network: what must hold for every seed.

30 % of the reports are lost, late or repeated, half of the commands never arrive, and in most
seeds the controller is killed and started again somewhere on the way.
"""

from itertools import pairwise
from random import Random
from statistics import mean

import pytest

from pacekeeper.core.incidents.findings import FindingKind, Incident
from support.closed_loop import CONFIG, WARM_STEPS, is_baseline, until
from support.examples import seeds
from support.paper_cluster import PaperCluster
from support.paper_work import shares_of


def of_kind(cluster: PaperCluster, kind: FindingKind) -> list[Incident]:
    return [i for i in cluster.incidents.values() if i.finding.kind is kind]


@pytest.mark.parametrize("seed", seeds(100))
def test_slow_rank_is_relieved_layout_returns_home_and_survivors_go_on(seed: int) -> None:
    dice = Random(seed)
    victim, killed = seed % 4, (seed + 1 + seed // 4 % 3) % 4
    slowdown = dice.uniform(1.3, 2.2)
    restart_in = dice.choice(["no phase", "healthy", "slow", "recovered", "shrunken"])
    cluster = PaperCluster(seed=seed, config=CONFIG, loss=0.3, offer_loss=0.5)

    def perhaps_restart(phase: str) -> None:
        if restart_in == phase:
            cluster.restart_controller()

    # Healthy: nobody is accused, nothing is moved.
    cluster.run(WARM_STEPS)
    perhaps_restart("healthy")
    cluster.run(WARM_STEPS)
    healthy_s = mean(cluster.step_s[-10:])
    assert not cluster.faults
    assert len(cluster.applied) == 1

    # Slow: the right rank, its slowdown, and work moves away from it.
    cluster.speeds[victim] = 1.0 / slowdown
    until(cluster, lambda: len(cluster.applied) > 1)
    (found,) = cluster.faults.values()
    assert (found.finding.kind, found.finding.rank) == (FindingKind.DEVICE, victim)
    assert found.finding.slowdown == pytest.approx(slowdown, rel=0.1)
    assert min(shares_of(cluster.layout), key=shares_of(cluster.layout).__getitem__) == victim
    cluster.run(12)
    perhaps_restart("slow")
    cluster.run(WARM_STEPS)
    fluid_s = healthy_s * 4 / (3 + 1 / slowdown)
    assert mean(cluster.step_s[-10:]) < fluid_s / 0.85
    plans_while_slow = len(cluster.applied) - 1
    assert plans_while_slow <= 2

    # Recovered: the finding is over, the layout comes home and stays there.
    cluster.speeds.clear()
    until(cluster, lambda: is_baseline(cluster) and not cluster.has_open_fault)
    perhaps_restart("recovered")
    cluster.run(WARM_STEPS)
    assert is_baseline(cluster)
    assert len(cluster.applied) - 1 <= plans_while_slow + 2
    assert [i.finding.rank for i in of_kind(cluster, FindingKind.DEVICE)] == [victim]

    # One dies: the survivors are followed, told, and helped at most twice.
    cluster.kill(killed)
    applied = len(cluster.applied)
    until(cluster, lambda: not cluster.has_open_fault and killed in cluster.told_dead)
    perhaps_restart("shrunken")
    cluster.run(WARM_STEPS)
    cluster.let_pass(10.0)
    assert cluster.told_dead == {killed}
    assert len(cluster.applied) - applied <= 2

    # In the end both sides agree, and history is as it was.
    assert cluster.job.layouts.current == cluster.layout
    assert cluster.job.living == cluster.layout.ranks == tuple(cluster.living)
    assert all(a.generation < b.generation for a, b in pairwise(cluster.applied))
    assert [i.finding.rank for i in of_kind(cluster, FindingKind.DEVICE)] == [victim]
    assert [i.finding.rank for i in of_kind(cluster, FindingKind.DEATH)] == [killed]
    assert not cluster.has_open_fault
    assert len(cluster.faults) == 2
    assert all(incident.actions for incident in cluster.faults.values())


def test_the_same_seed_gives_the_same_history() -> None:
    def history() -> list[str]:
        cluster = PaperCluster(seed=7, config=CONFIG, loss=0.3, offer_loss=0.5)
        cluster.run(WARM_STEPS)
        cluster.speeds[1] = 0.5
        cluster.run(WARM_STEPS)
        return [repr(command) for command in cluster.commands]

    assert history() == history()
