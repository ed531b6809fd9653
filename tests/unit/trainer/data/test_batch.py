"""Batches: positions, targets, and micro-batches without a copy."""

import numpy as np

from pacekeeper.trainer.data.batch import NO_TARGET, Batch, make_batch

END = 9


def batch_of(*rows: str, **settings: bool) -> Batch:
    tokens = np.array([[int(token) for token in row] for row in rows], dtype=np.int64)
    is_start = np.zeros(tokens.shape, np.bool_)
    is_start[:, 1:] = tokens[:, :-1] == END
    is_start[:, 0] = True
    return make_batch(tokens, is_start, **settings)


def test_documents_have_positions_and_targets_of_their_own() -> None:
    batch = batch_of("1293945", "1234567")
    assert batch.input_ids.tolist() == [[1, 2, 9, 3, 9, 4], [1, 2, 3, 4, 5, 6]]
    assert batch.labels.tolist() == [
        [2, 9, NO_TARGET, 9, NO_TARGET, 5],
        [2, 3, 4, 5, 6, 7],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_a_row_that_ends_with_a_document_has_no_target_there() -> None:
    batch = batch_of("1291")
    assert batch.labels.tolist() == [[2, 9, NO_TARGET]]


def test_documents_of_one_token() -> None:
    batch = batch_of("9991")
    assert batch.position_ids.tolist() == [[0, 0, 0]]
    assert batch.labels.tolist() == [[NO_TARGET] * 3]


def test_a_row_may_be_one_sequence_with_a_target_everywhere() -> None:
    batch = batch_of("129394", separate_documents=False, predict_across_documents=True)
    assert batch.labels.tolist() == [[2, 9, 3, 9, 4]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4]]
