"""A reader of a ring gets the record that was written, or nothing; never another one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core import ring
from pacekeeper.core.errors import VersionError
from pacekeeper.core.records import RankExitRecord, Record, StepRecord, pack, unpack
from pacekeeper.core.topology import Attachment
from support.records import ATTACHMENT, records, u64


@given(records)
def test_a_record_survives_its_body(record: Record) -> None:
    kind, body = pack(record)
    assert len(body) <= 96
    assert unpack(kind, body) == record


@given(st.integers(0, 2**40), records)
def test_a_slot_gives_its_record_back(index: int, record: Record) -> None:
    slot = ring.encode_slot(index, record)
    assert ring.decode_slot(index, index + 1, slot, index + 1) == record


@given(st.integers(0, 2**40), records, st.data())
def test_one_flipped_bit_never_gives_another_record(
    index: int, record: Record, data: st.DataObject
) -> None:
    slot = bytearray(ring.encode_slot(index, record))
    used = ring.SLOT_BYTES - 16  # what the codec uses of a slot
    bit = data.draw(st.integers(0, min(len(slot), used) * 8 - 1))
    slot[bit // 8] ^= 1 << (bit % 8)
    (sequence,) = ring.SEQUENCE.unpack_from(slot)
    try:
        found = ring.decode_slot(index, sequence, bytes(slot), sequence)
    except (ring.CorruptError, LookupError):
        return
    assert found in (None, record)


def test_a_slot_not_written_yet_is_none_and_a_torn_one_is_said_to_be() -> None:
    empty = bytes(ring.SLOT_BYTES)
    assert ring.decode_slot(5, 0, empty, 0) is None
    with pytest.raises(ring.TornError):
        ring.decode_slot(5, 0, empty, 6)


def test_a_lapped_slot_says_so() -> None:
    record = RankExitRecord(rank=0, pid=1, exit_code=0, signal=9)
    index = 5 + ring.SLOT_COUNT
    slot = ring.encode_slot(index, record)
    with pytest.raises(LookupError, match="overwritten"):
        ring.decode_slot(5, index + 1, slot, index + 1)


def test_impossible_times_are_no_record() -> None:
    record = StepRecord(rank=0, step=0, generation=1, duration_s=float("inf"), tokens=1)
    with pytest.raises(ring.CorruptError, match="impossible duration"):
        ring.decode_slot(0, 1, ring.encode_slot(0, record), 1)


@given(
    st.frozensets(st.integers(0, ring.MAX_RANKS - 1), max_size=40),
    u64,
    st.binary(min_size=32, max_size=32),
)
def test_a_command_survives_its_slot(dead: frozenset[int], plan: int, digest: bytes) -> None:
    command = ring.CommandSlot(
        plan_generation=plan, base_generation=3, plan_sha256=digest, dead_ranks=dead
    )
    assert ring.decode_command(ring.encode_command(7, command)) == (7, command)


@given(st.data())
def test_a_damaged_command_is_torn(data: st.DataObject) -> None:
    command = ring.CommandSlot(plan_generation=9, dead_ranks=frozenset({3}))
    area = bytearray(ring.encode_command(7, command))
    at = data.draw(st.integers(8, len(area) - 1).filter(lambda i: not 12 <= i < 16))
    area[at] ^= 0xFF
    with pytest.raises(ring.TornError):
        ring.decode_command(bytes(area))


def test_no_command_before_the_first() -> None:
    assert ring.decode_command(bytes(ring.COMMAND_BYTES)) == (0, ring.CommandSlot())


def test_more_ranks_than_the_bitmap_holds_are_refused() -> None:
    command = ring.CommandSlot(dead_ranks=frozenset({ring.MAX_RANKS}))
    with pytest.raises(ValueError, match="beyond"):
        ring.encode_command(1, command)


@pytest.mark.parametrize(
    "attachment", [ATTACHMENT, Attachment(job="x", rank=0, world_size=1, pid=1)]
)
def test_the_header_gives_the_attachment_back(attachment: Attachment) -> None:
    assert ring.decode_header(ring.encode_header(attachment)) == attachment


def test_a_ring_of_another_version_names_both() -> None:
    header = bytearray(ring.encode_header(ATTACHMENT))
    header[8] = 99
    with pytest.raises(VersionError, match=r"version 99.*reads version 1"):
        ring.decode_header(bytes(header))


@given(st.binary(max_size=300))
def test_what_is_no_ring_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        ring.decode_header(data)


@given(st.binary(max_size=400))
def test_a_damaged_header_is_a_value_error(data: bytes) -> None:
    header = bytearray(ring.encode_header(ATTACHMENT))
    header[24 : 24 + len(data)] = data
    try:
        found = ring.decode_header(bytes(header))
    except ValueError:
        return
    assert isinstance(found, Attachment)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "x" * 65, "space bar"])
def test_a_job_name_that_is_no_directory_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        Attachment(job=name, rank=0, world_size=1, pid=1)
