"""What Prometheus is told: each incident once, no series per rank, nothing stale."""

import urllib.request
from dataclasses import replace

import pytest

from pacekeeper.controller.observability.metrics import ControllerMetrics
from pacekeeper.controller.observability.state_metrics import (
    SHOWN_INCIDENTS,
    SHOWN_RANKS,
    slowest_ranks,
)
from pacekeeper.controller.state.job_parts import (
    Coverage,
    DetectionState,
    LayoutState,
    PlanState,
    StepProgress,
)
from pacekeeper.controller.state.persistent_map import NodeMap
from pacekeeper.controller.state.rank_timings import RankTiming, RankTimings
from pacekeeper.controller.state.state import (
    JobState,
    NodeState,
    RankState,
    RankStatus,
    State,
)
from pacekeeper.core.errors import HostError
from pacekeeper.core.incidents.findings import (
    Blindness,
    CoverageState,
    Decision,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.predictor.assurance.sensitivity import Sensitivity
from support.controllers import first_layout
from support.job_parts import offered
from support.scrapes import samples, value


def incident(number: int, kind: FindingKind = FindingKind.DEVICE) -> Incident:
    finding = Finding(
        kind=kind, tier=Tier.PROBABLE, rank=0, slowdown=1.6, onset_step=1, step=2, reason="slow"
    )
    return Incident(incident_id=number, job="train", finding=finding, opened_unix_s=0.0)


def job_of(slowdowns: list[float | None]) -> JobState:
    """One whose ranks were measured like this."""
    paces = {number: RankTiming(slowdown=slowdown) for number, slowdown in enumerate(slowdowns)}
    return JobState(
        name="train",
        ranks={
            number: RankState(
                attachment=Attachment(job="train", rank=number, world_size=100, pid=1), node="a"
            )
            for number in paces
        },
        detection=DetectionState(measured=RankTimings(others=paces)),
    )


def test_a_state_becomes_gauges() -> None:
    nodes = {
        "a": NodeState(name="a", agent_incarnation="x"),
        "b": NodeState(name="b", agent_incarnation="y", is_connected=False),
    }
    job = JobState(
        name="train",
        incidents=(incident(1), replace(incident(2), closed_unix_s=1.0)),
        progress=StepProgress(step=9, tokens_per_s=5000.0),
        layouts=LayoutState(current=first_layout()),
        coverage=Coverage(state=CoverageState.DEGRADED),
    )
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job}, nodes=NodeMap(nodes)))
    assert value(metrics, "jobs") == 1
    assert value(metrics, "nodes_connected") == 1
    assert value(metrics, "incidents_open", kind="device") == 1
    assert value(metrics, "incidents_open", kind="death") == 0
    assert value(metrics, "job_step", job_name="train") == 9
    assert value(metrics, "job_tokens_per_second", job_name="train") == 5000.0
    assert value(metrics, "job_generation", job_name="train") == 1
    assert value(metrics, "job_info", job_name="train", watch="degraded") == 1
    metrics.update(
        State(
            jobs={
                "train": replace(job, coverage=replace(job.coverage, state=CoverageState.HEALTHY))
            }
        )
    )
    assert value(metrics, "job_info", job_name="train", watch="degraded") is None
    assert value(metrics, "job_info", job_name="train", watch="healthy") == 1


def test_a_watch_tells_what_it_could_see_and_why_it_could_not() -> None:
    metrics = ControllerMetrics()
    job = JobState(
        name="train",
        coverage=Coverage(blind=Blindness.NOISE, sensitivity=Sensitivity(slowdown=2.5, steps=10)),
    )
    metrics.update(State(jobs={"train": job}))
    assert value(metrics, "job_blind", job_name="train", cause="noise") == 1
    assert value(metrics, "job_detectable_slowdown_ratio", job_name="train") == 2.5
    assert value(metrics, "job_detectable_steps", job_name="train") == 10
    metrics.update(
        State(
            jobs={
                "train": replace(job, coverage=replace(job.coverage, blind=None, sensitivity=None))
            }
        )
    )
    assert value(metrics, "job_blind", job_name="train", cause="noise") is None
    assert value(metrics, "job_detectable_slowdown_ratio", job_name="train") is None


