"""Micro-batches as columns say what their records would."""

from dataclasses import replace

from pacekeeper.core.telemetry.microbatch_table import (
    MicroBatchTable,
    chain_column,
    table_from_records,
)
from pacekeeper.core.telemetry.records import MicroBatchRecord

FIRST = MicroBatchRecord(
    rank=3, step=7, micro_batch=0, generation=1, compute_s=0.5, tokens=100, wait_s=0.1
)
RECORDS = [FIRST, replace(FIRST, rank=4, tokens=50), replace(FIRST, micro_batch=1, step=8)]
BARE = MicroBatchTable(
    columns={
        **{"rank": [9], "step": [7], "micro_batch": [0], "generation": [1]},
        **{"compute_s": [0.2], "tokens": [10]},
    }
)


def test_a_table_gives_back_the_records_it_is_of() -> None:
    table = table_from_records(RECORDS)
    assert len(table) == 3
    assert list(table.records()) == RECORDS
    assert list(table.of_rank(3)) == [RECORDS[0], RECORDS[2]]
    assert list(table.of_rank(5)) == []


def test_a_column_that_is_not_there_holds_what_a_record_has_by_default() -> None:
    (record,) = BARE.records()
    assert record == MicroBatchRecord(
        rank=9, step=7, micro_batch=0, generation=1, compute_s=0.2, tokens=10
    )
    assert BARE.column("tensor_share") == [1.0]
    tables = [table_from_records(RECORDS[:2]), BARE]
    assert list(chain_column(tables, "tensor_share")) == [1.0, 1.0, 1.0]
    assert list(chain_column(tables, "wait_s")) == [0.1, 0.1, None]
    assert list(chain_column(tables, "rank")) == [3, 4, 9]


def test_each_step_has_a_table_of_its_own() -> None:
    found = {step: list(own.records()) for step, own in table_from_records(RECORDS).by_step(most=2)}
    assert found == {7: RECORDS[:2], 8: RECORDS[2:]}
    ((newest, own),) = table_from_records(RECORDS[::-1]).by_step(most=1)
    assert (newest, list(own.records())) == (8, RECORDS[2:])
    ((step, same),) = BARE.by_step(most=1)
    assert (step, same) == (7, BARE)
