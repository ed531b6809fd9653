"""A reader of a ring gets the record that was written, or nothing; never another one."""

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.errors import VersionError
from pacekeeper.core.layout.pipeline_schedule import Schedule
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.record_codec import REASON_BYTES, pack, unpack
from pacekeeper.core.telemetry.records import (
    LOADS_PER_RECORD,
    MAX_S,
    PAYLOAD_BYTES,
    ExpertLoadRecord,
    PlanRefusedRecord,
    RankExitRecord,
    Record,
    RecordKind,
    StepRecord,
)
from pacekeeper.core.text import one_line
from support.records import ATTACHMENT, SHAPE, records, u64
from support.slots import encode_slot


@given(records)
def test_a_record_survives_its_payload(record: Record) -> None:
    payload = pack(record)
    assert len(payload) == PAYLOAD_BYTES
    assert unpack(payload) == record


@given(st.text(max_size=9) | st.text(min_size=30, max_size=120))
def test_of_a_long_reason_the_beginning_is_told(reason: str) -> None:
    record = PlanRefusedRecord(rank=0, generation=1, plan_generation=2, layout_crc=3, reason=reason)
    beginning = reason.encode(errors="replace").decode()
    while len(beginning.encode()) > REASON_BYTES:
        beginning = beginning[:-1]
    assert unpack(pack(record)) == replace(record, reason=one_line(beginning.rstrip("\0")))


@given(st.integers(0, 2**40), records)
def test_a_slot_gives_its_record_back(index: int, record: Record) -> None:
    slot = encode_slot(index, record)
    assert shm_ring.decode_slot(index, index + 1, slot, index + 1) == record


def test_the_bytes_are_the_format() -> None:
    # On disk, read by another process: other bytes for the same record need another VERSION.
    record = RankExitRecord(rank=1, pid=2, exit_code=-1, signal=9, detected_mono_s=1.5)
    content = encode_slot(4, record).rstrip(b"\0")
    assert (
        content.hex()
        == (
            "0500000000000000" + "4a05930f" + "05000000"  # sequence, sum, kind
            "01000000" + "02000000" + "ffffffff" + "09000000" + "000000000000f83f"
        )
    )


