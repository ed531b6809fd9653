"""Slow nodes in the simulated cluster: only ours learns of them, by the detector."""

from collections.abc import Mapping

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.predictor.cost.forecast import forecast
from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
)
from pacekeeper.simulator.engine.detection_model import MOST_STEPS, Detection, simulate_detection
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.data_parallel import Dispatch
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.policies.base import Cause, Policy
from pacekeeper.simulator.policies.lazarus import Lazarus
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper, model_of, workload_of
from support.examples import seeds
from support.sim_jobs import EXACT, small_job

NUM_NODES, NUM_LAYERS, NUM_EXPERTS = 6, 2, 6
JOB = small_job(
    num_layers=NUM_LAYERS,
    num_experts=NUM_EXPERTS,
    slots_per_node=4,
    samples_per_node=24,
    tokens_per_sample=64,
    balanced_step_s=1.0,
)
ROUTING = even_routing(NUM_LAYERS, NUM_EXPERTS)


def sight(known: Mapping[int, float], speed: Mapping[int, float], seed: int = 0) -> Detection:
    layout = even_layout(
        ranks=range(NUM_NODES), num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, replicas=2
    )
    parts = ROUTING.at(0)
    config = DetectorConfig()
    return simulate_detection(
        JOB, layout, parts, Dispatch.EVENED, known=known, speed=speed, config=config, seed=seed
    )


def run(policy: Policy, *changes: Change) -> SimulationResult:
    history = History(
        name="x",
        num_nodes=NUM_NODES,
        duration_s=600.0,
        changes=(NodesJoined(at_s=0.0, nodes=tuple(range(NUM_NODES))), *changes),
    )
    return simulate(history, JOB, ROUTING, policy, seed=0)


@pytest.mark.parametrize("seed", seeds(3))
def test_the_detector_sees_half_speed_in_some_steps_and_says_how_slow(seed: int) -> None:
    found = sight({}, {2: 0.5}, seed)
    assert 1 <= found.steps <= 5
    assert found.slow == {2: pytest.approx(2.0, rel=0.1)}
    over = sight(found.slow, {}, seed)
    assert 1 <= over.steps <= 10 and over.slow == {}
    worse = sight(found.slow, {2: 0.25}, seed)
    assert worse.slow == {2: pytest.approx(4.0, rel=0.1)}


def test_what_is_too_small_to_be_named_is_not() -> None:
    assert sight({}, {2: 0.97}).slow == {}
    hidden = sight({}, {2: 0.5, 3: 0.5, 4: 0.5, 5: 0.5})  # most are slow: who is the odd one?
    assert hidden.steps <= MOST_STEPS


def test_ours_gets_over_a_slow_node_and_goes_home_and_lazarus_waits_for_it() -> None:
    slow = SpeedChanged(at_s=100.0, node=2, speed=0.5)
    well = SpeedChanged(at_s=400.0, node=2, speed=1.0)
    healthy, ours, lazarus = (
        run(Pacekeeper(costs=EXACT)),
        run(Pacekeeper(costs=EXACT), slow, well),
        run(Lazarus(costs=EXACT), slow, well),
    )
    # The fluid limit of half of the time at 5.5 of 6 nodes.
    assert ours.samples >= 0.95 * healthy.samples * (0.5 + 0.5 * 5.5 / 6.0)
    assert lazarus.samples <= 0.80 * healthy.samples
    reasons = [told.reason for told in ours.decisions if told.cause is Cause.DUE]
    assert any("rank 2 takes" in reason for reason in reasons)
    assert any("all findings are closed" in reason for reason in reasons)


def test_a_slow_node_that_is_lost_is_nobodys_finding_any_more() -> None:
    outcome = run(
        Pacekeeper(costs=EXACT),
        SpeedChanged(at_s=100.0, node=2, speed=0.5),
        NodesLost(at_s=200.0, nodes=(2,)),
    )
    last = outcome.decisions[-1]
    assert outcome.restarts == 0 and "rank 2" not in last.reason
    # Five nodes, all well, from the regrouping on.
    times, samples = zip(*outcome.points, strict=True)
    before, after = np.interp([300.0, 590.0], times, samples)
    assert (after - before) / 290.0 == pytest.approx(5 * JOB.samples_per_node, rel=0.1)


def test_what_is_forecast_of_a_plan_is_what_it_takes() -> None:
    layouts: list[Layout] = []

    class Watched(Pacekeeper):
        def answer(self, moment, job):  # type: ignore[no-untyped-def]
            told = Pacekeeper.answer(self, moment, job)
            if told.layout is not None:
                layouts.append(told.layout)
            return told

    run(Watched(costs=EXACT), SpeedChanged(at_s=100.0, node=2, speed=0.5))
    parts = ROUTING.at(0)
    for layout in layouts:
        workload = workload_of(JOB, parts, NUM_NODES)
        told = forecast(layout, model=model_of(JOB), workload=workload, speeds={2: 0.5})
        taken_s = JOB.step_s(layout, parts, {2: 0.5}, Dispatch.EVENED)
        if layout.speeds:
            assert taken_s == pytest.approx(told.step_s, rel=0.02)
    assert any(layout.speeds for layout in layouts)
