"""Values of ranks arrive as what they were: types, tuples, parts that no rank has."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.trainer.groups.typed_values import gather_values, numbers_of, value_of
from support.rank_threads import ThreadGroup, run_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    is_sure: bool
    needs: tuple[float, ...]
    budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    ticket: int
    seconds: float
    part: Part
    other: Part | None = None


WHOLE = Whole(ticket=0, seconds=0, part=Part(is_sure=False, needs=(0, 0)))


@given(
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False),
    st.booleans(),
    st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
)
def test_a_value_survives_its_numbers(
    ticket: int, seconds: float, is_sure: bool, needs: tuple[float, float]
) -> None:
    value = Whole(ticket=ticket, seconds=seconds, part=Part(is_sure=is_sure, needs=needs))
    # Of a rank that holds whole numbers where others have fractions.
    found = value_of(WHOLE, list(numbers_of(value)))
    assert found == value
    assert (type(found.ticket), type(found.part.is_sure)) == (int, bool)


def test_all_ranks_get_the_values_of_all_in_their_order() -> None:
    part = Part(is_sure=True, needs=(0.25,), budget=1.5)

    def work(group: ThreadGroup) -> tuple[Whole, ...]:
        own = Whole(ticket=group.rank, seconds=group.rank / 4, part=part, other=part)
        return gather_values(own, group)

    ranks = (1, 4, 6)
    wanted = tuple(Whole(ticket=r, seconds=r / 4, part=part, other=part) for r in ranks)
    assert run_ranks(ranks, work) == [wanted] * 3


def test_values_of_another_structure_are_our_own_mistake() -> None:
    longer = replace(WHOLE, part=Part(is_sure=False, needs=(0, 0, 0)))
    with pytest.raises(AssertionError, match="other structures"):
        value_of(WHOLE, list(numbers_of(longer)))
