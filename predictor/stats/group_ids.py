"""Numbers groups of rows that are equal in several integer columns.

Tables have millions of rows: all columns are combined into one key, and if the keys are not many
more than the rows, they are counted instead of sorted.
"""

import numpy as np

from pacekeeper.predictor.cost.features import Positions

DENSE = 4  # keys per row up to which counting is cheaper than sorting


def grouped(*columns: Positions) -> tuple[Positions, Positions]:
    """Number the groups of equal rows.

    Groups are numbered from 0 in lexicographic order of the columns, the first column first, as by
    `numpy.unique` with axis=0.

    Args:
        columns: at least one, of equal length [rows].

    Returns:
        (number of each row's group [rows], first row of each group [groups]).
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
    first[number[::-1]] = np.arange(num_rows - 1, -1, -1)  # the last write wins: the first row
    return number, first


def _digits(column: Positions, most: int) -> tuple[Positions, int]:
    """Map a column to integers from 0 in the same order; return them and their number.

    The number is the range of the values if that is at most `most`, else the number of distinct
    ones.
    """
    lowest, highest = int(column.min()), int(column.max())
    if highest - lowest < most:
        return (column - lowest).astype(np.intp, copy=False), highest - lowest + 1
    values, digit = np.unique(column, return_inverse=True)
    return digit.astype(np.intp, copy=False), len(values)
