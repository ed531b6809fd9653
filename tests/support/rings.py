"""Reads a ring file as it lies there, without an agent."""

from pathlib import Path

from pacekeeper.core import ring
from pacekeeper.core.records import Record


def records_in(path: Path) -> list[Record]:
    """The records of a ring that has not been lapped, oldest first."""
    data, found = path.read_bytes(), list[Record]()
    for index in range(ring.SLOT_COUNT):
        at = ring.slot_offset(index)
        (sequence,) = ring.SEQUENCE.unpack_from(data, at)
        record = ring.decode_slot(index, sequence, data[at : at + ring.SLOT_BYTES], sequence)
        if record is None:
            break
        found.append(record)
    return found
