"""What NVRx's launcher is answered and NVSentinel is told of this node."""

import json

import pytest

from pacekeeper.agent.health.external_health import (
    FINDING_LIFETIME_S,
    FITNESS_CHECK,
    PACE_CHECK,
    Action,
    RecentFindings,
    UnsentEvents,
    health_check_answer,
    health_events,
)
from pacekeeper.core.incidents.node_health import Fitness, NodeHealth


def verdict(fitness: Fitness, reason: str = "DevicesFit") -> NodeHealth:
    return NodeHealth(
        node="n0", fitness=fitness, reason=reason, words="so it is",
        since_unix_s=1.0, written_unix_s=2.0,
    )  # fmt: skip


FIT, UNFIT = verdict(Fitness.FIT), verdict(Fitness.UNFIT, "DeviceLost")
UNKNOWN = verdict(Fitness.UNKNOWN, "NoDeviceAnswers")
NAMED = {"moe": frozenset({9, 8})}


@pytest.mark.parametrize(
    ("told", "slow", "failed"),
    [
        (FIT, {}, []),
        (UNFIT, {}, ["DeviceLost"]),
        (FIT, NAMED, ["SlowRank"]),
        (UNFIT, NAMED, ["DeviceLost", "SlowRank"]),
        (UNKNOWN, {}, []),
    ],
)
def test_a_launcher_leaves_out_what_is_unfit_or_named(
    told: NodeHealth, slow: dict[str, frozenset[int]], failed: list[str]
) -> None:
    said = health_check_answer(told, slow)
    output = json.loads(said.output)
    assert (output["fail_count"], output["failed_checks"]) == (len(failed), failed)
    assert said.is_success == (not failed) and said.exit_code == int(bool(failed))
    assert bool(said.error) == bool(failed)


def test_the_answer_says_what_nobody_knows() -> None:
    assert "unknown: so it is" in json.loads(health_check_answer(UNKNOWN, {}).output)["messages"]


def test_a_finding_outlives_its_job_until_the_next_start() -> None:
    findings = RecentFindings()
    assert findings.update({"moe": frozenset({8, 9})}, 0.0) == NAMED
    assert findings.update({}, 60.0) == NAMED, "the job has ended; its launcher asks now"
    assert findings.update({"moe": frozenset()}, 70.0) == {}, "it runs again, nobody is named"
    findings.update(NAMED, 80.0)
    assert findings.update({}, 80.0 + FINDING_LIFETIME_S + 1.0) == {}, "nobody started it again"


def test_a_finding_of_a_running_job_does_not_age() -> None:
    findings = RecentFindings()
    for hour in range(5):
        assert findings.update(NAMED, hour * FINDING_LIFETIME_S) == NAMED


def test_both_checks_have_a_state_and_what_nobody_knows_has_none() -> None:
    fitness, pace = health_events(UNFIT, NAMED)
    assert (fitness.check, fitness.is_healthy, fitness.is_fatal) == (FITNESS_CHECK, False, True)
    assert (fitness.code, fitness.action) == ("DeviceLost", Action.RESET)
    assert (pace.check, pace.is_healthy, pace.is_fatal) == (PACE_CHECK, False, False)
    assert pace.entities == (("RANK", "moe/8"), ("RANK", "moe/9"))
    assert [event.is_healthy for event in health_events(FIT, {})] == [True, True]
    assert [event.check for event in health_events(UNKNOWN, {})] == [PACE_CHECK]


def test_an_event_is_told_until_it_is_taken_and_then_when_it_changes() -> None:
    news = UnsentEvents()
    waiting = news.pending(health_events(FIT, {}))
    assert len(waiting) == 2, "both, so that what was told before a restart is cleared"
    assert news.pending(health_events(FIT, {})) == waiting, "not taken yet"
    news.mark_sent(waiting)
    assert news.pending(health_events(FIT, {})) == ()
    assert [event.check for event in news.pending(health_events(UNFIT, {}))] == [FITNESS_CHECK]
    assert news.pending(health_events(UNKNOWN, {})) == (), "who knows nothing clears nothing"
