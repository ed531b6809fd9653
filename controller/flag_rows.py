"""Equal rows of flags, found by their bytes: far quicker than sorting rows. Pure."""

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.intp]


def numbered_rows(rows: Flags) -> tuple[Counts, Counts]:
    """The first row [kinds] of each kind, and the kind [rows] of each; in order of appearance."""
    number: dict[bytes, int] = {}
    first: list[int] = []
    kinds: list[int] = []
    for at, row in enumerate(np.packbits(rows, axis=1)):
        kind = number.setdefault(row.tobytes(), len(number))
        if kind == len(first):
            first.append(at)
        kinds.append(kind)
    return np.array(first, dtype=np.intp), np.array(kinds, dtype=np.intp)
