"""Pipelined jobs in the simulated cluster: each policy by its published rule, ours by its code."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
)
from pacekeeper.simulator.engine.controller_in_loop import JOB as WATCHED
from pacekeeper.simulator.engine.controller_in_loop import MOST_STEPS, Watcher
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Planned, Work
from pacekeeper.simulator.policies.base import Cause, PolicyOf, Use
from pacekeeper.simulator.policies.pipeline.adaptra import Adaptra
from pacekeeper.simulator.policies.pipeline.greyhound import Greyhound
from pacekeeper.simulator.policies.pipeline.no_mitigation import Unmitigated
from pacekeeper.simulator.policies.pipeline.oobleck import Oobleck
from pacekeeper.simulator.policies.pipeline.pacekeeper import Repartition
from pacekeeper.simulator.policies.pipeline.recycle import ReCycle
from pacekeeper.simulator.policies.pipeline.resihp import ResiHP
from support.pipeline_jobs import PAUSE_S, pipeline_job

JOB = pipeline_job()
RANKS = JOB.baseline.ranks
HEALTHY_S = JOB.step_s(
    Planned(partition=JOB.baseline), JOB.routing.at(0), {}, Repartition().dispatch
)
STEPS = 200


def run(
    policy: PolicyOf[Work], *changes: Change, steps: int = STEPS, job: PipelineJob = JOB
) -> SimulationResult:
    history = History(
        name="x",
        num_nodes=len(RANKS),
        duration_s=steps * HEALTHY_S,
        changes=(NodesJoined(at_s=0.0, nodes=RANKS), *changes),
    )
    return simulate(history, job, job.routing, policy, seed=0)


def slow(rank: int = 5, speed: float = 0.4, at_step: float = 0.0) -> SpeedChanged:
    return SpeedChanged(at_s=at_step * HEALTHY_S, node=rank, speed=speed)


def lost(*ranks: int, at_step: float = 10.5) -> NodesLost:
    return NodesLost(at_s=at_step * HEALTHY_S, nodes=ranks)


def parts(outcome: SimulationResult) -> float:
    """Of the samples of a healthy run."""
    return outcome.steps / STEPS


def test_what_is_copied_is_told_of_every_policy_that_moves_state() -> None:
    gone = lost(5)
    assert run(Unmitigated(), gone).copied_bytes == 0
    assert run(ReCycle(), gone).copied_bytes == 0  # peers hold the parameters
    for policy in (Oobleck(), ResiHP(), Repartition()):
        assert run(policy, gone).copied_bytes > 0, policy.name


def test_ours_writes_its_checkpoints_beside_the_training() -> None:
    spent = [
        run(replace(policy, checkpoint_steps=20)).spent_s[Use.SAVED]
        for policy in (ResiHP(), Repartition())
    ]
    assert 0.0 < spent[1] < 0.25 * spent[0]


def test_a_healthy_job_runs_at_home_under_every_policy() -> None:
    for policy in (Unmitigated(), Greyhound(), ResiHP(), ReCycle(), Oobleck(), Repartition()):
        outcome = run(policy, steps=20)
        assert outcome.steps == 20 and outcome.reconfigurations == 0


def test_around_a_slow_device_policies_come_in_the_published_order_and_ours_first() -> None:
    degraded, adaptra, greyhound, resihp, ours = (
        run(policy, slow()).steps
        for policy in (Unmitigated(), Adaptra(), Greyhound(), ResiHP(), Repartition())
    )
    assert degraded <= adaptra < greyhound < resihp < ours
    fluid = STEPS * (len(RANKS) - 1 + 0.4) / len(RANKS)
    assert ours >= 0.9 * fluid


def test_ours_learns_from_the_machine_who_is_slow_and_goes_home_when_it_is_over() -> None:
    outcome = run(Repartition(), slow(), slow(speed=1.0, at_step=100.0))
    first, second = (told for told in outcome.decisions if told.cause is Cause.DUE)
    assert 0.0 < first.at_s < (3 + 2 + 5) * HEALTHY_S / 0.4
    assert second.at_s > 100.0 * HEALTHY_S
    after = run(Repartition(), slow(), slow(speed=1.0, at_step=100.0), steps=STEPS + 100)
    assert after.steps - outcome.steps == pytest.approx(100, abs=1)


def test_what_is_too_small_to_be_named_is_not_acted_on() -> None:
    outcome = run(Repartition(), slow(speed=0.95), steps=MOST_STEPS + 20)
    assert outcome.reconfigurations == 0


def test_ours_waits_until_a_fault_has_cost_as_much_as_the_move_around_it() -> None:
    quick, dear = (pipeline_job(pause_s=pause_s) for pause_s in (PAUSE_S, 40 * HEALTHY_S))
    begun = []
    for job in (quick, dear):
        outcome = run(Repartition(), slow(), job=job)
        (at_s,) = {told.at_s for told in outcome.decisions if told.cause is Cause.DUE}
        begun.append(at_s)
    lost_s = begun[1] - begun[1] / run_step_s({5: 0.4}) * HEALTHY_S  # since its onset at 0 s
    assert begun[0] < 10 * HEALTHY_S
    assert lost_s == pytest.approx(40 * HEALTHY_S, rel=0.1)


def test_ours_leaves_alone_what_would_gain_too_little() -> None:
    assert run(Repartition(), slow(speed=0.87)).reconfigurations == 1
    # That device holds its job up by a seventh at most.
    config = ControllerConfig(policy=replace(ControllerConfig().policy, min_gain=0.15))
    assert run(Repartition(config=config), slow(speed=0.87)).reconfigurations == 0


def test_resihp_does_not_notice_what_stays_below_its_gate() -> None:
    assert run(ResiHP(), slow(speed=0.85)).reconfigurations == 0
    assert run(ResiHP(), slow(speed=0.5)).reconfigurations == 1


def test_greyhound_waits_until_the_loss_is_worth_an_answer_and_exchanges_groups_later() -> None:
    # One slow device in either pipeline, in other stages: only S3 brings them into one.
    outcome = run(Greyhound(), slow(rank=1), slow(rank=13))
    causes = [told for told in outcome.decisions if told.cause is Cause.DUE]
    assert [told.reason for told in causes] == [
        "as it is",
        "S3: slow groups into the same pipelines",
    ]
    assert causes[0].at_s == pytest.approx(10 * run_step_s({1: 0.4, 13: 0.4}), rel=1e-6)
    assert outcome.steps > run(Unmitigated(), slow(rank=1), slow(rank=13)).steps


def run_step_s(speed: dict[int, float]) -> float:
    return JOB.step_s(
        Planned(partition=JOB.baseline), JOB.routing.at(0), speed, Repartition().dispatch
    )


def test_recycle_gives_a_lost_groups_micro_batches_to_its_peers_and_stops_without_any() -> None:
    outcome = run(ReCycle(), lost(0))
    assert 0.4 * STEPS < outcome.steps < 0.75 * STEPS and outcome.restarts == 0
    ended = run(ReCycle(), lost(0), lost(4, at_step=50.5))  # both groups of the first stage
    assert ended.spent_s[Use.WAITED] > 0.5 * STEPS * HEALTHY_S


def test_oobleck_goes_on_with_a_shorter_pipeline() -> None:
    outcome = run(Oobleck(), lost(0))
    # Three of four groups are left, two of them a pipeline as before.
    assert 0.55 * STEPS < outcome.steps < 0.87 * STEPS


def test_oobleck_gives_the_rest_of_a_pipeline_that_is_too_short_to_the_others() -> None:
    # Two groups hold the model, one does not: 16 layers of 2 GB on four ranks are 8 GB each.
    job = pipeline_job(data=3, rows=16, memory_bytes=8.5e9)
    gone = job.baseline.pipelines[0].cells[0].ranks[0]
    living = [rank for rank in job.baseline.ranks if rank != gone]
    work = Oobleck().work_for(job.as_is({}, living=living))
    assert isinstance(work, Planned)
    left = job.baseline.pipelines[0].cells[1].ranks
    assert sorted(len(pipeline.cells) for pipeline in work.partition.pipelines) == [2, 3]
    assert set(left) <= set(work.ranks) and work.partition.rows_per_step == 3 * 16
    fewer = [rank for rank in living if rank not in job.baseline.pipelines[1].ranks]
    assert Oobleck().work_for(job.as_is({}, living=fewer)) is None


def test_a_lost_device_costs_ours_no_more_than_its_part_and_a_pause() -> None:
    outcome = run(Repartition(), lost(0))
    fluid = 10 + (STEPS - 10) * (len(RANKS) - 1) / len(RANKS)
    assert outcome.steps >= 0.9 * fluid
    assert outcome.restarts == 0
    assert outcome.spent_s[Use.MOVED] >= PAUSE_S
    assert outcome.steps >= run(ResiHP(), lost(0)).steps


def test_who_comes_back_has_work_again_and_is_judged_under_a_number_of_its_own() -> None:
    back = NodesJoined(at_s=50.0 * HEALTHY_S, nodes=(0,))
    outcome = run(Repartition(), slow(), lost(0), back, slow(rank=0, at_step=100.0))
    assert outcome.decisions[-1].cause is Cause.DUE and outcome.decisions[-1].num_nodes == len(
        RANKS
    )
    fluid = (len(RANKS) - 2 * 0.6) / len(RANKS)
    more = run(Repartition(), slow(), lost(0), back, slow(rank=0, at_step=100.0), steps=STEPS + 100)
    assert more.steps - outcome.steps >= 0.9 * 100 * fluid


def test_the_machine_knows_who_came_back_under_a_number_of_its_own() -> None:
    watcher = Watcher(JOB, ControllerConfig(), 0)
    watched = watcher.joined(watcher.gone(watcher.begun(RANKS, JOB.baseline), [0]), [0])
    assert watched.number_of[0] == len(RANKS)
    job = watched.state.jobs[WATCHED]
    assert 0 not in job.living and len(RANKS) in job.living
    steps, watched = watcher.until_seen(watched, JOB.baseline, {0: 0.5})
    assert steps < MOST_STEPS and watched.slow == {0: pytest.approx(2.0, rel=0.1)}


def test_jobs_that_begin_alike_are_warmed_up_once_and_jitter_goes_on_as_if_each_was() -> None:
    first, again = (Watcher(JOB, ControllerConfig(), 5) for _ in range(2))
    watched = first.begun(RANKS, JOB.baseline)
    assert again.begun(RANKS, JOB.baseline) is watched
    assert first.draw.random() == again.draw.random() != np.random.default_rng(5).random()
    assert Watcher(JOB, ControllerConfig(), 6).begun(RANKS, JOB.baseline) is not watched


def test_state_that_nobody_holds_comes_from_storage() -> None:
    outcome = run(Repartition(checkpoint_steps=5), lost(0, 4))  # the same shards of both pipelines
    assert outcome.restarts == 1 and outcome.needless_restarts == 0
    assert outcome.spent_s[Use.RESTARTED] > 0.0
    assert outcome.steps > 0.5 * STEPS


def test_adaptras_order_of_chunks_is_never_slower_than_the_usual_one() -> None:
    for speed in ({}, {5: 0.4}, {9: 0.3}, {13: 0.6}):
        chosen = Adaptra().work_for(JOB.as_is(speed))
        assert chosen is not None
        taken_s = JOB.step_s(chosen, JOB.routing.at(0), speed, Adaptra().dispatch)
        assert taken_s <= run_step_s(speed) * (1.0 + 1e-9)
