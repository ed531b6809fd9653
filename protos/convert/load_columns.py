"""Loads of experts as columns of the wire, to records: those that follow each other become one.

A ring's record holds sixteen; at hundreds of experts a record for each sixteen was most of what a
step cost its reader.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pacekeeper.core.telemetry.records import LOADS_PER_RECORD, ExpertLoadRecord

MOST_RANKS = 1024  # of one node


def loads_from_columns(columns: Any, job: str, *, most_counts: int) -> Iterator[ExpertLoadRecord]:
    """A layer's experts of a rank as one record where they follow each other. Raises ValueError."""
    where = f"{job} expert_loads"
    length, num_counts = len(columns.rank), len(columns.counts)
    if num_counts > most_counts:
        raise ValueError(f"{where}: {num_counts} counts, more than may come at once")
    names = ["rank", "step", "generation", "layer", "first_expert", "num_counts"]
    names += ["num_ranks"] if columns.num_ranks else []
    for name in names:
        if len(getattr(columns, name)) != length:
            found = len(getattr(columns, name))
            raise ValueError(f"{where}: column {name} has {found} entries, not {length}")
    counts, begin, at = list(columns.counts), 0, 0
    values = [list(getattr(columns, name)) for name in names]
    values += [] if columns.num_ranks else [[1] * length]
    # A layer's experts come in many records of a ring: as one they cost a sixteenth.
    place, first_expert = (0, 0, 0, 0, 0), 0
    for rank, step, generation, layer, first, number, num_ranks in zip(*values, strict=True):
        if at + number > len(counts):
            raise ValueError(f"{where}: num_counts promises more than counts holds")
        if not 1 <= number <= LOADS_PER_RECORD:
            raise ValueError(f"{where}: impossible num_counts {number}")
        if not 1 <= num_ranks <= MOST_RANKS:
            raise ValueError(f"{where}: impossible num_ranks {num_ranks}")
        here = rank, step, generation, layer, num_ranks
        if here != place or first != first_expert + at - begin:
            if begin < at:
                yield _load_record(place, first_expert, counts[begin:at])
            place, first_expert, begin = here, first, at
        at += number
    if begin < at:
        yield _load_record(place, first_expert, counts[begin:at])
    if at != len(counts):
        raise ValueError(f"{where}: counts holds {len(counts)} entries, num_counts promises {at}")


def _load_record(
    place: tuple[int, int, int, int, int], first_expert: int, counts: Sequence[int]
) -> ExpertLoadRecord:
    rank, step, generation, layer, num_ranks = place
    return ExpertLoadRecord(
        rank=rank,
        step=step,
        generation=generation,
        layer=layer,
        first_expert=first_expert,
        counts=tuple(counts),
        num_ranks=num_ranks,
    )
