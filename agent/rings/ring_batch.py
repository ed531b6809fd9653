"""Everything one poll of the rings of one job returned, and the deaths in it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import RankExitRecord, Record

_NO_PIDS: Mapping[str, Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RingBatch:
    """What one look into the rings of one life of a job gave."""

    job: str
    life: int = 0
    attached: tuple[Attachment, ...] = ()
    records: tuple[Record, ...] = ()
    layouts: tuple[tuple[int, bytes], ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.attached or self.records or self.layouts)


def find_deaths(
    readings: Sequence[RingBatch], pids: Mapping[str, Mapping[int, int]] = _NO_PIDS
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
