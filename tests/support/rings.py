"""Reads a ring file as it lies there, without an agent."""

from pathlib import Path

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import Record


def records_in(path: Path) -> list[Record]:
    """The records of a ring that has not been lapped, oldest first."""
    data, found = path.read_bytes(), list[Record]()
    for index in range(shm_ring.SLOT_COUNT):
        at = shm_ring.slot_offset(index)
        (sequence,) = shm_ring.SEQUENCE.unpack_from(data, at)
        record = shm_ring.decode_slot(
            index, sequence, data[at : at + shm_ring.SLOT_BYTES], sequence
        )
        if record is None:
            break
        found.append(record)
    return found
