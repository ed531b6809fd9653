"""From what was read to what is sent: joins records and device samples; says who died. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from pacekeeper.core.records import RankExitRecord, Record
from pacekeeper.core.reports import AgentHealth, JobReport, NodeReport
from pacekeeper.core.topology import Attachment, DeviceSample, HostSample

MAX_RECORDS_PER_REPORT = 4096
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
