"""Splitting readings loses nothing and mixes nothing; who is told dead is dead."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.agent.rings.ring_batch import RingBatch, find_deaths
from pacekeeper.agent.uplink.batching import build_report, split_batches
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import AgentHealth
from pacekeeper.core.telemetry.records import RankExitRecord, Record
from pacekeeper.core.telemetry.samples import DeviceSample
from support.records import records

ranks = st.integers(0, 5)
readings = st.lists(
    st.builds(
        RingBatch,
        job=st.sampled_from(["a", "b", "c"]),
        attached=st.lists(
            st.builds(Attachment, job=st.just("a"), rank=ranks, world_size=st.just(6), pid=ranks),
            max_size=2,
        ).map(tuple),
        records=st.lists(records, max_size=9).map(tuple),
        layouts=st.lists(st.tuples(ranks, st.binary(max_size=3)), max_size=2).map(tuple),
    ),
    max_size=4,
    unique_by=lambda reading: reading.job,
)


def of_job(portions: Sequence[tuple[RingBatch, ...]], job: str) -> list[RingBatch]:
    return [reading for portion in portions for reading in portion if reading.job == job]


@given(readings, st.integers(1, 6))
def test_portions_are_bounded_and_together_the_whole(found: list[RingBatch], bound: int) -> None:
    portions = list(split_batches(found, bound))
    assert portions, "a report without news is a report"
    for portion in portions:
        assert sum(len(reading.records) for reading in portion) <= bound
        assert len({reading.job for reading in portion}) == len(portion)
    for reading in found:
        parts = of_job(portions, reading.job)
        assert tuple(r for part in parts for r in part.records) == reading.records
        assert parts[0].attached == reading.attached, "known before its first record"
        assert parts[0].layouts == reading.layouts
        assert not any(part.attached or part.layouts for part in parts[1:])


@given(readings)
def test_what_fits_is_not_split(found: list[RingBatch]) -> None:
    assert list(split_batches(found)) == [tuple(found)]


samples = st.builds(
    DeviceSample,
    device_index=ranks,
    device_uuid=st.sampled_from("xyz"),
    sampled_s=st.floats(0, 100),
)


@given(readings, st.lists(samples, max_size=8))
def test_a_report_has_every_device_once_as_it_was_seen_last(
    found: list[RingBatch], highest: list[DeviceSample]
) -> None:
    report = build_report(found, highest, AgentHealth(), sequence=1, now_s=0.0)
    newest: dict[str, float] = {}
    for sample in highest:
        newest[sample.device_uuid] = max(newest.get(sample.device_uuid, 0.0), sample.sampled_s)
    assert {d.device_uuid: d.sampled_s for d in report.devices} == newest
    assert len(report.devices) == len(newest)
    assert all(sample in highest for sample in report.devices)
    said = [(job.job, job.attached, job.records, job.layouts) for job in report.jobs]
    assert said == [(r.job, r.attached, r.records, r.layouts) for r in found if not r.is_empty]


exits: st.SearchStrategy[Record] = st.builds(
    RankExitRecord,
    rank=ranks,
    pid=st.integers(0, 2),
    exit_code=st.integers(0, 1),
    signal=st.sampled_from([0, 9]),
)


@given(
    st.lists(exits | records, max_size=8),
    st.dictionaries(ranks, st.integers(0, 2)),
)
def test_only_the_process_that_holds_a_rank_can_take_it_to_death(
    found: list[Record], pids: Mapping[int, int]
) -> None:
    dead = find_deaths((RingBatch(job="a", records=tuple(found)),), {"a": pids, "b": {0: 7}})
    expected = set()
    for record in found:
        if isinstance(record, RankExitRecord):
            is_clean = record.exit_code == 0 and record.signal == 0
            is_replaced = record.rank in pids and pids[record.rank] != record.pid
            if not is_clean and not is_replaced:
                expected.add(record.rank)
    assert dict(dead) == ({("a", 0): expected} if expected else {})
