"""The ends of what can be simulated: no nodes, no living ones, nothing but nodes; luck by seed."""

from dataclasses import replace
from pathlib import Path

import pytest

from pacekeeper.core.errors import PacekeeperError
from pacekeeper.simulator.cluster.fault_generator import FaultKind, FaultRule, drawn_history
from pacekeeper.simulator.cluster.history import (
    Change,
    History,
    NodesJoined,
    NodesLost,
    SpeedChanged,
)
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.engine.statistics import mean_pace, rates, summarize
from pacekeeper.simulator.jobs.expert_routing import even_routing
from pacekeeper.simulator.policies.base import Policy, Use
from pacekeeper.simulator.policies.checkpoint_restart import Regrouping, Restarting
from pacekeeper.simulator.policies.lazarus import Lazarus
from pacekeeper.simulator.policies.pacekeeper import Pacekeeper
from pacekeeper.simulator.scenario.loader import read_scenario, run_scenario
from support.scenarios import small_tables, written
from support.sim_jobs import EXACT, small_job

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
POLICIES: tuple[Policy, ...] = (
    Restarting(group_size=1, checkpoint_steps=None, costs=EXACT),
    Restarting(group_size=1, checkpoint_steps=3, costs=EXACT),
    Regrouping(group_size=1, costs=EXACT),
    Lazarus(costs=EXACT),
    Pacekeeper(costs=EXACT),
)
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)


def run(policy: Policy, *changes: Change, num_nodes: int = 4) -> SimulationResult:
    history = History(name="x", num_nodes=num_nodes, duration_s=100.0, changes=changes)
    return simulate(history, small_job(), even_routing(2, 2), policy)


@every_policy
def test_without_nodes_a_job_waits_all_the_time(policy: Policy) -> None:
    outcome = run(policy, num_nodes=0)
    assert outcome.spent_s[Use.WAITED] == 100.0
    assert outcome.samples == outcome.fluid_samples == 0.0
    (row,) = summarize({"x": [outcome]})
    assert (row.fluid, row.ratio) == (0.0, 0.0)


@every_policy
def test_when_all_nodes_die_a_job_waits_until_one_joins(policy: Policy) -> None:
    everybody = tuple(range(4))
    start, end = NodesJoined(at_s=0.0, nodes=everybody), NodesLost(at_s=50.0, nodes=everybody)
    assert run(policy, start, end).spent_s[Use.WAITED] == pytest.approx(50.0)
    back = run(policy, start, end, NodesJoined(at_s=60.0, nodes=(2,)))
    # Ten seconds of nobody, four until the node is let in.
    assert back.spent_s[Use.WAITED] == pytest.approx(14.0)
    assert back.spent_s[Use.RESTARTED] == 7.0 and back.restarts == 1
    assert run(policy, start, end).restarts == 0


@every_policy
def test_nodes_that_die_as_they_join_are_no_trouble(policy: Policy) -> None:
    outcome = run(
        policy, NodesJoined(at_s=0.0, nodes=(0,)), NodesLost(at_s=0.0, nodes=(0,)),
    )  # fmt: skip
    assert sum(outcome.spent_s.values()) == 100.0 and outcome.samples == 0.0


@every_policy
def test_on_healthy_even_nodes_all_time_is_computing_but_for_checkpoints(policy: Policy) -> None:
    outcome = run(policy, NodesJoined(at_s=0.0, nodes=(0, 1, 2, 3)))
    away_s = outcome.spent_s[Use.SAVED] + outcome.spent_s[Use.BROKEN_OFF]
    assert outcome.spent_s[Use.TRAINED] == pytest.approx(100.0 - away_s)
    assert outcome.samples == pytest.approx(outcome.spent_s[Use.TRAINED] / 2.0 * 12.0)
    assert outcome.fluid_samples == 600.0


def test_what_a_slow_node_takes_longer_holds_the_others_up() -> None:
    slow = SpeedChanged(at_s=0.0, node=1, speed=0.5)
    outcome = run(Lazarus(checkpoint_steps=None), NodesJoined(at_s=0.0, nodes=(0, 1)), slow)
    assert outcome.spent_s[Use.TRAINED] == outcome.spent_s[Use.HELD_UP] == 50.0
    assert outcome.samples / outcome.fluid_samples == pytest.approx(1.0 / 1.5)


