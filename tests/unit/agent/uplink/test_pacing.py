"""When records are sent: a table of cases on one node with two ranks."""

import math
from collections.abc import Sequence

import pytest

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.uplink import pacing
from pacekeeper.agent.uplink.pacing import ReportPacer, reconnect_bound_s
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import MAX_RECORDS_PER_REPORT
from pacekeeper.core.telemetry.records import (
    MicroBatchRecord,
    PlanRefusedRecord,
    RankExitRecord,
    Record,
)
from pacekeeper.core.telemetry.sign_of_life import Phase, RankPhase, RankStack
from support.agents import step

PIDS = {"job": {0: 10, 1: 11}}


def micro_batch(rank: int = 0, compute_s: float = 0.1, number: int = 0) -> MicroBatchRecord:
    return MicroBatchRecord(
        rank=rank, step=0, micro_batch=number, generation=1, compute_s=compute_s, tokens=1
    )


def add(pacer: ReportPacer, now_s: float, *records: Record) -> None:
    pacer.add([RingBatch(job="job", run_id=1, records=records)], PIDS, now_s)


def started(interval_s: float = 5.0, now_s: float = 100.0) -> ReportPacer:
    """A pacer that has just reported a whole step."""
    pacer = ReportPacer()
    pacer.set_interval(interval_s)
    add(pacer, now_s, step(0), step(0, rank=1))
    assert pacer.is_due(now_s)
    pacer.take(now_s)
    return pacer


URGENT: list[Record] = [
    RankExitRecord(rank=0, pid=10, exit_code=-1, signal=9),
    PlanRefusedRecord(rank=0, generation=1, plan_generation=2, layout_crc=0, reason="no room"),
]


@pytest.mark.parametrize("record", URGENT)
def test_an_urgent_record_is_sent_at_once_but_twice_a_second_at_most(record: Record) -> None:
    pacer = started()
    add(pacer, 100.1, record)
    assert not pacer.is_due(100.1)
    assert pacer.is_due(100.0 + pacing.MIN_GAP_S)
    assert pacer.take(100.5)[0].records == (record,)
    assert not pacer.is_due(103.0), "it is sent once"


def test_a_new_rank_and_a_throttling_device_are_urgent() -> None:
    pacer = started()
    attached = Attachment(job="job", rank=1, world_size=2, pid=11)
    pacer.add([RingBatch(job="job", run_id=1, attached=(attached,))], PIDS, 101.0)
    assert pacer.is_due(101.0)
    assert not started().is_due(101.0)
    assert started().is_due(101.0, is_urgent=True)


def test_a_step_is_reported_when_its_last_rank_on_the_node_ended_it() -> None:
    pacer = started()
    add(pacer, 108.0, step(1))
    assert not pacer.is_due(108.1)
    add(pacer, 108.1, step(1, rank=1))
    assert pacer.is_due(108.1)
    assert pacer.take(108.1)[0].records == (step(1), step(1, rank=1))


def test_a_rank_that_does_not_end_its_step_does_not_hold_the_others_back() -> None:
    pacer = started()
    add(pacer, 107.0, step(1))
    pacer.take(107.0)  # an urgent report took it along
    assert pacer.is_due(107.0 + pacing.MIN_GAP_S)
    pacer.take(107.5)
    assert not pacer.is_due(110.0), "it is over once"


def test_short_steps_are_reported_together_once_an_interval() -> None:
    pacer = started(interval_s=2.0)
    for number in range(1, 10):
        add(pacer, 100.0 + number * 0.3, step(number), step(number, rank=1))
        if number * 0.3 < 2.0:
            assert not pacer.is_due(100.0 + number * 0.3)
    assert pacer.is_due(102.7)
    assert len(pacer.take(102.7)[0].records) == 18


def test_what_is_within_a_step_waits_for_its_end_but_not_for_ever() -> None:
    pacer = started(interval_s=1.0)
    add(pacer, 101.5, micro_batch())
    assert not pacer.is_due(104.9)
    assert pacer.is_due(100.0 + pacing.KEEPALIVE_S)
    pacer.take(105.0)
    add(pacer, 105.6, step(1), step(1, rank=1))
    assert pacer.is_due(105.6), "a report within the step does not delay its end"


