"""Loads of a node's ranks, added up before they are sent: who plans asks for the sum of all. Pure.

At 256 experts counts are nine tenths of what a rank tells of a step, and eight ranks of a node tell
it at the same time.
"""

from collections.abc import Iterable
from dataclasses import replace

from pacekeeper.agent.uplink.batching import Reading
from pacekeeper.core.telemetry.records import ExpertLoadRecord, Record

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
