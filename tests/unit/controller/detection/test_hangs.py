"""Who hangs: the rank that stands still while others wait, not those that wait for it."""

from dataclasses import replace

import pytest

from pacekeeper.controller.detection.hangs import (
    ALL_COMPUTE_S,
    ALL_S,
    ASK_AGAIN_S,
    LIMIT_S,
    MOST_ASKED,
    find_hangs,
)
from pacekeeper.controller.state.events import RequestStacks, SaveStack
from pacekeeper.controller.state.job_parts import StandingRank
from pacekeeper.core.incidents.findings import FindingKind, Incident, Tier
from pacekeeper.core.telemetry.node_report import JobReport
from pacekeeper.core.telemetry.sign_of_life import Phase, RankPhase, RankStack
from support.machine_driver import JOB, Driver, exited, started, step, train

NOW_S = 1000.0
P = Phase


def rank(
    phase: Phase, held_s: float, usual_s: float | None = 0.1, state: str = "S", cpu: float = 0.0
) -> StandingRank:
    return StandingRank(
        phase=phase,
        since_s=NOW_S - held_s,
        stopped_s=NOW_S - held_s if state in ("T", "t") else None,
        usual_s=usual_s,
        process_state=state,
        cpu_ratio=cpu,
    )


WAITS = replace(rank(P.WAITING, 3.0), reported_s=NOW_S)
CASES: dict[str, tuple[dict[int, StandingRank], list[tuple[int | None, tuple[int, ...]]]]] = {
    "computes while others wait": ({0: WAITS, 1: rank(P.COMPUTING, 2.1), 2: WAITS}, [(1, (1,))]),
    "between steps while one waits": ({0: WAITS, 1: rank(P.OUTSIDE, 2.1)}, [(1, (1,))]),
    "not yet for so long": ({0: WAITS, 1: rank(P.COMPUTING, 1.7)}, []),
    "twice its usual time": ({0: WAITS, 1: rank(P.COMPUTING, 7.3, 4.0)}, [(1, (1,))]),
    "less than twice": ({0: WAITS, 1: rank(P.COMPUTING, 7.1, 4.0)}, []),
    "in its first steps": ({0: WAITS, 1: rank(P.COMPUTING, 90.0, None)}, []),
    "nobody waits": ({1: rank(P.COMPUTING, 50.0)}, []),
    "an evaluation of all": ({n: rank(P.EVALUATING, 500.0) for n in range(4)}, []),
    "a save of all": ({n: rank(P.SAVING, 500.0) for n in range(4)}, []),
    "all between steps": ({n: rank(P.OUTSIDE, 500.0) for n in range(4)}, []),
    "stopped": ({0: WAITS, 3: rank(P.COMPUTING, 2.1, 9.0, "T")}, [(3, (3,))]),
    "stopped while it waited": ({0: WAITS, 3: rank(P.WAITING, 2.1, 9.0, "T")}, [(3, (3,))]),
    "stopped, and another seems to compute": (
        {0: rank(P.COMPUTING, 9.0), 1: WAITS, 3: rank(P.COMPUTING, 2.1, 9.0, "T")},
        [(3, (3,))],
    ),
    "stopped, and seen to wait only before": (
        {0: rank(P.WAITING, 3.0), 3: rank(P.COMPUTING, 2.1, 9.0, "T")},
        [],
    ),
    "a paused job": ({n: rank(P.COMPUTING, 99.0, state="T") for n in range(4)}, []),
    "two of four": (
        {0: WAITS, 1: rank(P.SAVING, 3.0), 2: rank(P.SAVING, 3.0), 3: WAITS},
        [(1, (1,)), (2, (2,))],
    ),
    "three of four": (
        {0: WAITS, **{n: rank(P.STEPPING, 3.0) for n in (1, 2, 3)}},
        [(None, (1, 2, 3))],
    ),
    "two load": ({0: WAITS, 1: rank(P.LOADING, 3.0), 2: rank(P.LOADING, 3.0)}, [(None, (1, 2))]),
    "all load": ({n: rank(P.LOADING, ALL_S + 1) for n in range(4)}, [(None, (0, 1, 2, 3))]),
    "all load, not long": ({n: rank(P.LOADING, ALL_S - 1) for n in range(4)}, []),
    "all wait": ({n: rank(P.WAITING, ALL_S + 1) for n in range(4)}, [(None, (0, 1, 2, 3))]),
    "all but one wait": ({n: rank(P.WAITING, 99.0) for n in range(3)}, []),
    "all seem to compute": (
        {n: rank(P.COMPUTING if n else P.STEPPING, ALL_COMPUTE_S + 1) for n in range(4)},
        [(None, (0, 1, 2, 3))],
    ),
    "all seem to compute, not long": (
        {n: rank(P.COMPUTING, ALL_COMPUTE_S - 1) for n in range(4)},
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_hangs(name: str) -> None:
    standing, expected = CASES[name]
    found = find_hangs(standing, range(4), NOW_S)
    assert [(hang.rank, hang.ranks) for hang in found] == expected


@pytest.mark.parametrize(
    ("state", "cpu", "tier"),
    [
        ("T", 0.0, Tier.CONFIRMED),
        ("t", 0.0, Tier.CONFIRMED),
        ("D", 0.0, Tier.PROBABLE),
        ("S", 0.0, Tier.PROBABLE),
        ("R", 1.0, Tier.SUSPECTED),
        ("R", 0.0, Tier.PROBABLE),
        ("", 0.0, Tier.SUSPECTED),
    ],
)
def test_the_state_of_the_process_says_how_sure_it_is(state: str, cpu: float, tier: Tier) -> None:
    (hang,) = find_hangs({0: WAITS, 1: rank(P.COMPUTING, 3.0, 0.1, state, cpu)}, range(2), NOW_S)
    assert hang.tier is tier


@pytest.mark.parametrize(("state", "cause"), [("R", "waits for a CPU core"), ("S", "sleeps")])
def test_a_process_without_cpu_time_sleeps_or_waits_for_a_core(state: str, cause: str) -> None:
    (hang,) = find_hangs({0: WAITS, 1: rank(P.COMPUTING, 3.0, 0.1, state, 0.0)}, range(2), NOW_S)
    assert cause in hang.cause


def test_ranks_that_are_dead_are_neither_culprits_nor_missing() -> None:
    standing = {0: WAITS, 1: rank(P.COMPUTING, 3.0), 2: rank(P.LOADING, 3.0)}
    assert [hang.rank for hang in find_hangs(standing, (0, 2), NOW_S)] == [2]


# -- the incident


def tell(driver: Driver, *phases: RankPhase, stacks: tuple[RankStack, ...] = ()) -> None:
    by_node = {"node-0": (0, 1), "node-1": (2, 3)}
    for node, ranks in by_node.items():
        part = JobReport(
            job=JOB,
            phases=tuple(one for one in phases if one.rank in ranks),
            stacks=tuple(one for one in stacks if one.rank in ranks),
        )
        driver.take(part, node=node)


def standing(number: int, phase: Phase, held_s: float) -> RankPhase:
    return RankPhase(rank=number, phase=phase, held_s=held_s, usual_s=0.1)


def hung() -> Driver:
    """Rank 2 has stood still for two seconds while the others wait."""
    driver = started()
    train(driver, 0, 6)
    tell(driver, *(standing(n, P.WAITING, 1.9) for n in (0, 1, 3)), standing(2, P.COMPUTING, 1.9))
    driver.tick()
    return driver


def hangs(driver: Driver) -> list[Incident]:
    return [one for one in driver.job.incidents if one.finding.kind is FindingKind.HANG]


def test_a_hang_is_an_incident_with_the_stacks_of_its_process() -> None:
    driver = hung()
    (incident,) = hangs(driver)
    finding = incident.finding
    assert (finding.rank, finding.onset_step, finding.step) == (2, 6, 6)
    (asked,) = driver.all_said(RequestStacks)
    assert (asked.nodes, asked.ranks) == (("node-1",), (2,))
    driver.tick()
    assert not driver.all_said(RequestStacks) and len(hangs(driver)) == 1
    stack = RankStack(rank=2, source="py-spy", text="Thread 1")
    tell(driver, stacks=(stack,))
    assert driver.all_said(SaveStack) == [SaveStack(incident_id=incident.incident_id, stack=stack)]
    assert hangs(driver)[0].actions == ("stack dump of rank 2 by py-spy",)
    driver.tick(ASK_AGAIN_S + 1)
    assert not driver.all_said(RequestStacks), "it has come"


def test_a_dump_is_asked_for_a_few_times_and_one_that_nobody_asked_for_is_dropped() -> None:
    driver = hung()
    asked = [1]
    for _ in range(5):
        driver.tick(ASK_AGAIN_S + 1)
        asked.append(len(driver.all_said(RequestStacks)))
    assert sum(asked) == MOST_ASKED
    tell(driver, stacks=(RankStack(rank=1, source="py-spy", text="x"),))
    assert not driver.all_said(SaveStack)


def test_a_rank_that_moves_again_closes_it() -> None:
    driver = hung()
    tell(driver, RankPhase(rank=2, phase=P.WAITING, held_s=0.1, is_standing=False))
    (incident,) = hangs(driver)
    assert not incident.is_open and incident.actions == ("rank 2 moves again",)
    driver.tick()
    assert len(hangs(driver)) == 1


def test_the_step_that_hung_closes_it_also_after_a_restart_of_the_controller() -> None:
    driver = hung()
    driver.tick(1.0)
    assert hangs(driver)[0].is_open
    driver.report(*step(6))
    driver.tick()
    assert not hangs(driver)[0].is_open


def test_a_rank_that_dies_closes_it() -> None:
    driver = hung()
    driver.report(exited(2), node="node-1")
    assert not hangs(driver)[0].is_open


def test_ranks_whose_agent_is_away_are_not_judged() -> None:
    driver = started()
    train(driver, 0, 6)
    tell(driver, standing(0, P.WAITING, 1.9), standing(2, P.COMPUTING, LIMIT_S))
    known = driver.state.nodes["node-1"]
    driver.state = replace(
        driver.state, nodes={**driver.state.nodes, "node-1": replace(known, is_connected=False)}
    )
    driver.tick()
    assert not hangs(driver)
