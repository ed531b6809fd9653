"""Numbers the groups of rows that are alike in several columns of whole numbers. Pure.

Tables have millions of rows: one key is made of all columns, and where the keys are not many more
than the rows they are counted, not sorted.
"""

import numpy as np

from pacekeeper.predictor.cost.features import Positions

DENSE = 4  # keys per row, up to which counting is cheaper than sorting


def grouped(*columns: Positions) -> tuple[Positions, Positions]:
    """(number of each row's group [rows], first row of each group [groups]).

    Groups are numbered from 0 in lexicographic order of the columns, the first counting most, as
    `numpy.unique` has them with axis=0. Columns are of equal length, one at least.
    """
    assert columns and all(len(column) == len(columns[0]) for column in columns)
    num_rows = len(columns[0])
    if not num_rows:
        return np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp)
    most = DENSE * num_rows + 1
    key, num_keys = np.zeros(num_rows, dtype=np.intp), 1
    for column in columns:
        digit, base = _digits(column, most)
        if num_keys * base > np.iinfo(np.intp).max:
            key, num_keys = _digits(key, 0)
        key = key * base + digit
        num_keys *= base
    if num_keys > most:
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        return number.astype(np.intp, copy=False), first
    is_there = np.zeros(num_keys, dtype=np.bool_)
    is_there[key] = True
    number = (np.cumsum(is_there) - 1)[key]
    first = np.zeros(int(is_there.sum()), dtype=np.intp)
    first[number[::-1]] = np.arange(num_rows - 1, -1, -1)  # of equal ones the last written stays
    return number, first


def _digits(column: Positions, most: int) -> tuple[Positions, int]:
    """The column from 0 on, in the same order, and how many values that takes, `most` or fewer
    where the rows allow it.
    """
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < most:
        return (column - lowest).astype(np.intp, copy=False), highest - lowest + 1
    values, digit = np.unique(column, return_inverse=True)
    return digit.astype(np.intp, copy=False), len(values)
