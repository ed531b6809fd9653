"""One schema of micro-batches: the ring's slots, the wire's columns and the feature table."""

from dataclasses import fields
from inspect import signature

from pacekeeper.core.telemetry.record_codec import pack, pack_micro_batch, unpack
from pacekeeper.core.telemetry.records import (
    MAX_DOCUMENTS,
    MICRO_BATCH_COLUMNS,
    MicroBatchRecord,
    Use,
)
from pacekeeper.predictor.cost.features import COLUMNS, FEATURES
from pacekeeper.protos import telemetry_pb2

RECORD = MicroBatchRecord(
    rank=1, step=2, micro_batch=3, generation=4, compute_s=0.5, tokens=6, sum_len_squared=7,
    expert_rows=8, num_active_experts=9, cpu_s=0.25, run_queue_s=None, stall_s=0.125,
    ended_mono_s=81.5, num_documents=10, head_tokens=11, tensor_share=0.75, rows_over_16=12,
    rows_over_64=13, rows_over_256=14, rows_over_1024=15,
)  # fmt: skip


def test_the_slot_is_that_of_ring_version_10() -> None:
    columns = sorted(MICRO_BATCH_COLUMNS.values(), key=lambda column: column.place)
    assert [column.place for column in columns] == list(range(len(columns)))
    assert "".join(column.code for column in columns) == "IIIIIHHIIIQddddddIIII"
    assert pack(RECORD).hex() == (
        "010000000100000002000000030000000400000009000000"
        "0a0000600600000"
        "00b00000008000000"
        "0700000000000000"
        "000000000000e03f000000000000d03f000000000000f87f000000000000c03f"
        "000000000000f87f0000000000605440"
        "0c0000000d0000000e0000000f000000"
        "00000000"
    )


def test_a_slot_holds_all_fields_and_counts_saturate() -> None:
    assert unpack(pack(RECORD)) == RECORD
    values = [getattr(RECORD, name) for name in MICRO_BATCH_COLUMNS]
    assert pack_micro_batch(*values) == pack(RECORD)
    parameters = list(signature(pack_micro_batch).parameters)
    assert parameters[:-1] == [n for n in MICRO_BATCH_COLUMNS if not n.startswith("rows_over_")]
    values[list(MICRO_BATCH_COLUMNS).index("num_documents")] = MAX_DOCUMENTS + 1
    read = unpack(pack_micro_batch(*values))
    assert isinstance(read, MicroBatchRecord) and read.num_documents == MAX_DOCUMENTS


def test_every_field_has_a_column_on_the_wire() -> None:
    wire = telemetry_pb2.MicroBatchColumns.DESCRIPTOR.fields_by_name
    assert set(wire) == {field.name for field in fields(MicroBatchRecord)}


def test_the_feature_table_has_every_feature() -> None:
    used = [name for name, column in MICRO_BATCH_COLUMNS.items() if column.use is not Use.NONE]
    assert ["one", *used] == list(FEATURES) and set(used) < set(COLUMNS)
