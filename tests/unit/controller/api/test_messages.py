"""What people and programs are shown: silence is not life, unknown is not zero."""

import math
from dataclasses import replace

import pytest

from pacekeeper.controller.api.messages import (
    SHOWN_NODES,
    incident_view,
    job_view,
    node_views,
    step_view,
)
from pacekeeper.controller.state.events import StepSummary
from pacekeeper.controller.state.job_parts import Coverage, LayoutState, StepProgress
from pacekeeper.controller.state.persistent_map import NodeMap, RankMap
from pacekeeper.controller.state.state import (
    JobState,
    NodeState,
    RankRecord,
    RankState,
    RankStatus,
    State,
)
from pacekeeper.core.incidents.findings import (
    Blindness,
    CoverageState,
    Decision,
    Exposure,
    Finding,
    FindingKind,
    Incident,
    MitigationLevel,
    Tier,
)
from pacekeeper.core.incidents.rank_failures import RankFailures
from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun
from pacekeeper.core.telemetry.attachment import Attachment, Clock
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.predictor.assurance.canary import Canaries, CanaryResult
from pacekeeper.predictor.assurance.sensitivity import Sensitivity
from support.job_parts import job_with, offered
from support.layouts import pipelines_of, with_shares
from support.partitioned import staged_layout

LAYOUT = Layout(
    generation=5,
    num_attention_shards=1,
    num_mlp_shards=1,
    pipelines=pipelines_of([(0, 2, ((ShardRun(0, 0, 1),), (ShardRun(1, 0, 1),)))], [0.3, 0.7]),
    experts=(
        ((ExpertReplica(0, 0.5), ExpertReplica(1, 0.5)), (ExpertReplica(1, 1.0),)),
        ((ExpertReplica(1, 1.0),), (ExpertReplica(0, 0.25), ExpertReplica(1, 0.75))),
    ),
)


def rank(number: int, node: str, status: RankStatus = RankStatus.ALIVE) -> RankState:
    attachment = Attachment(
        job="train", rank=number, world_size=4, pid=1, clock=Clock.CPU, device_uuid=f"uuid-{number}"
    )
    return RankState(attachment=attachment, node=node, status=status)


def job(**changes: object) -> JobState:
    values: dict[str, object] = {
        "ranks": {1: rank(1, "b"), 0: rank(0, "a")},
        "current": LAYOUT,
        "state": CoverageState.HEALTHY,
        "heard_s": RankMap({0: 1.0, 1: 1.0}),
        "step": 11,
    }
    return job_with("train", **{**values, **changes})


def node(name: str, *, is_connected: bool = True) -> NodeState:
    return NodeState(name=name, agent_incarnation="x", is_connected=is_connected, last_report_s=3.0)


BOTH = State(nodes=NodeMap({"a": node("a"), "b": node("b")}), unix_offset_s=1000.0)


def test_ranks_come_in_order_with_their_part_of_the_work() -> None:
    view = job_view(BOTH, job())
    assert [r.rank for r in view.ranks] == [0, 1]
    assert [r.batch_share for r in view.ranks] == [0.3, 0.7]
    assert [r.num_expert_replicas for r in view.ranks] == [2, 4]
    assert [r.device_uuid for r in view.ranks] == ["uuid-0", "uuid-1"]
    assert view.clock == "cpu"


def test_ranks_of_stages_and_tensor_groups_have_a_place_and_their_pipeline_s_rows() -> None:
    layout = staged_layout(stages=2, data=1, tensor=2, layers=3)
    ranks = {number: rank(number, "a") for number in range(4)}
    view = job_view(BOTH, job(ranks=ranks, current=layout, heard_s=RankMap()))
    assert [r.place for r in view.ranks] == [
        "pipeline 0, stage 0: layers 0-1, shards 0-3",
        "pipeline 0, stage 0: layers 0-1, shards 4-7",
        "pipeline 0, stage 1: layers 2, shards 0-3",
        "pipeline 0, stage 1: layers 2, shards 4-7",
    ]
    assert [r.batch_share for r in view.ranks] == [1.0] * 4
    assert [r.place for r in job_view(BOTH, job()).ranks] == ["", ""]


def test_what_is_not_measured_is_unset_and_not_zero() -> None:
    view = job_view(BOTH, job())
    for name in ("slowdown", "observed_s", "expected_s"):
        assert not view.ranks[0].HasField(name)
    assert not view.HasField("loss")