def test_what_a_loss_and_a_newcomer_take_is_told_apart() -> None:
    costs = replace(EXACT, plan_s=0.5, plan_s_per_node=1.0, transfer_s=3.0)
    history = History(
        name="x",
        num_nodes=3,
        duration_s=100.0,
        changes=(
            NodesJoined(at_s=0.0, nodes=(0, 1, 2)),
            NodesLost(at_s=50.0, nodes=(0,)),
            NodesJoined(at_s=60.0, nodes=(0,)),
        ),
    )
    spent = simulate(history, small_job(), even_routing(2, 2), Lazarus(costs=costs)).spent_s
    # Two plans, of two nodes and of three; only who joins needs copies, and nobody misses it.
    assert [spent[use] for use in (Use.NOTICED, Use.PLANNED, Use.REGROUPED, Use.MOVED)] == [
        1.0, 5.0, 4.0, 3.0,
    ]  # fmt: skip
    assert replace(costs, plan_s=9.0).planning_s(2) == 9.0


@pytest.mark.parametrize(
    "changes",
    [
        (NodesJoined(at_s=-1.0, nodes=(0,)),),
        (NodesJoined(at_s=float("nan"), nodes=(0,)),),
        (NodesJoined(at_s=5.0, nodes=(0,)), NodesJoined(at_s=4.0, nodes=(1,))),
        (NodesJoined(at_s=101.0, nodes=(0,)),),
        (NodesJoined(at_s=0.0, nodes=()),),
        (NodesJoined(at_s=0.0, nodes=(0, 0)),),
        (NodesJoined(at_s=0.0, nodes=(4,)),),
        (NodesLost(at_s=0.0, nodes=(0,)),),
        (NodesJoined(at_s=0.0, nodes=(0,)), SpeedChanged(at_s=1.0, node=1, speed=0.5)),
        (NodesJoined(at_s=0.0, nodes=(0,)), SpeedChanged(at_s=1.0, node=0, speed=0.0)),
        (NodesJoined(at_s=0.0, nodes=(0,)), SpeedChanged(at_s=1.0, node=0, speed=float("inf"))),
    ],
)
def test_a_history_that_can_not_be_is_refused(changes: tuple[Change, ...]) -> None:
    with pytest.raises(ValueError, match=r"at -?[\d.nan]+ s|[\d.]+ s: "):
        History(name="x", num_nodes=4, duration_s=100.0, changes=changes)


