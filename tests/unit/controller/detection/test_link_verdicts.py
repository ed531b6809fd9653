"""Slow transfers cause a probe of pairs; the incident and the planner's view hold its verdict."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

import pytest

from pacekeeper.controller.detection.link_verdicts import UNMEASURED
from pacekeeper.controller.policy.decide import decide
from pacekeeper.controller.policy.inputs import snapshot_of
from pacekeeper.controller.policy.pricing import Pricing
from pacekeeper.controller.state.events import RequestProbe
from pacekeeper.controller.storage.restore import job_record, restored
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import Finding, FindingKind, Tier
from pacekeeper.core.incidents.link_places import LinkPlace, PlaceKind
from pacekeeper.core.telemetry.pair_probe import Pair, is_pairwise
from pacekeeper.core.telemetry.records import PairRecord, ProbeRecord, Record
from support.fabrics import Fabric
from support.machine_driver import FIRST, NODE_OF, QUICK, WARM, started

FAULT = WARM + 20
PORT = {pair: 3.0 for pair in combinations(range(4), 2) if 2 in pair}
ALL = dict.fromkeys(range(4), 3.0)


class Job:
    """A job whose transfers and pairs are made up; it answers probes of pairs."""

    def __init__(self, seed: int = 7, *, can_probe: bool = True) -> None:
        self.driver = started(QUICK, can_probe=can_probe)
        self.fabric, self.number = Fabric(seed), 0
        self.slow_pairs: Mapping[Pair, float] = {}
        self.silent: frozenset[int] = frozenset()
        self.asked: list[int] = []

    def run(self, steps: int, slow: Mapping[int, float] | None = None) -> None:
        """Steps, each with a tick; probes that are requested are answered."""
        for _ in range(steps):
            self.driver.now_s += 0.5
            self.driver.report(*self.fabric.records(self.number, slow or {}))
            self.number += 1
            self.tick()

    def tick(self, after_s: float = 0.5) -> None:
        self.driver.tick(after_s)
        asked = {command.number for command in self.driver.all_said(RequestProbe)}
        for number in sorted(asked - {*self.asked}):
            self.asked.append(number)
            self.driver.report(*self.answers(number))

    def answers(self, number: int) -> Iterable[Record]:
        """What the ranks report of a probe: pairs inside a node are twice as fast."""
        of = {"step": self.number - 1, "generation": 1, "number": number}
        for pair in combinations(range(4), 2):
            factor = 1.0 if NODE_OF[pair[0]] == NODE_OF[pair[1]] else 2.0
            took_s = 1e-3 * factor * self.slow_pairs.get(pair, 1.0)
            for rank, peer in (pair, pair[::-1]):
                if is_pairwise(number) and rank not in self.silent:
                    yield PairRecord(
                        rank=rank, peer=peer, num_bytes=1_000_000, exchange_s=took_s, **of
                    )
        for rank in range(4):
            yield ProbeRecord(
                rank=rank, gemm_s=1e-3, copy_s=1e-3, exchange_s=1e-4, duration_s=0.02, **of
            )

    @property
    def findings(self) -> list[Finding]:
        return [incident.finding for incident in self.driver.job.incidents]


def with_fault(slow_pairs: Mapping[Pair, float], slow: Mapping[int, float]) -> Job:
    """A job whose health was probed, and whose fault was found."""
    job = Job()
    job.run(FAULT)
    assert job.findings == []
    job.slow_pairs = slow_pairs
    job.run(24, slow)
    return job


def test_a_healthy_fabric_is_probed_once_and_has_no_finding() -> None:
    job = Job()
    job.run(FAULT + 40)
    (number,) = job.asked
    assert is_pairwise(number)
    assert job.findings == []
    assert job.driver.job.detection.link_probes.history.covers(range(4))


def test_a_port_that_slows_all_transfers_is_located_by_its_pairs() -> None:
    job = with_fault(PORT, ALL)
    (finding,) = job.findings
    assert (finding.kind, finding.rank, finding.tier) == (FindingKind.LINK, None, Tier.CONFIRMED)
    assert "probe of 6 pairs" in finding.probe
    assert finding.places == (LinkPlace(kind=PlaceKind.PORT, ranks=(2,), nodes=("node-1",)),)
    assert "MB/s instead of" in finding.probe
    assert len(job.asked) == 2
    assert snapshot_of(job.driver.job, 0.0, {}).slow_links == pytest.approx({2: 3.0})


def test_a_pair_is_located_and_its_ranks_are_as_slow_as_their_transfers() -> None:
    job = with_fault({(0, 2): 6.0}, {0: 3.0, 2: 3.0})
    assert {finding.rank for finding in job.findings} == {0, 2}
    for finding in job.findings:
        (place,) = finding.places
        assert (place.kind, place.ranks) == (PlaceKind.PAIR, (0, 2))
    slow = snapshot_of(job.driver.job, 0.0, {}).slow_links
    assert slow == job.driver.job.detection.links.slow
    assert slow.keys() == {0, 2}


def test_a_fabric_that_is_slow_as_a_whole_names_no_rank_to_the_planner() -> None:
    job = with_fault(dict.fromkeys(combinations(range(4), 2), 3.0), ALL)
    (finding,) = job.findings
    assert finding.tier is Tier.CONFIRMED
    assert snapshot_of(job.driver.job, 0.0, {}).slow_links == {}


def test_a_fabric_that_a_probe_finds_well_leaves_a_suspicion_and_the_charts_speed() -> None:
    job = with_fault({}, {1: 3.0})
    (finding,) = job.findings
    assert (finding.rank, finding.tier) == (1, Tier.SUSPECTED)
    assert "all at their usual rates" in finding.probe
    slow = snapshot_of(job.driver.job, 0.0, {}).slow_links
    assert slow == job.driver.job.detection.links.slow
    assert slow.keys() == {1}


def test_transfers_that_stay_slow_are_probed_again_until_a_place_is_found() -> None:
    job = with_fault({}, ALL)
    (finding,) = job.findings
    assert finding.places == ()
    num_asked = len(job.asked)
    job.run(120, ALL)
    assert job.findings[0].places == ()
    assert num_asked + 1 <= len(job.asked) <= num_asked + 3, "each after twice as long"
    job.slow_pairs = PORT
    job.run(170, ALL)
    (finding,) = job.findings
    assert (finding.tier, finding.places[0].ranks) == (Tier.CONFIRMED, (2,))
    num_asked = len(job.asked)
    job.run(200, ALL)
    assert len(job.asked) == num_asked, "located"


def test_ranks_that_measure_no_pairs_leave_what_the_transfers_showed() -> None:
    job = Job()
    job.silent = frozenset(range(4))
    job.run(FAULT)
    job.run(24, {1: 3.0})
    (finding,) = job.findings
    assert (finding.probe, finding.tier) == (UNMEASURED, Tier.PROBABLE)
    assert snapshot_of(job.driver.job, 0.0, {}).slow_links.keys() == {1}
    assert len(job.asked) == 2, "never the same question twice"


def test_a_trainer_that_cannot_probe_is_not_asked() -> None:
    job = Job(can_probe=False)
    job.run(FAULT)
    job.run(16, {1: 3.0})
    assert job.asked == []
    assert [finding.rank for finding in job.findings] == [1]


def test_a_link_that_is_well_again_closes_the_incident_and_drops_the_verdict() -> None:
    job = with_fault(PORT, ALL)
    job.slow_pairs = {}
    job.run(40)
    (incident,) = job.driver.job.incidents
    assert not incident.is_open
    assert incident.actions[-1].startswith("transfers of all ranks are back at their usual time")
    assert job.driver.job.detection.link_probes.verdict is None
    assert snapshot_of(job.driver.job, 0.0, {}).slow_links == {}


def restarted(job: Job, steps: int) -> Job:
    """The job after a restart of the controller and so many steps whose transfers are slow."""
    job.driver.start_again()
    job.driver.attach_again(FIRST, can_probe=True)
    job.run(steps, ALL)
    return job


def test_after_a_restart_pairs_are_probed_again_for_a_slow_port() -> None:
    job = with_fault(PORT, ALL)
    num_asked = len(job.asked)
    job = restarted(job, 2 * FAULT)
    assert len(job.asked) == num_asked + 1
    (finding,) = job.findings
    assert (finding.tier, finding.places[0].ranks) == (Tier.CONFIRMED, (2,))
    assert snapshot_of(job.driver.job, 0.0, {}).slow_links.keys() == {2}


def test_pairs_without_a_past_do_not_refute_what_was_found_before_a_restart() -> None:
    job = with_fault(dict.fromkeys(combinations(range(4), 2), 3.0), ALL)
    (before,) = job.findings
    num_asked = len(job.asked)
    job = restarted(job, 2 * FAULT)
    assert len(job.asked) > num_asked
    (after,) = job.findings
    assert (after.probe, after.tier) == (before.probe, Tier.CONFIRMED)


def test_a_probe_without_pairs_leaves_what_was_found_before_a_restart() -> None:
    job = with_fault(PORT, ALL)
    (before,) = job.findings
    num_asked = len(job.asked)
    job.silent = frozenset(range(4))
    job = restarted(job, 2 * FAULT)
    assert num_asked < len(job.asked) <= num_asked + 3, "each after twice as long"
    (after,) = job.findings
    assert (after.probe, after.tier) == (before.probe, before.tier)


def test_after_a_restart_a_slow_fabric_is_still_open() -> None:
    driver = with_fault(PORT, ALL).driver
    record = job_record(driver.state, driver.job.name)
    state = restored([record], driver.job.incidents, next_incident_id=9, unix_offset_s=0.0)
    (job,) = state.jobs.values()
    common = job.detection.links.common
    assert common is not None
    assert common.slowdown == pytest.approx(3.0, rel=0.1)


def test_a_located_link_changes_the_price_and_moves_rows_away_from_it() -> None:
    job = with_fault(PORT, ALL)
    view = snapshot_of(job.driver.job, 0.0, {})
    shape = replace(view.shape, hidden_bytes=8192, splits_each_step=True)
    view = replace(view, shape=shape, link_s_per_byte=1e-6, num_load_steps=100)
    unlocated = replace(view, slow_links={})
    config = PolicyConfig()
    bare = [Pricing(replace(one, step_s=0.0), config).current_s for one in (unlocated, view)]
    assert bare[1] > 1.02 * bare[0]
    assert decide(unlocated, config).layout is None
    planned = decide(view, config)
    assert planned.layout is not None, planned.reason
    assert dict(planned.layout.speeds)[2] < 1.0
    assert planned.planned_step_s < planned.current_step_s
