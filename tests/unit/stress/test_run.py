"""Slices of the stress run."""

from hypothesis import given
from hypothesis import strategies as st

from stress.run import slice_of


@given(
    st.integers(1, 90).map(lambda n: [f"parser-{k}" for k in range(n)]),
    st.integers(-1, 150),
    st.integers(0, 400),
)
def test_consecutive_seeds_reach_every_name(names: list[str], wanted: int, seed: int) -> None:
    count = len(slice_of(names, wanted, seed))
    assert 1 <= count <= max(wanted, 1)
    num_slices = -(-len(names) // count)
    slices = [slice_of(names, wanted, seed + k) for k in range(num_slices)]
    assert {name for chosen in slices for name in chosen} == set(names)
    assert all(len(set(chosen)) == count for chosen in slices)
