"""Reading a ring while it is written, lapped, torn and damaged, against a dumb twin."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.agent.rings.reader import RecordCounts, RingReader, open_ring
from pacekeeper.core.telemetry import shm_ring
from pacekeeper.core.telemetry.attachment import Attachment, ModelShape
from pacekeeper.core.telemetry.records import Record, StepRecord
from pacekeeper.trainer.hooks.ring_writer import Ring
from support.agents import step
from support.examples import examples

SLOTS = shm_ring.SLOT_COUNT


@contextmanager
def pair(already: int = 0) -> Iterator[tuple[Ring, RingReader]]:
    """A writer that wrote `already` records, and then a reader."""
    with tempfile.TemporaryDirectory() as directory:
        attachment = Attachment(job="job", rank=0, world_size=1, pid=1)
        writer = Ring.create(Path(directory), attachment)
        for number in range(already):
            writer.write(step(number))
        assert writer.path is not None
        reader = open_ring(writer.path, "job", 1.0)
        yield writer, reader
        reader.close()


def numbers(found: list[Record]) -> list[int]:
    return [record.step for record in found if isinstance(record, StepRecord)]


bursts = st.lists(
    st.sampled_from([0, 1, 3, SLOTS - 1, SLOTS, SLOTS + 1, 2 * SLOTS + 7]), max_size=6
)


@given(st.sampled_from([0, 1, SLOTS - 1, SLOTS, SLOTS + 5]), bursts)
def test_each_look_gives_all_that_is_left_and_counts_the_rest(
    already: int, writes: list[int]
) -> None:
    with pair(already) as (writer, reader):
        counts = RecordCounts()
        written, expected_lost, read = already, 0, max(0, already - SLOTS)
        for burst in [0, *writes]:
            for number in range(written, written + burst):
                writer.write(step(number))
            written += burst
            oldest = max(read, written - SLOTS)
            expected_lost += oldest - read
            assert numbers(reader.records(counts)) == list(range(oldest, written))
            read = written
        assert (counts.lost, counts.corrupt) == (expected_lost, 0)


damage = st.tuples(
    st.integers(0, SLOTS * shm_ring.SLOT_BYTES - 1), st.binary(min_size=1, max_size=40)
)


@settings(max_examples=examples(50))
@given(
    st.sampled_from([5, SLOTS - 1, SLOTS, SLOTS + 9]),
    st.lists(damage, max_size=4),
    st.integers(0, 2 * SLOTS),
)
def test_damage_costs_what_it_hits_and_never_the_reader(
    already: int, hits: list[tuple[int, bytes]], more: int
) -> None:
    with pair(already) as (writer, _):
        assert writer.path is not None
        with writer.path.open("r+b") as file:
            for offset, data in hits:
                file.seek(shm_ring.SLOTS_OFFSET + offset)
                file.write(data[: shm_ring.FILE_BYTES - shm_ring.SLOTS_OFFSET - offset])
        counts = RecordCounts()
        reader = open_ring(writer.path, "job", 1.0)
        found = numbers(reader.records(counts)) + numbers(reader.records(counts))
        for number in range(already, already + more):
            writer.write(step(number))
        for _ in range(2 * len(hits) + 3):
            found += numbers(reader.records(counts))
        newest = already + more
        assert found == sorted(set(found)), "in order, none twice"
        assert set(found) <= set(range(newest)), "none that was not written"
        hit_slots = {byte // shm_ring.SLOT_BYTES for o, d in hits for byte in range(o, o + len(d))}
        left = range(max(0, newest - SLOTS), newest)
        whole = {n for n in left if n >= already or n % SLOTS not in hit_slots}
        assert whole <= set(found), "whole ones are read"
        reader.close()


@given(st.sampled_from([1, 700, SLOTS, SLOTS + 30]))
def test_a_writer_that_died_in_mid_write_hides_no_other_record(already: int) -> None:
    with pair(already) as (writer, reader):
        assert writer.path is not None
        with writer.path.open("r+b") as file:  # the first step of the next write, and no more
            file.seek(shm_ring.slot_offset(already))
            file.write(bytes(8))
        for each in (reader, open_ring(writer.path, "job", 1.0)):
            counts = RecordCounts()
            first = max(0, already - SLOTS + (already >= SLOTS))
            for _ in range(3):
                found = numbers(each.records(counts))
                if found:
                    assert found == list(range(first, already))
            assert counts.read == already - first
            assert counts.corrupt == 0


def test_a_record_that_was_never_finished_is_passed_on_the_second_look() -> None:
    with pair(3) as (writer, reader):
        assert writer.path is not None
        counts = RecordCounts()
        assert numbers(reader.records(counts)) == [0, 1, 2]
        writer.write(step(3))
        writer.write(step(4))
        with writer.path.open("r+b") as file:
            file.seek(shm_ring.slot_offset(3))
            file.write(bytes(8))
        assert numbers(reader.records(counts)) == [], "it may come yet"
        assert numbers(reader.records(counts)) == [4]
        assert counts.corrupt == 1


@pytest.mark.parametrize("late", [slice(8, 12), slice(12, shm_ring.SLOT_BYTES), slice(40, 41)])
def test_a_record_whose_bytes_are_seen_after_its_sequence_is_not_lost(late: slice) -> None:
    # As a weakly ordered processor may show the stores of another one.
    with pair() as (writer, reader):
        writer.write(step(0))
        writer.write(step(1))
        place = shm_ring.slot_offset(0)
        slot = os.pread(reader.descriptor, shm_ring.SLOT_BYTES, place)
        counts = RecordCounts()
        for index, byte in enumerate(slot[late], start=place + late.start):
            os.pwrite(reader.descriptor, bytes([byte ^ 0xFF]), index)
        assert reader.records(counts) == []
        os.pwrite(reader.descriptor, slot, place)
        assert numbers(reader.records(counts)) == [0, 1]
        assert (counts.read, counts.lost, counts.corrupt) == (2, 0, 0)


def test_a_torn_record_is_read_when_it_is_whole() -> None:
    with pair() as (writer, reader):
        assert writer.path is not None
        writer.write(step(0))
        with writer.path.open("r+b") as file:
            file.seek(shm_ring.slot_offset(0))
            whole = file.read(shm_ring.SLOT_BYTES)
            file.seek(shm_ring.slot_offset(0))
            file.write(bytes(8))
            file.flush()
            counts = RecordCounts()
            assert reader.records(counts) == []
            file.seek(shm_ring.slot_offset(0))
            file.write(whole)
        assert numbers(reader.records(counts)) == [0]
        assert (counts.read, counts.lost, counts.corrupt) == (1, 0, 0)


commands = st.builds(
    shm_ring.CommandSlot,
    plan_generation=st.integers(0, 2**64 - 1),
    base_generation=st.integers(0, 2**64 - 1),
    plan_sha256=st.binary(min_size=32, max_size=32),
    dead_ranks=st.frozensets(st.integers(0, shm_ring.MAX_RANKS - 1), max_size=5),
)


@given(st.lists(st.tuples(commands, st.sampled_from(["go on", "new agent", "killed"])), max_size=6))
def test_a_rank_hears_every_command_whatever_becomes_of_the_agent(
    steps: list[tuple[shm_ring.CommandSlot, str]],
) -> None:
    with pair() as (writer, reader):
        assert writer.path is not None
        now_s = 1.0
        for command, fate in steps:
            if fate != "go on":
                if fate == "killed":  # in the middle of writing
                    os.pwrite(reader.descriptor, bytes(8), shm_ring.COMMAND_OFFSET)
                now_s += 1.0
                reader = open_ring(writer.path, "job", now_s)
                assert reader.command == (
                    shm_ring.CommandSlot() if fate == "killed" else writer.command()
                )
            reader.write_command(command)
            if command != shm_ring.CommandSlot() or fate != "killed":
                assert writer.command() == command


SHAPE = ModelShape(
    num_layers=1, num_experts=1, experts_per_token=1, rows_per_step=1, slots_per_rank=1,
    expert_bytes=2**64, dense_bytes=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("attachment", "file_name", "complaint"),
    [
        (Attachment(job="other", rank=0, world_size=1, pid=1), "rank-00000.ring", "job 'other'"),
        (Attachment(job="job", rank=2, world_size=4, pid=1), "rank-00000.ring", "rank 2"),
        (Attachment(job="job", rank=0, world_size=1, pid=1, role="\ud800"), "rank-00000.ring", "."),
        (Attachment(job="job", rank=0, world_size=1, pid=1, model=SHAPE), "rank-00000.ring", "."),
        (Attachment(job="job", rank=0, world_size=2**33, pid=1), "rank-00000.ring", "."),
        (Attachment(job="job", rank=16384, world_size=16385, pid=1), "rank-16384.ring", "exceeds"),
    ],
)
def test_a_header_that_can_not_be_told_is_refused(
    attachment: Attachment, file_name: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / file_name
    path.write_bytes(shm_ring.encode_header(attachment).ljust(shm_ring.FILE_BYTES, b"\0"))
    with pytest.raises(ValueError, match=complaint):
        open_ring(path, "job", 1.0)
