"""Makes reports of ring batches and samples: splits, sums expert loads, omits old samples. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pacekeeper.agent.rings.ring_batch import RingBatch
from pacekeeper.core.telemetry.node_report import (
    MAX_RECORDS_PER_REPORT,
    AgentHealth,
    JobReport,
    NodeReport,
)
from pacekeeper.core.telemetry.records import ExpertLoadRecord, Record
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

MAX_SAMPLE_AGE_S = 5.0  # a device is reported at least that often
CLOCK_CHANGE_RATIO = 1.05  # reported with the next report; half the change that is a finding
# Bits of NVML's clock event reasons by which a device throttles: hardware slowdown, software and
# hardware thermal slowdown, power brake. Others, as an idle GPU or a power cap, come and go.
THROTTLING = 0x8 | 0x20 | 0x40 | 0x80


def split_batches(
    readings: Sequence[RingBatch], max_records: int = MAX_RECORDS_PER_REPORT
) -> Iterator[tuple[RingBatch, ...]]:
    """Split batches into portions of at most `max_records` records, in order.

    Yields:
        At least one portion. Attachments and layouts are in the portion of a batch's first records.
    """
    portion: list[RingBatch] = []
    room = max_records
    for reading in readings:
        left = reading.records
        reading = replace(reading, records=left[:room])
        while len(left) > room:
            yield (*portion, reading)
            portion, left, room = [], left[room:], max_records
            reading = RingBatch(job=reading.job, run_id=reading.run_id, records=left[:room])
        portion.append(reading)
        room -= len(left)
    yield tuple(portion)


def build_report(
    readings: Sequence[RingBatch],
    samples: Sequence[DeviceSample],
    health: AgentHealth,
    *,
    sequence: int,
    now_s: float,
    host: HostSample | None = None,
) -> NodeReport:
    """Build one report.

    Args:
        readings: Batches of the report; empty ones are left out.
        samples: Device samples; the newest of each device is used.
        health: State of the agent.
        sequence: Number of the report.
        now_s: Monotonic clock.
        host: Sample of the kernel.
    """
    newest: dict[str, DeviceSample] = {}
    for sample in samples:
        seen = newest.get(sample.device_uuid)
        if seen is None or sample.sampled_s >= seen.sampled_s:
            newest[sample.device_uuid] = sample
    return NodeReport(
        sequence=sequence,
        sent_mono_s=now_s,
        jobs=tuple(
            JobReport(
                job=r.job,
                run_id=r.run_id,
                attached=r.attached,
                records=r.records,
                layouts=r.layouts,
                phases=r.phases,
                stacks=r.stacks,
            )
            for r in readings
            if not r.is_empty
        ),
        devices=tuple(newest[uuid] for uuid in sorted(newest)),
        host=host,
        health=health,
    )


@dataclass(slots=True, kw_only=True)
class SampleFilter:
    """Selects the device samples to report, because most of them repeat known values.

    All devices are reported every MAX_SAMPLE_AGE_S; and with the next report if one is lost or
    back, or its clock event reasons, number of Xids or clock (by CLOCK_CHANGE_RATIO) change.
    """

    sent: Mapping[str, DeviceSample] = field(default_factory=dict)

    def select(self, samples: Sequence[DeviceSample]) -> tuple[DeviceSample, ...]:
        """All samples, recorded as sent, if one of them has changed; else an empty tuple."""
        if not any(self._is_new(sample) for sample in samples):
            return ()
        self.sent = {sample.device_uuid: sample for sample in samples}
        return tuple(samples)

    def is_urgent(self, samples: Sequence[DeviceSample]) -> bool:
        """Whether a device is lost, has a new Xid or throttles for a new reason."""
        return any(
            before is not None and _is_worse(before, sample)
            for sample in samples
            for before in (self.sent.get(sample.device_uuid),)
        )

    def _is_new(self, sample: DeviceSample) -> bool:
        before = self.sent.get(sample.device_uuid)
        if before is None or sample.sampled_s >= before.sampled_s + MAX_SAMPLE_AGE_S:
            return True
        return _state(sample) != _state(before) or _has_changed(
            before.sm_clock_mhz, sample.sm_clock_mhz
        )


def _state(sample: DeviceSample) -> tuple[bool, int | None, int | None]:
    return sample.is_lost, sample.clock_event_reasons, _num_xids(sample)


def _num_xids(sample: DeviceSample) -> int | None:
    return None if sample.health is None else sample.health.num_xids


def _is_worse(before: DeviceSample, now: DeviceSample) -> bool:
    if now.is_lost and not before.is_lost:
        return True
    new_reasons = (now.clock_event_reasons or 0) & ~(before.clock_event_reasons or 0)
    return bool(new_reasons & THROTTLING) or (_num_xids(now) or 0) > (_num_xids(before) or 0)


def _has_changed(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return False
    return max(before, now) > CLOCK_CHANGE_RATIO * min(before, now)


MAX_COUNT = (1 << 32) - 1  # of rows of an expert, 32 bits on the wire


_LoadKey = tuple[int, int, int, int, int]


def sum_expert_loads(readings: Iterable[RingBatch]) -> tuple[RingBatch, ...]:
    """Sum expert loads over the node's ranks: one record per step, layer and expert range."""
    return tuple(replace(one, records=_sum_loads(one.records)) for one in readings)


def _sum_loads(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """Records with sums at the end, in order; unchanged if only one rank reported loads."""
    loads: dict[_LoadKey, list[ExpertLoadRecord]] = {}
    others: list[Record] = []
    ranks = set()
    for record in records:
        if isinstance(record, ExpertLoadRecord):
            place = record.step, record.generation, record.layer, record.first_expert
            loads.setdefault((*place, len(record.counts)), []).append(record)
            ranks.add(record.rank)
        else:
            others.append(record)
    if len(ranks) < 2:
        return records
    return (*others, *(one for place in sorted(loads) for one in _sum_alike(loads[place])))


def _sum_alike(records: list[ExpertLoadRecord]) -> list[ExpertLoadRecord]:
    if len(records) == 1:
        return records
    counts = tuple(map(sum, zip(*(one.counts for one in records), strict=True)))
    if max(counts) > MAX_COUNT:
        return records  # implausible: passed on unchanged
    num_ranks = sum(one.num_ranks for one in records)
    return [replace(records[0], counts=counts, num_ranks=num_ranks)]