def test_an_incident_counts_once_however_often_it_is_saved() -> None:
    metrics = ControllerMetrics()
    metrics.begin_after(4)
    metrics.count_incident(incident(4))  # of an earlier life, re-measured
    for again in (incident(5), incident(5), replace(incident(5), closed_unix_s=1.0)):
        metrics.count_incident(again)
    metrics.count_incident(incident(6, FindingKind.DEATH))
    assert value(metrics, "incidents_total", kind="device") == 1
    assert value(metrics, "incidents_total", kind="death") == 1


def test_only_the_slowest_few_ranks_are_shown_slowest_first() -> None:
    slowdowns: list[float | None] = [1.0 + number / 64 for number in range(50)]
    shown = slowest_ranks(job_of(slowdowns))
    assert shown == [(number, slowdowns[number]) for number in range(49, 49 - SHOWN_RANKS, -1)]


def test_ranks_that_are_well_unknown_or_dead_are_not_shown() -> None:
    job = job_of([None, 1.0, 1.04, 1.3, 9.0])
    ranks = {**job.ranks, 4: replace(job.ranks[4], status=RankStatus.DEAD)}
    assert slowest_ranks(replace(job, ranks=ranks)) == [(3, 1.3)]


def test_a_rank_that_recovered_leaves_no_series_behind() -> None:
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job_of([1.5])}))
    assert value(metrics, "rank_slowdown_ratio", job_name="train", rank="0") == 1.5
    metrics.update(State(jobs={"train": job_of([1.0])}))
    assert value(metrics, "rank_slowdown_ratio", job_name="train", rank="0") is None


def test_it_answers_http_and_says_when_it_can_not() -> None:
    metrics = ControllerMetrics()
    server = metrics.serve("127.0.0.1", 0)
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert b"pacekeeper_jobs 0.0" in answer.read()
        with pytest.raises(HostError, match=f"{server.server_port}.*--metrics-listen"):
            metrics.serve("127.0.0.1", server.server_port)
    finally:
        server.close()


def test_a_store_that_refuses_is_said_with_its_reason_until_it_takes_writes_again() -> None:
    metrics = ControllerMetrics()

    def refusing() -> list[dict[str, str]]:
        return [labels for name, labels, _ in samples(metrics) if name.endswith("store_refusing")]

    assert refusing() == []
    metrics.set_store_refusing("database or disk is full")
    assert refusing() == [{"reason": "database or disk is full"}]
    metrics.set_store_refusing("disk I/O error")
    assert refusing() == [{"reason": "disk I/O error"}]
    metrics.set_store_refusing("")
    assert refusing() == []


def test_a_forgotten_job_leaves_no_series_behind() -> None:
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"gone": JobState(name="gone")}))
    assert any("gone" in labels.values() for _, labels, _ in samples(metrics))
    metrics.update(State())
    assert not any("gone" in labels.values() for _, labels, _ in samples(metrics))


def test_an_open_incident_says_where_it_is_and_goes_when_it_is_over() -> None:
    job = job_of([1.6, 1.0])
    uuid = replace(job.ranks[0].attachment, device_uuid="GPU-0")
    ranks = {**job.ranks, 0: replace(job.ranks[0], attachment=uuid)}
    job = replace(job, ranks=ranks, incidents=(incident(4),))
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job}))
    where = {"job_name": "train", "incident": "4", "kind": "device"}
    where |= {"rank": "0", "node": "a", "UUID": "GPU-0"}
    assert value(metrics, "incident_slowdown_ratio", **where) == 1.6
    assert value(metrics, "incident_opened_timestamp_seconds", **where) == 0.0
    over = replace(job, incidents=(replace(incident(4), closed_unix_s=1.0),))
    metrics.update(State(jobs={"train": over}))
    assert value(metrics, "incident_slowdown_ratio", **where) is None


def test_a_death_has_no_slowdown_and_nobodys_incident_no_place() -> None:
    death = replace(incident(1).finding, kind=FindingKind.DEATH, slowdown=float("inf"))
    nobodys = replace(incident(2).finding, kind=FindingKind.HOST, rank=None)
    found = (replace(incident(1), finding=death), replace(incident(2), finding=nobodys))
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": JobState(name="train", incidents=found)}))
    told = [(n, x["kind"], x["rank"], x["node"]) for n, x, _ in samples(metrics) if "incident" in x]
    assert told == [
        ("pacekeeper_incident_slowdown_ratio", "host", "", ""),
        ("pacekeeper_incident_opened_timestamp_seconds", "death", "0", ""),
        ("pacekeeper_incident_opened_timestamp_seconds", "host", "", ""),
        ("pacekeeper_incident_dead_ranks", "death", "0", ""),
    ]