@pytest.mark.parametrize(
    ("status", "connected", "silent", "shown"),
    [
        (RankStatus.ALIVE, True, (), "alive"),
        (RankStatus.ALIVE, False, (), "silent"),
        (RankStatus.ALIVE, True, (0,), "silent"),
        (RankStatus.ALIVE, True, (1,), "alive"),
        (RankStatus.DEAD, True, (), "dead"),
        (RankStatus.DEAD, False, (0,), "dead"),
        (RankStatus.FINISHED, False, (), "finished"),
    ],
)
def test_a_rank_is_alive_only_where_it_is_heard(
    status: RankStatus, connected: bool, silent: tuple[int, ...], shown: str
) -> None:
    state = State(nodes=NodeMap({"a": node("a", is_connected=connected), "b": node("b")}))
    view = job_view(state, job(ranks={0: rank(0, "a", status)}, silent=silent))
    assert view.ranks[0].state == shown


def test_a_rank_that_has_never_said_anything_is_silent() -> None:
    view = job_view(BOTH, job(heard_s=RankMap({1: 1.0})))
    assert [r.state for r in view.ranks] == ["silent", "alive"]


def test_the_watch_comes_with_its_reason_and_with_what_would_be_seen() -> None:
    warming_up = Coverage(state=CoverageState.MEASURING, reason="warm-up: 3 of 12 steps")
    measuring = job_view(BOTH, replace(job(), coverage=warming_up))
    assert (measuring.watch, measuring.watch_reason) == ("measuring", "warm-up: 3 of 12 steps")
    assert not measuring.HasField("detectable_slowdown")
    healthy = job_view(BOTH, job(sensitivity=Sensitivity(slowdown=1.25, steps=10), blind=None))
    assert (healthy.detectable_slowdown, healthy.detectable_steps) == (1.25, 10)
    assert healthy.blind_cause == ""
    assert not healthy.HasField("canary")
    outcome = CanaryResult(rank=3, slowdown=1.25, is_found=True, num_steps=2, step=70)
    proved = job_view(BOTH, job(canaries=Canaries(last=outcome)))
    assert (proved.canary.rank, proved.canary.num_steps, proved.canary.is_found) == (3, 2, True)
    blind = job_view(BOTH, job(state=CoverageState.BLIND, blind=Blindness.NOISE))
    assert (blind.watch, blind.blind_cause) == ("blind", "noise")


def test_an_agent_that_is_away_silences_its_own_ranks_only() -> None:
    state = State(nodes=NodeMap({"a": node("a", is_connected=False), "b": node("b")}))
    assert [r.state for r in job_view(state, job()).ranks] == ["silent", "alive"]


def test_generations_tell_whether_a_plan_is_under_way() -> None:
    still = job_view(BOTH, job())
    assert (still.generation, still.desired_generation) == (5, 5)
    desired = with_shares(replace(LAYOUT, generation=6), 0.5, 0.5)
    moving = job_view(BOTH, job(pending=offered(desired)))
    assert (moving.generation, moving.desired_generation) == (5, 6)


def test_a_job_that_only_the_store_knows_is_shown() -> None:
    remembered = {
        0: RankRecord(rank=0, pid=1, status=RankStatus.ALIVE),
        7: RankRecord(rank=7, pid=2, status=RankStatus.DEAD),
    }
    view = job_view(
        State(),
        JobState(
            name="old",
            remembered=remembered,
            layouts=LayoutState(current=LAYOUT),
            progress=StepProgress(step=7),
        ),
    )
    assert (view.name, view.watch, view.generation, view.step) == ("old", "blind", 5, 7)
    assert [(r.rank, r.state, r.batch_share) for r in view.ranks] == [
        (0, "silent", 0.3),
        (1, "unknown", 0.7),
        (7, "dead", 0.0),
    ]


def test_a_job_before_its_first_step_has_no_negative_step() -> None:
    assert job_view(State(), JobState(name="new")).step == 0


def test_the_newest_decision_is_given_in_words() -> None:
    decision = Decision(level=MitigationLevel.NOTHING, layout=None, reason="no gain")
    assert job_view(BOTH, job(last_decision=decision)).last_decision == "no gain"


def test_who_asks_is_told_what_stands_exposed_though_it_is_no_news() -> None:
    alone = Exposure(num_nodes=1, min_nodes=2)
    decision = Decision(level=MitigationLevel.NOTHING, layout=None, reason="why", exposure=alone)
    for one in (decision, replace(decision, reason=decision.text, is_exposure_in_reason=True)):
        assert job_view(BOTH, job(last_decision=one)).last_decision == f"why{alone.text}"