@pytest.mark.parametrize("duration_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_history_lasts_some_time(duration_s: float) -> None:
    with pytest.raises(ValueError, match="lasts more than 0 s"):
        History(name="x", num_nodes=0, duration_s=duration_s, changes=())


def test_faults_at_random_times_come_as_often_and_are_mended_as_late_as_asked() -> None:
    rule = FaultRule(
        kinds=(FaultKind.STOP,),
        every_s=10.0,
        mended_after_s=20.0,
        mended_late_s=308.0,
        is_random=True,
    )
    history = drawn_history(rule, num_nodes=1000, duration_s=20_000.0, seed=1)
    count = sum(isinstance(change, NodesLost) for change in history.changes)
    assert 1850 < count < 2150
    taken = []
    begun: dict[int, float] = {}
    for change in history.changes[1:]:
        assert not isinstance(change, SpeedChanged)
        for node in change.nodes:
            if isinstance(change, NodesLost):
                begun[node] = change.at_s
            elif begun[node] < 10_000.0:
                taken.append(change.at_s - begun[node])
    taken.sort()
    assert 17.0 < taken[len(taken) // 2] < 23.0
    assert 230.0 < taken[len(taken) * 9 // 10] < 400.0
    with pytest.raises(ValueError, match="mended_late_s"):
        replace(rule, mended_late_s=20.0)


def test_a_node_that_is_mended_as_the_next_fault_happens_is_not_hit() -> None:
    rule = FaultRule(kinds=(FaultKind.STOP,), every_s=10.0, mended_after_s=10.0)
    history = drawn_history(rule, num_nodes=1, duration_s=50.0, seed=0)
    assert [change.at_s for change in history.changes] == [0.0, 10.0, 20.0, 30.0, 40.0]


@pytest.mark.parametrize("name", ["faults", "servers", "spot_nodes"])
def test_an_example_that_needs_no_data_is_a_scenario(name: str) -> None:
    known = read_scenario(EXAMPLES / f"simulate_{name}.toml")
    assert {"checkpoint", "lazarus", "pacekeeper"} <= known.policies.keys()
    first, again, other = (known.history(seed) for seed in (0, 0, 1))
    assert first == again != other


def test_a_seed_is_played_alike_whatever_else_is_played(tmp_path: Path) -> None:
    tables = small_tables()
    whole = run_scenario(read_scenario(written(tmp_path / "a.toml", tables)), seeds=3)
    tables["scenario"] = {"first_seed": 2, "seeds": 1}
    tables["policies"] = dict(reversed(tables["policies"].items()))
    alone = run_scenario(read_scenario(written(tmp_path / "b.toml", tables)))
    assert list(alone) == list(whole)[::-1]
    for name, (outcome,) in alone.items():
        assert outcome == whole[name][2] != whole[name][1]


def test_the_mean_pace_of_windows_adds_up_to_the_seconds_of_all_nodes() -> None:
    history = History(
        name="x",
        num_nodes=2,
        duration_s=100.0,
        changes=(
            NodesJoined(at_s=10.0, nodes=(0, 1)),
            SpeedChanged(at_s=30.0, node=0, speed=0.5),
            NodesLost(at_s=70.0, nodes=(0,)),
        ),
    )
    assert history.node_s() == 2 * 20.0 + 1.5 * 40.0 + 30.0
    pace = mean_pace(history, 10)
    assert pace == pytest.approx([0.0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.5, 1.0, 1.0, 1.0])
    outcome = simulate(history, small_job(), even_routing(2, 2), POLICIES[3])
    assert len(rates(outcome, 10)) == 10


@pytest.mark.parametrize(
    ("table", "key", "value", "said"),
    [
        ("failures", "every_s", 1e-300, "every_s: expected at most 100,000 faults"),
        ("failures", "num_nodes", 10**9, "on 1000000000 nodes"),
        ("failures", "slow_speed", -0.5, "slow_speed: expected"),
        ("failures", "kinds", "stop", "slow_speed: expected kinds with 'slow'"),
        ("failures", "time_unit_s", 3600.0, "time_unit_s: says nothing with source = 'drawn'"),
        ("failures", "start_s", 0.0, "start_s: says nothing with source = 'drawn'; leave it out"),
        ("failures", "mended_late_s", 5.0, "mended_late_s: expected above mended_after_s"),
        ("failures", "arrivals", "soon", "arrivals: expected one of regular, random"),
        ("failures", "file", "a\0b", "file: expected a path"),
        ("failures", "mended_after_s", -1.0, "mended_after_s: expected at least 0"),
        ("failures", "duration_s", -5.0, "duration_s: expected at least 0"),
        ("scenario", "seeds", -1, "seeds, first_seed: expected"),
        ("scenario", "first_seed", -1, "seeds, first_seed: expected"),
        ("job", "num_layers", 10**8, "layers of 4 experts"),
        ("job", "balanced_step_s", 1e-300, "[policies.old] has a checkpoint or a review every 20"),
        ("job", "expert_part", float("nan"), "expert_part: expected a finite number"),
    ],
)
def test_what_could_not_be_played_to_its_end_is_refused(
    tmp_path: Path, table: str, key: str, value: object, said: str
) -> None:
    tables = small_tables()
    tables[table][key] = value
    with pytest.raises(PacekeeperError) as refused:
        read_scenario(written(tmp_path / "x.toml", tables))
    assert said in str(refused.value) and "x.toml" in str(refused.value), refused.value
