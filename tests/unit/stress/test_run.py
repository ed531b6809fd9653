"""Slices of the stress run."""

from hypothesis import given
from hypothesis import strategies as st

from stress.run import FUZZ_S, parsers_of_slice


@given(
    st.integers(1, 90).map(lambda n: [f"parser-{k}" for k in range(n)]),
    st.floats(0.0, 900.0),
    st.integers(0, 400),
)
def test_consecutive_seeds_reach_every_parser(names: list[str], budget_s: float, seed: int) -> None:
    count = len(parsers_of_slice(names, budget_s, seed))
    num_slices = -(-len(names) // count)
    slices = [parsers_of_slice(names, budget_s, seed + k) for k in range(num_slices)]
    assert {name for chosen in slices for name in chosen} == set(names)
    assert all(len(set(chosen)) == count for chosen in slices)
    assert count == 1 or count * FUZZ_S <= budget_s
