"""The slot of a record, for tests that have no ring of their own."""

from pacekeeper.core import ring
from pacekeeper.core.record_codec import pack
from pacekeeper.core.records import Record


def encode_slot(index: int, record: Record) -> bytes:
    """What a writer leaves in the slot of record number `index`."""
    sequence, payload = ring.SEQUENCE.pack(index + 1), pack(record)
    return sequence + ring.SLOT_REST.pack(ring.slot_sum(sequence, payload), payload)
