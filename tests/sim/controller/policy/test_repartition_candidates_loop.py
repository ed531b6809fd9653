"""The closed loop of a job with stages and tensor groups, in virtual time over a bad network."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest

from pacekeeper.controller.planning.model.problem import PartitionProblem
from pacekeeper.controller.planning.partition_cost.step_time import price
from pacekeeper.controller.policy.partition_inputs import as_partition, unevenness_of
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.events import Command, DecisionMade, Event, RequestDecision
from pacekeeper.controller.state.planning_snapshot import PlanningSnapshot
from pacekeeper.controller.state.state import State
from pacekeeper.core.incidents.findings import Decision, FindingKind
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.simulator.jobs.pipeline_step import partition_step_s
from support.closed_loop import CONFIG, WARM_STEPS, is_baseline, until
from support.examples import stress
from support.paper_cluster import OVERHEAD_S, PaperCluster


@pytest.mark.parametrize(("seed", "stages", "tensor"), [(0, 1, 2), (1, 2, 1), (2, 2, 1), (3, 2, 2)])
def test_a_slow_rank_gives_shards_or_layers_away_and_gets_them_back(
    seed: int, stages: int, tensor: int
) -> None:
    cluster = PaperCluster(
        seed=seed,
        config=CONFIG,
        loss=0.2,
        offer_loss=0.3,
        num_microbatches=4,
        num_layers=8,
        num_stages=stages,
        tensor_size=tensor,
    )
    victim = seed % 4
    cluster.run(2 * WARM_STEPS)
    healthy_s = mean(cluster.step_s[-10:])
    assert not cluster.faults and len(cluster.applied) == 1

    cluster.speeds[victim] = 0.5
    until(cluster, lambda: cluster.layout.mesh != cluster.first_layout.mesh)
    slow_s = max(cluster.step_s[2 * WARM_STEPS :])
    cluster.run(WARM_STEPS)
    (found,) = cluster.faults.values()
    assert (found.finding.kind, found.finding.rank) == (FindingKind.DEVICE, victim)
    relieved_s = mean(cluster.step_s[-10:])
    # Nothing done, every step would wait for half a rank's pace; an eighth of all speed is lost.
    assert relieved_s < healthy_s + 0.6 * (slow_s - healthy_s)

    cluster.speeds.clear()
    until(cluster, lambda: is_baseline(cluster) and not cluster.has_open_fault)
    cluster.run(WARM_STEPS)
    assert is_baseline(cluster)
    assert mean(cluster.step_s[-10:]) == pytest.approx(healthy_s, rel=0.05)
    (closed,) = cluster.faults.values()
    assert closed.finding.rank == victim
    assert any(" brings " in action for action in closed.actions)
    assert all(a.generation < b.generation for a, b in pairwise(cluster.applied))


def test_a_zero_bubble_job_is_priced_and_planned_by_its_own_program() -> None:
    cluster = PaperCluster(
        seed=1,
        config=CONFIG,
        num_microbatches=4,
        num_layers=8,
        num_stages=2,
        schedule=Schedule.ZERO_BUBBLE,
    )
    cluster.run(WARM_STEPS)
    cluster.restart_controller()  # the schedule is not stored: ranks report it again
    cluster.run(2 * WARM_STEPS)
    problem = problem_asked(asked_views(cluster)[-1])
    assert problem.now.schedule is Schedule.ZERO_BUBBLE
    own_s = price(problem.now, problem).step_s
    assert own_s == pytest.approx(mean(cluster.step_s[-10:]) - OVERHEAD_S, rel=0.02)
    assert own_s == pytest.approx(partition_step_s(problem.now, problem))  # event by event
    as_1f1b = replace(problem.now, schedule=Schedule.ONE_F_ONE_B)
    assert price(as_1f1b, problem).step_s > 1.1 * own_s

    decided: list[Decision] = []

    def note(event: Event, now_s: float, commands: tuple[Command, ...], state: State) -> None:
        if isinstance(event, DecisionMade) and event.decision is not None:
            decided.append(event.decision)

    cluster.on_advance = note
    cluster.speeds[1] = 0.5
    until(cluster, lambda: cluster.layout.mesh != cluster.first_layout.mesh)
    decision = next(each for each in decided if each.layout == cluster.layout)
    view = next(each for each in reversed(asked_views(cluster)) if each.slow)
    planned = replace(
        problem_asked(view),
        unevenness=unevenness_of(cluster.layout, view.workload.loads, view.speeds),
    )
    bare_s = partition_step_s(as_partition(view, cluster.layout), planned)
    overhead_s = Pricing(view, CONFIG.policy).overhead_s
    assert decision.planned_step_s == pytest.approx(bare_s + overhead_s)


def asked_views(cluster: PaperCluster) -> list[PlanningSnapshot]:
    """What each decision so far rests on."""
    return [command.view for command in cluster.commands if isinstance(command, RequestDecision)]


def problem_asked(view: PlanningSnapshot) -> PartitionProblem:
    """The problem that the planner of partitions gets."""
    problem = Pricing(view, CONFIG.policy).problem
    assert problem is not None
    return problem


@pytest.mark.parametrize(
    ("seed", "speed"), [(5, 0.03), (6, 0.02), stress(7, 0.05), stress(8, 0.03), stress(9, 0.1)]
)
def test_a_hopeless_rank_stands_by_until_a_probe_finds_it_well(seed: int, speed: float) -> None:
    policy = replace(CONFIG.policy, may_leave_out=True)
    cluster = PaperCluster(
        seed=seed,
        config=replace(CONFIG, policy=policy),
        loss=0.2,
        offer_loss=0.3,
        num_microbatches=4,
        num_layers=8,
        tensor_size=2,
        can_probe=True,
    )
    victim = seed % 4
    cluster.run(2 * WARM_STEPS)
    healthy_s = mean(cluster.step_s[-10:])
    cluster.speeds[victim] = speed
    until(cluster, lambda: cluster.layout.standing_by == (victim,))
    cluster.run(4 * WARM_STEPS)
    assert cluster.layout.standing_by == (victim,), "its finding stands, whatever time passes"
    assert cluster.has_open_fault
    assert mean(cluster.step_s[-10:]) < 2.0 * healthy_s
    assert cluster.job.progress.step > cluster.step - 5, "steps are judged without its work"

    cluster.speeds.clear()
    until(cluster, lambda: is_baseline(cluster) and not cluster.has_open_fault)
    cluster.run(WARM_STEPS)
    assert is_baseline(cluster) and not cluster.layout.standing_by
    assert mean(cluster.step_s[-10:]) == pytest.approx(healthy_s, rel=0.05)
    (closed,) = cluster.faults.values()
    assert any("standby rank" in action for action in closed.actions)
