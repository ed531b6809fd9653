"""Equal rows get one number, in order of appearance, whatever the width of a row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.controller.planning.token_split.min_max import unique_rows
from support.examples import examples


@pytest.mark.parametrize("width", [1, 7, 8, 9, 63, 64, 65, 130])
@pytest.mark.parametrize("is_turned", [False, True], ids=["in memory's order", "transposed"])
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 10_000), num_rows=st.integers(0, 40))
def test_rows_are_numbered_as_they_appear(
    width: int, is_turned: bool, seed: int, num_rows: int
) -> None:
    random = np.random.default_rng(seed)
    few = random.random((5, width)) < 0.5
    rows = few[random.integers(0, 5, num_rows)]
    if is_turned:
        rows = np.ascontiguousarray(rows.T).T
    first, kind = unique_rows(rows)
    seen: list[bytes] = []
    for at, row in enumerate(rows):
        content = row.tobytes()
        if content not in seen:
            seen.append(content)
            assert first[len(seen) - 1] == at
        assert kind[at] == seen.index(content)
    assert len(first) == len(seen)
    assert len(kind) == num_rows
