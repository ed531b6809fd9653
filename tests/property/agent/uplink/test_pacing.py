"""Whatever a node does: at most two reports a second, every record sent once, in order."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.agent.uplink.pacing import KEEPALIVE_S, MIN_GAP_S, ReportPacer
from pacekeeper.core.telemetry.records import MicroBatchRecord, RankExitRecord, Record
from support.agents import step

PIDS = {"job": {0: 10, 1: 11}}
POLL_S = 0.125  # a power of two: times add up exactly
STEPS = st.tuples(st.just("step"), st.integers(0, 1))
POLLS = st.lists(
    st.one_of(st.none(), STEPS, st.tuples(st.sampled_from(("micro", "exit")), st.integers(0, 1))),
    max_size=120,
)


def record_of(kind: str, rank: int, number: int) -> Record:
    if kind == "step":
        return step(number, rank=rank)
    if kind == "exit":
        return RankExitRecord(rank=rank, pid=10 + rank, exit_code=1, signal=0)
    return MicroBatchRecord(
        rank=rank, step=number, micro_batch=0, generation=1, compute_s=0.1, tokens=1
    )


@given(polls=POLLS, interval_s=st.sampled_from((1.0, 2.0, 5.0)))
def test_records_come_once_in_order_and_reports_keep_their_distance(
    polls: list[tuple[str, int] | None], interval_s: float
) -> None:
    pacer = ReportPacer()
    pacer.set_interval(interval_s)
    written: list[Record] = []
    sent: list[Record] = []
    sent_s: list[float] = []
    numbers = {0: 0, 1: 0}
    longest_s = max(KEEPALIVE_S, 2.0 * interval_s)
    quiet = [None] * int(longest_s / POLL_S + 2)
    for i, poll in enumerate([*polls, *quiet]):
        now_s = i * POLL_S
        if poll is not None:
            kind, rank = poll
            record = record_of(kind, rank, numbers[rank])
            numbers[rank] += kind == "step"
            written.append(record)
            pacer.add([RingBatch(job="job", run_id=1, records=(record,))], PIDS, now_s)
        if pacer.is_due(now_s):
            sent += [record for batch in pacer.take(now_s) for record in batch.records]
            sent_s.append(now_s)
    assert sent == written
    gaps = [b - a for a, b in itertools.pairwise(sent_s)]
    assert all(MIN_GAP_S <= gap <= longest_s for gap in gaps)


@given(
    interval_s=st.sampled_from((1.0, 2.0, 5.0)),
    over=st.integers(1, 200),
    micro_batches=st.integers(0, 4),
)
def test_a_step_longer_than_the_interval_is_reported_as_it_ends(
    interval_s: float, over: int, micro_batches: int
) -> None:
    pacer = ReportPacer()
    pacer.set_interval(interval_s)
    sent_s = -1.0
    step_polls = int(interval_s / POLL_S) + over
    for number in range(6):
        for i in range(step_polls):
            now_s = (number * step_polls + i) * POLL_S
            is_last = i == step_polls - 1
            records: list[Record] = []
            if micro_batches and i % (step_polls // micro_batches + 1) == 0:
                records.append(record_of("micro", 0, number))
            if is_last:
                records += [step(number, rank=0), step(number, rank=1)]
            pacer.add([RingBatch(job="job", run_id=1, records=tuple(records))], PIDS, now_s)
            is_due = pacer.is_due(now_s)
            if is_last:
                assert is_due or now_s - sent_s < MIN_GAP_S
            if is_due:
                pacer.take(now_s)
                sent_s = now_s
