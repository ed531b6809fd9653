"""The slot of a record, for tests that have no ring of their own."""

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.record_codec import pack
from pacekeeper.core.telemetry.records import Record


def encode_slot(index: int, record: Record) -> bytes:
    """What a writer leaves in the slot of record number `index`."""
    sequence, payload = shm_ring.SEQUENCE.pack(index + 1), pack(record)
    return sequence + shm_ring.SLOT_REST.pack(shm_ring.slot_checksum(sequence, payload), payload)
