"""Ranks on nodes that were slow again and again are no expert's only hosts, where others can be."""

from dataclasses import replace

import pytest

from pacekeeper.controller.planning.token_split.proportional import split_layers
from pacekeeper.controller.policy import candidates
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.failure_domains import SpreadFloor
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.policy.replica_candidates import (
    DOUBTED_TIMES,
    ReplicaPlan,
    ReplicaRequest,
    plan_replicas,
)
from pacekeeper.controller.state.device_history import DAY_S, Strike, Strikes, add_strike
from pacekeeper.controller.state.events import RequestDecision
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import ExpertReplica
from support.machine_driver import UNIX_OFFSET_S, WARM, started, train

NODES = {rank: f"node-{rank}" for rank in range(4)}
PAIRS = ((0, 1), (0, 1), (2, 3), (2, 3))  # hosts of each expert


def planned(doubted: set[int]) -> ReplicaPlan | None:
    """For even loads and speeds: only what may be lost speaks for a move."""
    hosts = tuple(tuple(ExpertReplica(rank=rank, share=0.5) for rank in pair) for pair in PAIRS)
    layout = even_layout(ranks=range(4), num_layers=1, num_experts=4, replicas=2, domain_of=NODES)
    layout = replace(layout, experts=(hosts,))
    loads, speeds = ((100.0,) * 4,), dict.fromkeys(range(4), 1.0)
    return plan_replicas(
        layout,
        split_layers(layout, loads=loads, speeds=speeds),
        loads,
        speeds,
        ReplicaRequest(
            slots_per_rank=2,
            min_hosts=2,
            spread=SpreadFloor(domain_of=NODES, least=2),
            row_s=1e-6,
            replica_s=0.0,
            num_steps=100,
            move_s=0.1,
            restart_s=600.0,
            failure_probability=0.01,
            doubted=frozenset(doubted),
        ),
    )


def test_experts_of_two_doubted_ranks_get_company() -> None:
    plan = planned(doubted={0, 1})
    assert plan is not None
    for hosts in plan.experts[0]:
        assert {host.rank for host in hosts} - {0, 1}, "somebody who is not doubted"
    assert plan.loss < plan.loss_now


def test_where_nobody_is_doubted_nothing_moves() -> None:
    assert planned(doubted=set()) is None


def test_a_doubted_rank_is_ten_times_as_likely_to_fail_and_never_more_than_sure() -> None:
    request = ReplicaRequest(
        slots_per_rank=2,
        min_hosts=2,
        spread=SpreadFloor(),
        row_s=0.0,
        replica_s=0.0,
        num_steps=1,
        move_s=0.0,
        restart_s=1.0,
        failure_probability=0.03,
        doubted=frozenset({2}),
    )
    assert request.failure_of(1) == 0.03
    assert request.failure_of(2) == 0.03 * DOUBTED_TIMES
    assert replace(request, failure_probability=0.3).failure_of(2) == 1.0


def test_a_decision_knows_the_ranks_of_lemons() -> None:
    driver = started()
    unix_s = driver.now_s + UNIX_OFFSET_S
    strikes: Strikes = {}
    for number in range(3):
        strikes = add_strike(
            strikes,
            Strike(
                incident_id=number,
                node="node-1",
                device_uuid=f"GPU-{number}",
                job=f"earlier-{number}",
                kind=FindingKind.DEVICE,
                slowdown=1.5,
                unix_s=unix_s - DAY_S * number,
            ),
        )
    driver.state = replace(driver.state, strikes=strikes)
    driver.is_deciding = False
    asked: list[RequestDecision] = []
    for number in range(WARM):
        train(driver, number, number + 1)
        asked += driver.all_said(RequestDecision)
    assert asked and all(one.view.doubted == {2, 3} for one in asked)
    assert snapshot_of(driver.job, driver.now_s, driver.state.nodes).doubted == frozenset()


def test_what_a_decision_knows_of_them_reaches_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = started()
    train(driver, 0, WARM)
    config = driver.config.policy
    known = replace(
        snapshot_of(driver.job, driver.now_s, driver.state.nodes),
        doubted=frozenset({1}),
        slow={2: 2.0},
    )
    seen: list[ReplicaRequest] = []
    monkeypatch.setattr(candidates, "plan_replicas", lambda *given: seen.append(given[-1]))
    decide(known, config)
    assert [request.doubted for request in seen] == [{1}]
