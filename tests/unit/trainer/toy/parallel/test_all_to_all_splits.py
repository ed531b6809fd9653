"""Splits and exchanges worked out by hand, and what is refused."""

import numpy as np
import pytest

from pacekeeper.trainer.toy.parallel.all_to_all_splits import (
    Neighbourhood,
    exchange,
    neighbourhoods,
)
from pacekeeper.trainer.toy.parallel.token_balancing import (
    ReplicaIndex,
    balance_rows,
    whole_capacities,
)


def test_a_slow_rank_takes_fewer_rows() -> None:
    pairs = ReplicaIndex.of([[0, 1]], 2)
    split = balance_rows(pairs, np.array([[60], [60]]), whole_capacities([0.5, 1.0]))
    assert split.rows_P.tolist() == [40, 80]
    assert split.bottleneck == (0, 1)


def test_an_expert_that_only_one_rank_holds_is_the_witness() -> None:
    pairs = ReplicaIndex.of([[0], [0, 1]], 2)
    split = balance_rows(pairs, np.array([[90, 5], [0, 5]]), whole_capacities([1.0, 1.0]))
    assert split.rows_P.tolist() == [90, 0, 10]
    assert split.bottleneck == (0,)


def test_rows_move_on_where_room_is_only_further_along() -> None:
    # Rank 0 must hand expert 1 to rank 1, which hands expert 2 to rank 2.
    pairs = ReplicaIndex.of([[0], [0, 1], [1, 2]], 3)
    counts = np.array([[30, 30, 0], [0, 0, 30], [0, 0, 0]])
    split = balance_rows(pairs, counts, whole_capacities([1.0, 1.0, 1.0]))
    assert split.rows_P.tolist() == [30, 0, 30, 0, 30]


def test_rows_stay_where_they_come_from_while_balance_allows() -> None:
    pairs = ReplicaIndex.of([[0, 1], [0, 1]], 2)
    counts = np.array([[10, 0], [0, 10]])
    split = balance_rows(pairs, counts, whole_capacities([1.0, 1.0]))
    assert split.rows_P.tolist() == [10, 0, 0, 10]
    sent = exchange(pairs, counts, split.rows_P, 0, neighbourhoods(pairs, [0, 1])).sent_P
    assert sent.tolist() == [10, 0, 0, 0]


def test_one_node_or_one_rank_a_node_needs_no_pass_of_its_own() -> None:
    pairs = ReplicaIndex.of([[0, 1, 2]], 3)
    assert len(neighbourhoods(pairs, [5, 5, 5])) == 1
    assert len(neighbourhoods(pairs, [0, 1, 2])) == 1
    assert len(neighbourhoods(pairs, [0, 1, 0])) == 2


def test_no_rows_at_all_are_split_too() -> None:
    pairs = ReplicaIndex.of([[0, 1], [1]], 2)
    counts = np.zeros((2, 2), dtype=np.int64)
    split = balance_rows(pairs, counts, whole_capacities([1.0, 0.5]))
    assert split.rows_P.tolist() == [0, 0, 0]


def test_hosts_speeds_and_nodes_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="expert 1"):
        ReplicaIndex.of([[0], []], 1)
    with pytest.raises(ValueError, match="expert 0"):
        ReplicaIndex.of([[0, 2]], 2)
    with pytest.raises(ValueError, match="above 0"):
        whole_capacities([1.0, 0.0])
    with pytest.raises(ValueError, match="nodes for"):
        Neighbourhood.of(ReplicaIndex.of([[0]], 1), [0, 1])