def test_a_node_lists_the_jobs_that_live_on_it() -> None:
    gone = replace(job(ranks={0: rank(0, "a", RankStatus.FINISHED)}), name="gone")
    state = State(nodes=BOTH.nodes, jobs={"train": job(), "gone": gone}, unix_offset_s=1000.0)
    (view,) = node_views(state, [state.nodes["a"]])
    assert list(view.jobs) == ["train"]
    assert view.last_report_unix_s == 1003.0


def test_a_node_says_what_its_agent_could_not_see() -> None:
    health = AgentHealth(
        nvml="no NVML library",
        records_lost=1,
        records_corrupt=2,
        batches_dropped=3,
        unreadable=("x: torn",),
    )
    (view,) = node_views(State(), [NodeState(name="a", agent_incarnation="x", health=health)])
    assert (view.nvml, list(view.unreadable)) == ("no NVML library", ["x: torn"])
    assert (view.records_lost, view.records_corrupt, view.batches_dropped) == (1, 2, 3)


def incident(number: int, *, closed_step: int | None = None) -> Incident:
    finding = Finding(
        kind=FindingKind.DEVICE,
        tier=Tier.PROBABLE,
        rank=1,
        slowdown=1.6,
        onset_step=3,
        step=5,
        reason="slow",
    )
    return Incident(
        incident_id=number,
        job="train",
        finding=finding,
        opened_unix_s=5.0,
        closed_unix_s=None if closed_step is None else 9.0,
        closed_step=closed_step,
        actions=("moved",),
    )


def test_an_incident_is_shown_with_its_node_where_that_is_known() -> None:
    known = incident_view(State(jobs={"train": job()}), incident(4))
    assert (known.incident_id, known.node, known.kind, known.tier) == (4, "b", "device", "probable")
    assert not known.HasField("closed_unix_s") and not known.HasField("closed_step")
    assert incident_view(State(), incident(4)).node == ""


def test_deaths_are_shown_as_runs_with_the_first_few_nodes() -> None:
    died = RankFailures(
        ranks=((0, 4095), (4097, 8191)), reason="r", step=0, unix_s=7.0, closed_unix_s=9.0,
        closed_step=-1,
    )  # fmt: skip
    finding = replace(incident(4).finding, kind=FindingKind.DEATH)
    nodes = tuple(f"n{i:04d}" for i in range(1024))
    one = replace(incident(4), finding=finding, rank_failures=(died,), nodes=nodes)
    view = incident_view(State(), one)
    (shown,) = view.deaths
    assert [(run.first, run.last) for run in shown.ranks] == [(0, 4095), (4097, 8191)]
    assert (shown.reason, shown.step, shown.unix_s) == ("r", 0, 7.0)
    assert (shown.closed_unix_s, shown.closed_step) == (9.0, 0)
    assert (list(view.nodes), view.num_nodes) == (list(nodes[:SHOWN_NODES]), 1024)
    assert len(view.SerializeToString()) < 500


def test_a_death_that_only_its_finding_tells_is_shown_as_the_others() -> None:
    finding = replace(incident(4).finding, kind=FindingKind.DEATH, reason="rank 1 is dead: why")
    (shown,) = incident_view(State(), replace(incident(4), finding=finding)).deaths
    assert (shown.ranks[0].first, shown.ranks[0].last, shown.reason) == (1, 1, "why")
    assert not shown.HasField("closed_unix_s")


def test_a_closed_incident_says_when() -> None:
    view = incident_view(State(), incident(4, closed_step=8))
    assert (view.closed_unix_s, view.closed_step, list(view.actions)) == (9.0, 8, ["moved"])


def test_an_incident_closed_before_the_first_step_is_shown_at_step_0() -> None:
    assert incident_view(State(), incident(4, closed_step=-1)).closed_step == 0


def test_a_step_while_measuring_has_unknown_columns_of_full_length() -> None:
    summary = StepSummary(
        job="train",
        step=3,
        generation=1,
        tokens=100,
        duration_s=0.5,
        loss=None,
        ranks=(0, 1),
        observed_s=(0.1, 0.2),
        expected_s=(),
        slowdown=(),
        watch="measuring",
    )
    view = step_view(summary)
    assert list(view.observed_s) == [0.1, 0.2]
    assert all(math.isnan(x) for x in (*view.expected_s, *view.slowdown))
    assert len(view.expected_s) == len(view.slowdown) == len(view.ranks) == 2
    assert not view.HasField("loss")
