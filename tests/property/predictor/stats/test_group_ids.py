"""Rows that are alike are numbered as `numpy.unique` numbers them, however large their numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.predictor.stats.group_ids import grouped

numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**60), 2**60), st.just(2**53))


@given(st.integers(1, 4), st.data())
def test_groups_are_those_of_unique(num_columns: int, data: st.DataObject) -> None:
    row = st.tuples(*[numbers] * num_columns)
    rows = np.array(data.draw(st.lists(row, min_size=1, max_size=30)), dtype=np.intp)
    _, first, number = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    told, told_first = grouped(*rows.T)
    assert told.tolist() == number.reshape(-1).tolist()
    assert told_first.tolist() == first.tolist()


def test_no_rows_are_no_groups() -> None:
    number, first = grouped(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp))
    assert len(number) == len(first) == 0
