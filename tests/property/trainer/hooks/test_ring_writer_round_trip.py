"""What a rank writes is what a reader finds, however many records and however often around."""

import mmap
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.records import Record
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.records import ATTACHMENT, records


def found_at(memory: mmap.mmap, index: int) -> Record | None:
    """Record number `index` by the reader's protocol: sequence, copy, sequence."""
    offset = shm_ring.slot_offset(index)
    (before,) = shm_ring.SEQUENCE.unpack_from(memory, offset)
    slot = memory[offset : offset + shm_ring.SLOT_BYTES]
    (after,) = shm_ring.SEQUENCE.unpack_from(memory, offset)
    return shm_ring.decode_slot(index, before, slot, after)


@given(st.lists(records, min_size=1, max_size=20), st.integers(0, 3 * shm_ring.SLOT_COUNT))
def test_any_sequence_of_records_is_read_back_as_written(written: list[Record], start: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = Ring.create(Path(folder), ATTACHMENT)
        assert ours.path is not None
        for i in range(start):  # so that the records under test lie across the ring's end at times
            ours.write(written[i % len(written)])
        for record in written:
            ours.write(record)
        with ours.path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), shm_ring.FILE_BYTES)
        assert [found_at(memory, start + i) for i in range(len(written))] == written
        assert shm_ring.decode_header(memory[: shm_ring.COMMAND_OFFSET]) == ATTACHMENT
        assert ours.num_errors == 0
        memory.close()
        ours.close()
