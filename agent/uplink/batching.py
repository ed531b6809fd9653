"""From what was read to what is sent: joins records and device samples; says who died. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import (
    MAX_RECORDS_PER_REPORT,
    AgentHealth,
    JobReport,
    NodeReport,
)
from pacekeeper.core.telemetry.records import ExpertLoadRecord, RankExitRecord, Record
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample

SPACING_S = 5.0  # between two readings of the same device that are told
CLOCK_MOVED = 1.05  # a clock this factor apart is another reading: half of what would be a finding
_NO_PIDS: Mapping[str, Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one look into the rings of one life of a job gave."""

    job: str
    life: int = 0
    attached: tuple[Attachment, ...] = ()
    records: tuple[Record, ...] = ()
    layouts: tuple[tuple[int, bytes], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.attached or self.records or self.layouts)


def split(
    readings: Sequence[Reading], max_records: int = MAX_RECORDS_PER_REPORT
) -> Iterator[tuple[Reading, ...]]:
    """The readings in portions of at most `max_records` records, nothing lost, order kept.

    At least one portion, empty or not. Attachments and layouts go before the records they explain.
    """
    portion: list[Reading] = []
    room = max_records
    for reading in readings:
        left = reading.records
        reading = replace(reading, records=left[:room])
        while len(left) > room:
            yield (*portion, reading)
            portion, left, room = [], left[room:], max_records
            reading = Reading(job=reading.job, life=reading.life, records=left[:room])
        portion.append(reading)
        room -= len(left)
    yield tuple(portion)


def batch(
    readings: Sequence[Reading],
    samples: Sequence[DeviceSample],
    health: AgentHealth,
    *,
    sequence: int,
    now_s: float,
    host: HostSample | None = None,
) -> NodeReport:
    """One report: everything new, with the newest sample of each device and of the host."""
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
                job=r.job, life=r.life, attached=r.attached, records=r.records, layouts=r.layouts
            )
            for r in readings
            if not r.is_empty
        ),
        devices=tuple(newest[uuid] for uuid in sorted(newest)),
        host=host,
        health=health,
    )


@dataclass(slots=True, kw_only=True)
class SampleNews:
    """Which readings of the devices are worth telling: most of them repeat what is known.

    All devices are told every SPACING_S, which is what a controller keeps of them; at once where
    one of them says something else than it did: lost or back, another reason for its clocks, an
    Xid, a clock that is CLOCK_MOVED apart.
    """

    told: Mapping[str, DeviceSample] = field(default_factory=dict)

    def take(self, samples: Sequence[DeviceSample]) -> tuple[DeviceSample, ...]:
        """All of these samples, which count as told from now on, or none where nothing is new."""
        if not any(self._is_new(sample) for sample in samples):
            return ()
        self.told = {sample.device_uuid: sample for sample in samples}
        return tuple(samples)

    def _is_new(self, sample: DeviceSample) -> bool:
        before = self.told.get(sample.device_uuid)
        if before is None or sample.sampled_s >= before.sampled_s + SPACING_S:
            return True
        return _state(sample) != _state(before) or _has_moved(
            before.sm_clock_mhz, sample.sm_clock_mhz
        )


def _state(sample: DeviceSample) -> tuple[bool, int | None, int | None]:
    xids = None if sample.health is None else sample.health.num_xids
    return sample.is_lost, sample.clock_event_reasons, xids


def _has_moved(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return False
    return max(before, now) > CLOCK_MOVED * min(before, now)


def deaths_in(
    readings: Sequence[Reading], pids: Mapping[str, Mapping[int, int]] = _NO_PIDS
) -> Mapping[tuple[str, int], frozenset[int]]:
    """Ranks whose process ended badly, by job and life: their neighbours here are told at once.

    A clean exit (code 0) is no death, nor is the end of a process that another one has replaced
    (`pids[job][rank]`, where lives have no number). Ranks of other nodes hear of it from the
    controller.
    """
    dead: dict[tuple[str, int], frozenset[int]] = {}
    for reading in readings:
        present = {} if reading.life else pids.get(reading.job, {})
        found = frozenset(
            record.rank
            for record in reading.records
            if isinstance(record, RankExitRecord)
            and (record.signal or record.exit_code)
            and present.get(record.rank, record.pid) == record.pid
        )
        if found:
            key = reading.job, reading.life
            dead[key] = dead.get(key, frozenset()) | found
    return dead


MOST_ROWS = (1 << 32) - 1  # of an expert: as the wire holds them


_Place = tuple[int, int, int, int, int]


def with_sums(readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """The same readings, with one record of loads for all ranks that told of the same experts."""
    return tuple(replace(one, records=_summed(one.records)) for one in readings)


def _summed(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """The sums come last, in order; a lone rank's records stay as they are."""
    loads: dict[_Place, list[ExpertLoadRecord]] = {}
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
    return (*others, *(one for place in sorted(loads) for one in _sum(loads[place])))


def _sum(records: list[ExpertLoadRecord]) -> list[ExpertLoadRecord]:
    if len(records) == 1:
        return records
    counts = tuple(map(sum, zip(*(one.counts for one in records), strict=True)))
    if max(counts) > MOST_ROWS:
        return records  # nobody has so many tokens: what that says is not our matter
    num_ranks = sum(one.num_ranks for one in records)
    return [replace(records[0], counts=counts, num_ranks=num_ranks)]
