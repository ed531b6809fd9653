"""The permutation of any size, seed and epoch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.trainer.data.permutation import Permutation


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_each_value_comes_once(size: int, seed: int, epoch: int) -> None:
    found = Permutation(size, seed, epoch)(np.arange(size))
    assert (np.sort(found) == np.arange(size)).all()


@given(size=st.integers(1, 2**62), seed=st.integers(), data=st.data())
def test_values_asked_for_singly_and_together_agree(
    size: int, seed: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=20))
    permutation = Permutation(size, seed, 1)
    together = permutation(np.array(wanted, dtype=np.int64))
    assert ((together >= 0) & (together < size)).all()
    assert len(set(together.tolist())) == len(wanted)
    assert [int(permutation(np.array([one]))[0]) for one in wanted] == together.tolist()
