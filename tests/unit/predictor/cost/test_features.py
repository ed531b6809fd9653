"""Records of one step become one row of work per rank."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import FEATURES, sample_of


def record(
    rank: int, micro_batch: int = 0, *, step: int = 7, generation: int = 2
) -> MicroBatchRecord:
    return MicroBatchRecord(
        rank=rank,
        step=step,
        micro_batch=micro_batch,
        generation=generation,
        compute_s=0.1 + rank,
        tokens=100 + rank,
        sum_len_squared=5000,
        expert_rows=40,
        num_active_experts=3,
        num_documents=6,
        head_tokens=90,
        rows_over_16=8,
    )


def test_features_stand_in_the_order_of_their_names() -> None:
    assert dict(zip(FEATURES, sample_of([record(1)]).features[0], strict=True)) == {
        "one": 1.0,
        "tokens": 101.0,
        "sum_len_squared": 5000.0,
        "expert_rows": 40.0,
        "num_active_experts": 3.0,
        "num_documents": 6.0,
        "head_tokens": 90.0,
        "rows_over_16": 8.0,
        "rows_over_64": 0.0,
        "rows_over_256": 0.0,
        "rows_over_1024": 0.0,
    }


def test_micro_batches_of_a_rank_add_up_and_ranks_ascend() -> None:
    sample = sample_of([record(5), record(2, 1), record(2, 0)])
    assert sample.ranks == (2, 5)
    assert (sample.step, sample.generation) == (7, 2)
    assert sample.features.tolist() == [
        [2, 204, 10000, 80, 6, 12, 180, 16, 0, 0, 0],
        [1, 105, 5000, 40, 3, 6, 90, 8, 0, 0, 0],
    ]
    assert sample.observed_s == pytest.approx([4.2, 5.1])


def test_a_rank_that_holds_a_part_of_the_dense_layers_does_that_part_of_their_work() -> None:
    part = replace(record(1), tensor_share=0.25)
    whole, quarter = sample_of([record(1)]).features[0], sample_of([part]).features[0]
    share = dict(zip(FEATURES, quarter / np.maximum(whole, 1.0), strict=True))
    dense = {"tokens", "sum_len_squared", "num_documents"}
    told = {name for name in FEATURES if not name.startswith("rows_over") or name.endswith("_16")}
    assert all(share[name] == (0.25 if name in dense else 1.0) for name in told)


def test_a_sample_is_read_only() -> None:
    sample = sample_of([record(0)])
    with pytest.raises(ValueError, match="read-only"):
        sample.features[0, 0] = 2.0
    with pytest.raises(ValueError, match="read-only"):
        np.multiply(sample.observed_s, 2.0, out=sample.observed_s)


@pytest.mark.parametrize(
    "records",
    [[], [record(0), record(1, step=8)], [record(0), record(1, generation=3)]],
    ids=["none", "two steps", "two generations"],
)
def test_anything_but_one_step_of_one_generation_is_refused(
    records: list[MicroBatchRecord],
) -> None:
    with pytest.raises(ValueError, match="step"):
        sample_of(records)


def test_parts_stand_in_the_order_of_micro_batches_and_ranks() -> None:
    sample = sample_of([record(5, 9), record(2, 9), record(2, 4), record(5, 4)])
    assert sample.parts is not None
    assert sample.parts.observed_s.tolist() == [[2.1, 5.1], [2.1, 5.1]]
    assert sample.parts.features[:, :, 0].tolist() == [[1, 1], [1, 1]]
    assert sample.parts.features[1, :, 1].tolist() == [102, 105]


@pytest.mark.parametrize(
    "records",
    [
        [record(1), record(2)],
        [record(1, 0), record(1, 1), record(2, 0)],
        [record(1, 0), record(1, 1), record(2, 0), record(2, 2)],
        [record(1, 0), record(1, 0), record(2, 0), record(2, 1)],
    ],
    ids=["one micro-batch", "one is missing", "another one", "one came twice"],
)
def test_there_are_no_parts_unless_all_ranks_told_the_same_ones(
    records: list[MicroBatchRecord],
) -> None:
    assert sample_of(records).parts is None
