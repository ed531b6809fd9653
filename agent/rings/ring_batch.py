"""Everything one poll of the rings of one job returned, and the deaths in it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import RankExitRecord, Record
from pacekeeper.core.telemetry.sign_of_life import RankPhase, RankStack

_NO_PIDS: Mapping[str, Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RingBatch:
    """New data of one run of a job, from one poll of its rings."""

    job: str
    run_id: int = 0
    attached: tuple[Attachment, ...] = ()
    records: tuple[Record, ...] = ()
    layouts: tuple[tuple[int, bytes], ...] = ()
    phases: tuple[RankPhase, ...] = ()
    stacks: tuple[RankStack, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.attached or self.records or self.layouts or self.phases or self.stacks)


def find_deaths(
    readings: Sequence[RingBatch], pids: Mapping[str, Mapping[int, int]] = _NO_PIDS
) -> Mapping[tuple[str, int], frozenset[int]]:
    """Ranks that failed, by job and incarnation; the agent notifies the other ranks of the node.

    A clean exit (code 0) is no failure. The controller notifies ranks of other nodes.

    Args:
        readings: The batches of one poll.
        pids: Current process by job and rank. If incarnations are not numbered, the exit of a
        process
            that was replaced is ignored.
    """
    dead: dict[tuple[str, int], frozenset[int]] = {}
    for reading in readings:
        present = {} if reading.run_id else pids.get(reading.job, {})
        found = frozenset(
            record.rank
            for record in reading.records
            if isinstance(record, RankExitRecord)
            and (record.signal or record.exit_code)
            and present.get(record.rank, record.pid) == record.pid
        )
        if found:
            key = reading.job, reading.run_id
            dead[key] = dead.get(key, frozenset()) | found
    return dead