def test_an_idle_node_reports_while_it_is_connected_only() -> None:
    pacer = started(interval_s=5.0)
    assert not pacer.is_due(109.9)
    assert pacer.is_due(110.0)
    assert not pacer.is_due(110.0, is_connected=False)
    assert pacer.take(110.0) == ()


def test_a_full_report_waits_for_no_step() -> None:
    pacer = started()
    records = [micro_batch(number=i) for i in range(MAX_RECORDS_PER_REPORT)]
    add(pacer, 101.0, *records)
    assert pacer.is_due(101.0)


@pytest.mark.parametrize(
    ("sent", "interval_s"),
    [(2.5, 2.5), (0.0, 1.0), (-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1e9, 60.0)],
)
def test_the_controllers_interval_is_kept_within_reason(sent: float, interval_s: float) -> None:
    pacer = ReportPacer()
    pacer.set_interval(sent)
    assert pacer.interval_s == interval_s


def stand(pacer: ReportPacer, now_s: float, held_s: float, is_standing: bool = True) -> None:
    phase = RankPhase(rank=0, phase=Phase.COMPUTING, held_s=held_s, is_standing=is_standing)
    pacer.add([RingBatch(job="job", run_id=1, phases=(phase,))], PIDS, now_s)


def test_a_standstill_is_urgent_at_its_beginning_and_end_and_routine_between() -> None:
    pacer = started(interval_s=3.0)
    stand(pacer, 101.0, 1.0)
    assert pacer.is_due(101.0)
    pacer.take(101.0)
    stand(pacer, 102.0, 2.0)
    stand(pacer, 102.9, 2.9)
    assert not pacer.is_due(102.9)
    assert pacer.is_due(103.0)
    assert [one.held_s for one in pacer.take(103.0)[0].phases] == [pytest.approx(3.0)]
    stand(pacer, 103.6, 0.1, is_standing=False)
    assert pacer.is_due(103.6)


def test_a_standstill_that_waits_for_its_report_is_as_long_as_at_the_report() -> None:
    pacer = started()
    stand(pacer, 100.2, 0.8)
    assert not pacer.is_due(100.2), "reports have a least gap"
    pacer.add([], PIDS, 100.4)
    assert [one.held_s for one in pacer.take(100.5)[0].phases] == [pytest.approx(1.1)]


def test_a_stack_dump_is_urgent() -> None:
    pacer = started()
    stack = RankStack(rank=0, source="py-spy", text="...")
    pacer.add([RingBatch(job="job", run_id=1, stacks=(stack,))], PIDS, 101.0)
    assert pacer.is_due(101.0)


def paces(pacer: ReportPacer, now_s: float, compute_s: Sequence[float]) -> None:
    add(pacer, now_s, *(micro_batch(rank=r, compute_s=one) for r, one in enumerate(compute_s)))


def test_a_rank_that_becomes_slow_by_itself_is_urgent_once() -> None:
    pacer = started(interval_s=60.0)
    for i in range(20):
        paces(pacer, 100.0 + i, (0.1, 0.1))
    assert not pacer.is_due(119.0)
    for i in range(2):
        paces(pacer, 120.0 + i, (0.1, 0.2))
    assert pacer.is_due(121.0)
    pacer.take(121.0)
    paces(pacer, 122.0, (0.1, 0.2))
    assert not pacer.is_due(122.0)


def test_ranks_that_become_slow_together_or_for_one_micro_batch_are_not_urgent() -> None:
    pacer = started(interval_s=60.0)
    for i in range(20):
        paces(pacer, 100.0 + i, (0.1, 0.1))
    paces(pacer, 120.0, (0.1, 0.3))
    for i in range(5):
        paces(pacer, 121.0 + i, (0.2, 0.2))
    assert not pacer.is_due(126.0)


@pytest.mark.parametrize(
    ("backoff_s", "spread_s", "was_connected", "bound_s"),
    [
        (0.2, 0.003, True, 0.2),
        (0.2, 30.0, True, 30.0),
        (0.4, 30.0, False, 0.4),
        (64.0, 30.0, False, 10.0),
        (64.0, 90.0, False, 30.0),
    ],
)
def test_a_fleet_that_lost_its_controller_comes_back_over_its_spread(
    backoff_s: float, spread_s: float, was_connected: bool, bound_s: float
) -> None:
    assert bound_s == reconnect_bound_s(backoff_s, spread_s, 10.0, was_connected=was_connected)
