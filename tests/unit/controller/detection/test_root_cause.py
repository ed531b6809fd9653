"""Which samples of which node speak for a finding, and when it is looked for its cause again."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pacekeeper.controller.detection import root_cause
from pacekeeper.controller.detection.root_cause import (
    KEPT_SAMPLES,
    SEARCH_S,
    SPACING_S,
    append_sample,
    store_samples,
)
from pacekeeper.controller.state.events import SaveIncident
from pacekeeper.controller.state.job_parts import StepDraft
from pacekeeper.controller.state.persistent_map import NodeMap
from pacekeeper.controller.state.state import JobState, NodeState, RankState, RankStatus, State
from pacekeeper.core.incidents.findings import Finding, FindingKind, Incident, Tier
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.core.telemetry.samples import DeviceSample
from pacekeeper.predictor.causes.evidence import PEERS
from pacekeeper.predictor.detector.state import restore
from support.job_parts import job_with
from support.machine_driver import FIRST, QUICK, WARM, Driver, applied, attachment, step
from support.symptoms import DEVICE, HOST

SLOW = 2  # sits on node-1 with rank 3
AHEAD_S = {"node-0": 0.0, "node-1": 50_000.0}  # clocks of nodes have nothing in common
NODE_OF = {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}
HOT = {"clock_event_reasons": 0x40, "sm_clock_mhz": 1200.0}


def at(sampled_s: float, **changed: Any) -> DeviceSample:
    return replace(DEVICE, sampled_s=sampled_s, **changed)


class TestWindows:
    def test_it_spans_a_minute_and_always_holds_the_newest(self) -> None:
        window: tuple[DeviceSample, ...] = ()
        for second in range(200):
            window = append_sample(window, at(float(second)))
            assert window[-1].sampled_s == second
            assert len(window) <= KEPT_SAMPLES
        span_s = window[-1].sampled_s - window[0].sampled_s
        assert (KEPT_SAMPLES - 2) * SPACING_S <= span_s <= KEPT_SAMPLES * SPACING_S

    def test_what_is_told_again_or_late_changes_nothing(self) -> None:
        window = (at(10.0), at(20.0))
        assert append_sample(window, at(20.0, sm_clock_mhz=1.0)) is window
        assert append_sample(window, at(15.0)) is window

    def test_a_clock_that_began_anew_begins_a_new_window(self) -> None:
        assert append_sample((at(1e6), at(1e6 + 9.0)), at(5.0)) == (at(5.0),)

    def test_a_driver_that_hangs_takes_nothing_from_what_was_seen(self) -> None:
        node = NodeState(name="n", agent_incarnation="a")
        full = NodeReport(sequence=1, sent_mono_s=0.0, devices=(DEVICE,), host=HOST)
        empty = NodeReport(sequence=2, sent_mono_s=1.0)
        node = store_samples(store_samples(node, full, 1.0), empty, 2.0)
        assert (node.devices, node.host) == ({"d": (DEVICE,)}, (HOST,))

    def test_devices_that_come_and_go_do_not_pile_up(self) -> None:
        node = NodeState(name="n", agent_incarnation="a")
        for number in range(300):
            sample = replace(DEVICE, device_uuid=f"d{number}")
            node = store_samples(
                node, NodeReport(sequence=1, sent_mono_s=0.0, devices=(sample,)), 1.0
            )
            assert len(node.devices) <= root_cause.KEPT_DEVICES
        assert "d299" in node.devices


class Fleet:
    """Four ranks on two nodes; each step brings the samples that `shown` says, and times."""

    def __init__(self, *, has_times: bool = True) -> None:
        self.driver = Driver(config=QUICK)
        self.has_times = has_times
        self.shown: dict[int, dict[str, Any]] = {}
        self.host: dict[str, dict[str, Any]] = {}
        self.number = 0
        for node in AHEAD_S:
            self.driver.agent(node)
        for node in AHEAD_S:
            own = [
                attachment(rank, device_uuid=f"gpu-{rank}")
                for rank in NODE_OF
                if NODE_OF[rank] == node
            ]
            self.driver.report(attached=own, layouts=[FIRST], node=node)
        self.driver.report(*applied(FIRST))

    def train(self, count: int, *, slow: int | None = None, until_found: bool = False) -> None:
        for _ in range(count):
            self.driver.now_s += 1.0
            records = step(self.number, slow=slow, generation=1)
            for node, ahead_s in AHEAD_S.items():
                now_s = self.driver.now_s + ahead_s
                ranks = [rank for rank in NODE_OF if NODE_OF[rank] == node]
                devices = [
                    at(now_s, device_uuid=f"gpu-{rank}", processes=(100 + rank,))
                    if rank not in self.shown
                    else at(
                        now_s,
                        **{"processes": (100 + rank,), **self.shown[rank]},
                        device_uuid=f"gpu-{rank}",
                    )
                    for rank in ranks
                ]
                host = replace(HOST, sampled_s=now_s, **self.host.get(node, {}))
                own = [self._timed(r, now_s) for r in records if r.rank in ranks]
                self.driver.report(*own, node=node, devices=devices, host=host)
            self.number += 1
            if until_found and self.driver.job.open_incidents:
                return

    def _timed(self, record: Record, now_s: float) -> Record:
        if self.has_times and isinstance(record, MicroBatchRecord | StepRecord):
            return replace(record, ended_mono_s=now_s)
        return record

    @property
    def finding(self) -> Finding:
        (incident,) = self.driver.job.incidents
        return incident.finding


@pytest.mark.parametrize("has_times", [True, False])
def test_the_cause_is_in_the_finding_when_it_opens(has_times: bool) -> None:
    fleet = Fleet(has_times=has_times)
    fleet.train(WARM)
    fleet.shown[SLOW] = HOT
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.rank == SLOW
    assert fleet.finding.cause.startswith("confirmed thermal: the device reports hardware thermal")
    assert "none of 3 peers" in fleet.finding.cause
    (first, *_) = fleet.driver.all_said(SaveIncident)
    assert first.incident.finding.cause == fleet.finding.cause
    assert "incident=1 cause: confirmed thermal" in fleet.driver.texts
    assert not fleet.driver.job.detection.searches, "certain: nothing more is looked for"


def test_what_was_over_before_the_onset_is_not_named() -> None:
    fleet = Fleet()
    fleet.train(WARM - 6)
    fleet.shown[SLOW] = HOT
    fleet.train(6)
    fleet.shown.clear()
    fleet.train(5)
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.cause == "nothing seen: no thread times"
    assert fleet.finding.normal_signals


def test_what_the_peers_show_too_is_not_named() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.shown = dict.fromkeys(NODE_OF, HOT)
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.cause.startswith("nothing seen")


def test_its_host_is_compared_with_the_other_nodes() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.host["node-1"] = {"memory_full_ratio": 0.5}
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.cause == (
        "suspected host: all tasks of its node waited for memory 50% of the time "
        "(none of 1 other nodes, though 1 healthy rank is on it too)"
    )


def test_processes_of_the_job_are_no_strangers_but_others_are() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.shown[SLOW] = {"processes": (102, 103, 4242)}  # 103 is its neighbour's
    fleet.train(12, slow=SLOW, until_found=True)
    assert "are no ranks of the job use the device: 4242 (none of 3 peers)" in fleet.finding.cause


def test_a_reading_that_comes_late_is_named_when_it_comes() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.cause.startswith("nothing seen")
    assert SLOW in fleet.driver.job.detection.searches
    fleet.shown[SLOW] = {"temperature_celsius": 95.0}
    fleet.train(1, slow=SLOW)
    assert fleet.finding.cause.startswith("suspected thermal: 95 degrees")
    fleet.shown[SLOW] = {"processes": (102, 4242)}
    fleet.train(1, slow=SLOW)
    assert fleet.finding.cause.startswith("probable foreign_process")
    saved = fleet.driver.all_said(SaveIncident)[-1].incident.finding.cause
    assert saved == fleet.finding.cause
    fleet.shown[SLOW] = {}
    fleet.train(1, slow=SLOW)
    assert not fleet.driver.all_said(SaveIncident), "nothing surer: nothing is said"
    assert fleet.finding.cause == saved


def test_after_a_while_it_is_not_looked_for_any_more() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.train(12, slow=SLOW, until_found=True)
    before = fleet.finding.cause
    fleet.driver.now_s += SEARCH_S + 1.0
    fleet.shown[SLOW] = HOT
    fleet.train(1, slow=SLOW)
    assert not fleet.driver.job.detection.searches
    assert fleet.finding.cause == before


def test_a_finding_that_is_over_ends_the_search() -> None:
    fleet = Fleet()
    fleet.train(WARM)
    fleet.train(12, slow=SLOW, until_found=True)
    fleet.train(20)
    assert not fleet.driver.job.open_incidents
    assert not fleet.driver.job.detection.searches


def test_many_findings_at_once_are_not_each_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_cause, "MAX_SEARCHES", 0)
    fleet = Fleet()
    fleet.train(WARM)
    fleet.shown[SLOW] = HOT
    fleet.train(12, slow=SLOW, until_found=True)
    assert fleet.finding.cause == "not determined: too many ranks are slow at once"


class TestPeers:
    """Ranks in pairs on nodes n0, n1, ...; the device of rank r is gpu-r."""

    @staticmethod
    def fleet(num_ranks: int, **other: Any) -> JobState:
        ranks = {
            rank: RankState(
                attachment=Attachment(
                    job="j", rank=rank, world_size=num_ranks, pid=rank, device_uuid=f"gpu-{rank}"
                ),
                node=f"n{rank // 2}",
            )
            for rank in range(num_ranks)
        }
        return job_with("j", ranks=ranks, **other)

    @staticmethod
    def nodes(job: JobState, hot: Collection[int]) -> State:
        nodes = {
            known.node: NodeState(
                name=known.node,
                agent_incarnation="a",
                devices={
                    other.attachment.device_uuid: (at(10.0, **(HOT if rank in hot else {})),)
                    for rank, other in job.ranks.items()
                    if other.node == known.node
                },
            )
            for known in job.ranks.values()
        }
        return State(nodes=NodeMap(nodes))

    @staticmethod
    def finding(rank: int) -> Finding:
        return Finding(kind=FindingKind.DEVICE, tier=Tier.PROBABLE, rank=rank, slowdown=1.5,
                       onset_step=3, step=4, reason="slow")  # fmt: skip

    def searched(self, job: JobState, rank: int) -> tuple[int, ...]:
        found, _ = root_cause.explain_finding(State(), job, self.finding(rank), StepDraft(), 0.0)
        return found.detection.searches[rank].peers

    def test_neighbours_come_first_then_one_of_each_other_node(self) -> None:
        assert self.searched(self.fleet(6), 2) == (3, 0, 4, 1, 5)
        many = self.searched(self.fleet(100), 50)
        assert many == (51, *range(0, 2 * PEERS, 2)), "bounded, whatever the size"

    def test_slow_dead_and_other_ranks_are_no_peers(self) -> None:
        job = self.fleet(8, evidence=restore({2: 1.5, 3: 1.5}))
        ranks = dict(job.ranks)
        ranks[4] = replace(ranks[4], status=RankStatus.DEAD)
        other = replace(ranks[6].attachment, role="other")
        ranks[6] = replace(ranks[6], attachment=other)
        assert self.searched(replace(job, ranks=ranks), 2) == (0, 5, 7, 1)

    def test_who_became_slow_meanwhile_is_no_witness_any_more(self) -> None:
        job = self.fleet(4, evidence=restore({2: 1.5}))
        job, _ = root_cause.explain_finding(State(), job, self.finding(2), StepDraft(), 0.0)
        assert job.detection.searches[2].peers == (3, 0, 1)
        incident = Incident(incident_id=1, job="j", finding=self.finding(2), opened_unix_s=0.0)
        detection = replace(job.detection, evidence=restore({2: 1.5, 3: 1.5, 0: 1.5}))
        job = replace(job, incidents=(incident,), detection=detection)
        job, said = root_cause.repeat_searches(
            self.nodes(job, hot=[0, 2, 3]), job, StepDraft(), 1.0
        )
        assert "none of 1 peers" in job.incidents[0].finding.cause
        assert said and not job.detection.searches

    def test_two_ranks_on_one_device_are_no_witnesses_of_each_other(self) -> None:
        job = self.fleet(4, evidence=restore({2: 1.5}))
        shared = replace(job.ranks[3].attachment, device_uuid="gpu-2")
        job = replace(job, ranks={**job.ranks, 3: replace(job.ranks[3], attachment=shared)})
        _, found = root_cause.explain_finding(
            self.nodes(job, hot=[2, 3]), job, self.finding(2), StepDraft(), 0.0
        )
        assert "none of 2 peers" in found.cause