@given(st.integers(0, 2**40), records, st.data())
def test_flipped_bits_never_give_another_record(
    index: int, record: Record, data: st.DataObject
) -> None:
    """Adler-32 sees any two flipped bits of a slot."""
    slot = bytearray(encode_slot(index, record))
    positions = st.integers(0, len(slot) * 8 - 1)
    for bit in data.draw(st.sets(positions, min_size=1, max_size=2)):
        slot[bit // 8] ^= 1 << (bit % 8)
    (sequence,) = shm_ring.SEQUENCE.unpack_from(slot)
    try:
        found = shm_ring.decode_slot(index, sequence, bytes(slot), sequence)
    except shm_ring.CorruptError:
        return
    assert found in (None, record)


@given(st.integers(0, 2**40), st.binary(max_size=shm_ring.SLOT_BYTES), u64)
def test_garbage_in_a_slot_is_never_a_record(index: int, slot: bytes, sequence: int) -> None:
    try:
        found = shm_ring.decode_slot(index, sequence, slot, sequence)
    except shm_ring.CorruptError:
        return
    assert found is None


@given(st.integers(0, 300), st.binary(max_size=200) | st.binary(min_size=114, max_size=114))
def test_garbage_in_a_payload_is_a_value_error(kind: int, rest: bytes) -> None:
    try:
        unpack(kind.to_bytes(2, "little") + rest)
    except ValueError:
        return
    assert kind in list(RecordKind)


def test_more_loads_than_a_record_has_are_refused() -> None:
    one = ExpertLoadRecord(rank=0, step=0, generation=1, layer=0, first_expert=0, counts=(1,))
    payload = bytearray(pack(one))
    payload[20] = LOADS_PER_RECORD + 1  # the count
    with pytest.raises(ValueError, match="17 loads"):
        unpack(bytes(payload))


def test_a_slot_not_written_yet_is_none_and_a_torn_one_is_said_to_be() -> None:
    empty = bytes(shm_ring.SLOT_BYTES)
    assert shm_ring.decode_slot(5, 0, empty, 0) is None
    with pytest.raises(shm_ring.TornError):
        shm_ring.decode_slot(5, 0, empty, 6)


def test_a_lapped_slot_says_so() -> None:
    record = RankExitRecord(rank=0, pid=1, exit_code=0, signal=9)
    index = 5 + shm_ring.SLOT_COUNT
    slot = encode_slot(index, record)
    with pytest.raises(LookupError, match="overwritten by record 1029"):
        shm_ring.decode_slot(5, index + 1, slot, index + 1)


def test_a_damaged_sequence_does_not_look_like_a_lap() -> None:
    # A reader that believed it would wait for record 2**50 for ever.
    slot = bytearray(encode_slot(5, RankExitRecord(rank=0, pid=1, exit_code=0, signal=9)))
    slot[6] ^= 4
    (sequence,) = shm_ring.SEQUENCE.unpack_from(slot)
    with pytest.raises(shm_ring.CorruptError):
        shm_ring.decode_slot(5, sequence, bytes(slot), sequence)


@given(st.integers(0, 2**40))
def test_slots_lie_behind_the_header_and_wrap(index: int) -> None:
    offset = shm_ring.slot_offset(index)
    assert shm_ring.SLOTS_OFFSET <= offset <= shm_ring.FILE_BYTES - shm_ring.SLOT_BYTES
    assert shm_ring.slot_offset(index + shm_ring.SLOT_COUNT) == offset
    assert shm_ring.slot_offset(index + 1) in (offset + shm_ring.SLOT_BYTES, shm_ring.SLOTS_OFFSET)


def test_impossible_times_are_no_record() -> None:
    sound = StepRecord(rank=0, step=0, generation=1, duration_s=MAX_S, tokens=1, transfer_s=-1e-6)
    assert shm_ring.decode_slot(0, 1, encode_slot(0, sound), 1) == sound
    for wrong in (
        replace(sound, duration_s=math.inf),
        replace(sound, duration_s=2.0 * MAX_S),
        replace(sound, duration_s=-1.0),
        replace(sound, transfer_s=math.inf),
        replace(sound, input_wait_s=-2.0 * MAX_S),
    ):
        with pytest.raises(shm_ring.CorruptError, match="impossible duration"):
            shm_ring.decode_slot(0, 1, encode_slot(0, wrong), 1)


commands = st.builds(
    shm_ring.CommandSlot,
    plan_generation=u64,
    base_generation=u64,
    plan_sha256=st.binary(min_size=32, max_size=32),
    dead_ranks=st.frozensets(st.integers(0, shm_ring.MAX_RANKS - 1), max_size=40),
    suspect_ranks=st.frozensets(
        st.integers(0, shm_ring.MAX_RANKS - 1), max_size=shm_ring.MAX_SUSPECTS
    ),
    run_id=u64,
    probe=u64,
)


@given(st.integers(1, 2**64 - 1), commands)
def test_a_command_survives_its_slot(sequence: int, command: shm_ring.CommandSlot) -> None:
    area = shm_ring.encode_command(sequence, command)
    assert len(area) == shm_ring.COMMAND_BYTES
    assert shm_ring.decode_command(area) == (sequence, command)


@given(commands, commands, st.integers(8, shm_ring.COMMAND_BYTES))
def test_a_half_written_command_is_torn_or_the_whole_new_one(
    old: shm_ring.CommandSlot, new: shm_ring.CommandSlot, written: int
) -> None:
    before, after = shm_ring.encode_command(7, old), shm_ring.encode_command(8, new)
    try:
        found = shm_ring.decode_command(after[:written] + before[written:])
    except shm_ring.TornError:
        return
    assert found == (8, new)


@given(commands, st.data())
def test_a_flipped_bit_makes_a_command_torn(
    command: shm_ring.CommandSlot, data: st.DataObject
) -> None:
    area = bytearray(shm_ring.encode_command(7, command))
    padding = range(12 * 8, 16 * 8)
    bit = data.draw(st.integers(0, len(area) * 8 - 1).filter(lambda at: at not in padding))
    area[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(shm_ring.TornError):
        shm_ring.decode_command(bytes(area))


@given(st.binary(max_size=60))
def test_too_few_bytes_are_no_command(area: bytes) -> None:
    with pytest.raises(ValueError, match="a command slot has"):
        shm_ring.decode_command(area)


def test_no_command_before_the_first() -> None:
    assert shm_ring.decode_command(bytes(shm_ring.COMMAND_BYTES)) == (0, shm_ring.CommandSlot())


@pytest.mark.parametrize("rank", [-1, shm_ring.MAX_RANKS])
def test_more_ranks_than_the_bitmap_holds_are_refused(rank: int) -> None:
    command = shm_ring.CommandSlot(dead_ranks=frozenset({rank}))
    with pytest.raises(ValueError, match="beyond"):
        shm_ring.encode_command(1, command)


@pytest.mark.parametrize(
    "attachment", [ATTACHMENT, Attachment(job="x", rank=0, world_size=1, pid=1)]
)
def test_the_header_gives_the_attachment_back(attachment: Attachment) -> None:
    assert shm_ring.decode_header(shm_ring.encode_header(attachment)) == attachment


@pytest.mark.parametrize("schedule", [*Schedule, None])
def test_the_header_gives_the_pipeline_schedule_back(schedule: Schedule | None) -> None:
    told = replace(ATTACHMENT, model=replace(SHAPE, schedule=schedule))
    found = shm_ring.decode_header(shm_ring.encode_header(told))
    assert found == told
    assert found.model is not None and found.model.schedule is schedule  # a member, not its text


def test_a_header_without_a_schedule_is_that_of_1f1b() -> None:
    """Trainers from before this field write none, and agents from before it read none."""
    text = shm_ring.encode_header(ATTACHMENT)[HEAD_BYTES:]
    assert "schedule" not in json.loads(text)["model"]
    found = shm_ring.decode_header(with_json(text))
    assert found.model is not None and found.model.schedule is Schedule.ONE_F_ONE_B


def test_sizes_that_are_not_reported_are_left_out_of_the_header() -> None:
    """Agents from before a field read the header of a trainer that does not report it."""
    sizes: dict[str, Any] = {
        f.name: at for at, f in enumerate(fields(ModelShape), 1) if f.type is int
    }
    told = replace(ATTACHMENT, model=ModelShape(**sizes, schedule=Schedule.ZERO_BUBBLE))
    assert shm_ring.decode_header(shm_ring.encode_header(told)) == told
    text = shm_ring.encode_header(ATTACHMENT)[HEAD_BYTES:]
    assert not {"hidden_bytes", "memory_bytes", "schedule"} & json.loads(text)["model"].keys()


def test_a_schedule_of_a_newer_trainer_is_read_as_unknown() -> None:
    shape = {**asdict(SHAPE), "schedule": "zero_bubble_v"}
    header = with_json(json.dumps({**asdict(ATTACHMENT), "model": shape}).encode())
    assert shm_ring.decode_header(header) == replace(
        ATTACHMENT, model=replace(SHAPE, schedule=None)
    )


def test_a_ring_of_another_version_names_both() -> None:
    header = bytearray(shm_ring.encode_header(ATTACHMENT))
    header[8] = 99
    with pytest.raises(VersionError, match=rf"version 99.*reads version {shm_ring.VERSION} "):
        shm_ring.decode_header(bytes(header))


HEAD_BYTES = 24  # magic, version, sizes, pid, length of the JSON text behind it


def with_json(text: bytes) -> bytes:
    """A header of the right version with `text` in place of the attachment."""
    head = shm_ring.encode_header(ATTACHMENT)[: HEAD_BYTES - 4]
    return head + len(text).to_bytes(4, "little") + text


def test_an_attachment_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        shm_ring.encode_header(replace(ATTACHMENT, role="x" * shm_ring.COMMAND_OFFSET))


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 0.5},
        {"rank": 9},
        {"pid": "7"},
        {"job": 3},
        {"role": None},
        {"clock": "sundial"},
        {"other": 1},
        {"model": {"num_layers": 1}},
        {"model": 7},
        {"model": {**asdict(SHAPE), "schedule": 3}},
    ],
)
def test_an_attachment_of_wrong_values_is_refused(change: dict[str, object]) -> None:
    text = json.dumps({**asdict(ATTACHMENT), **change}).encode()
    with pytest.raises(ValueError, match="header is corrupt"):
        shm_ring.decode_header(with_json(text))


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{}", b"[" * 4000, b"\xff\xfe"])
def test_a_header_without_an_attachment_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="header is corrupt"):
        shm_ring.decode_header(with_json(text))