def test_deaths_are_counted_until_the_job_goes_on_without_them() -> None:
    finding = replace(incident(1).finding, kind=FindingKind.DEATH, slowdown=float("inf"))
    first = RankFailures(ranks=((0, 0),), reason="r", step=1, unix_s=1.0)
    died = (first, replace(first, ranks=((1, 7),)))
    one = replace(incident(1), finding=finding, rank_failures=died)
    metrics = ControllerMetrics()
    job = replace(job_of([1.0] * 8), incidents=(one,))
    where = {"job_name": "train", "incident": "1", "kind": "death", "node": "a", "UUID": ""}
    metrics.update(State(jobs={"train": job}))
    assert value(metrics, "incident_dead_ranks", rank="0", **where) == 8
    gone = replace(one, rank_failures=(replace(first, closed_unix_s=2.0), died[1]))
    metrics.update(State(jobs={"train": replace(job, incidents=(gone,))}))
    assert value(metrics, "incident_dead_ranks", rank="0", **where) == 7


def test_only_the_newest_of_very_many_incidents_are_told() -> None:
    job = JobState(name="train", incidents=tuple(incident(n) for n in range(1, 100)))
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job}))
    numbers = {int(x["incident"]) for _, x, _ in samples(metrics) if "incident" in x}
    assert numbers == set(range(100 - SHOWN_INCIDENTS, 100))
    assert value(metrics, "incidents_open", kind="device") == 99


def test_a_node_is_away_where_living_ranks_have_no_agent() -> None:
    gone = {n: NodeState(name=n, agent_incarnation="x", is_connected=False) for n in ("a", "idle")}
    job = job_of([None])
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job}, nodes=gone))
    assert [x for n, x, _ in samples(metrics) if n.endswith("node_disconnected")] == [{"node": "a"}]
    dead = {0: replace(job.ranks[0], status=RankStatus.DEAD)}
    metrics.update(State(jobs={"train": replace(job, ranks=dead)}, nodes=gone))
    assert value(metrics, "node_disconnected", node="a") is None
    assert value(metrics, "job_ranks", job_name="train", state="dead") == 1


def test_a_plan_that_is_offered_says_since_when_in_unix_time() -> None:
    job = JobState(name="train", plan=PlanState(pending=offered(first_layout(), offered_s=5.0)))
    metrics = ControllerMetrics()
    metrics.update(State(jobs={"train": job}, unix_offset_s=1000.0))
    since = "job_plan_offered_timestamp_seconds"
    assert value(metrics, since, job_name="train") == 1005.0
    metrics.update(State(jobs={"train": replace(job, plan=replace(job.plan, pending=None))}))
    assert value(metrics, since, job_name="train") is None


def test_plans_are_counted_from_zero_by_their_rung_and_refused_ones_apart() -> None:
    metrics = ControllerMetrics()
    assert value(metrics, "plans_total", level="move_replicas") == 0
    plan = Decision(level=MitigationLevel.MOVE_REPLICAS, layout=first_layout(), reason="")
    metrics.count_decision(plan)
    metrics.count_decision(Decision(level=MitigationLevel.NOTHING, layout=None, reason="refused"))
    assert value(metrics, "plans_total", level="move_replicas") == 1
    assert value(metrics, "plans_refused_total") == 1


def test_who_does_not_lead_tells_that_and_nothing_of_jobs() -> None:
    metrics = ControllerMetrics()
    metrics.set_leading(True)
    metrics.update(State(jobs={"train": JobState(name="train")}))
    assert (value(metrics, "leader"), value(metrics, "jobs")) == (1, 1)
    metrics.set_leading(False)
    assert (value(metrics, "leader"), value(metrics, "jobs")) == (0, 0)
    assert value(metrics, "leader_transitions_total") == 2


def test_counts_go_on_with_the_next_term_of_this_controller() -> None:
    metrics = ControllerMetrics()
    metrics.set_sequences(missed=5, repeated=2)
    metrics.begin_after(7)
    metrics.set_sequences(missed=1, repeated=0)
    assert value(metrics, "reports_missed_total") == 6
    metrics.age_s = lambda: 12.5
    assert value(metrics, "reads_age_seconds") == 12.5