@given(st.binary(max_size=300))
def test_what_is_no_ring_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        shm_ring.decode_header(data)


@given(st.binary(max_size=400))
def test_a_damaged_header_is_a_value_error(data: bytes) -> None:
    header = bytearray(shm_ring.encode_header(ATTACHMENT))
    header[HEAD_BYTES : HEAD_BYTES + len(data)] = data
    try:
        found = shm_ring.decode_header(bytes(header))
    except ValueError:
        return
    assert isinstance(found, Attachment)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "x" * 65, "space bar"])
def test_a_job_name_that_is_no_directory_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="job name"):
        Attachment(job=name, rank=0, world_size=1, pid=1)


def test_a_copy_of_another_record_is_not_believed() -> None:
    # The writer came past between the two looks at the sequence and left a whole, later record.
    later = encode_slot(
        5 + shm_ring.SLOT_COUNT, RankExitRecord(rank=0, pid=1, exit_code=0, signal=9)
    )
    with pytest.raises(shm_ring.CorruptError):
        shm_ring.decode_slot(5, 6, later, 6)


def test_of_more_suspects_than_there_is_room_for_the_lowest_are_told() -> None:
    told = shm_ring.encode_command(1, shm_ring.CommandSlot(suspect_ranks=frozenset(range(100))))
    assert shm_ring.decode_command(told)[1].suspect_ranks == frozenset(range(shm_ring.MAX_SUSPECTS))
