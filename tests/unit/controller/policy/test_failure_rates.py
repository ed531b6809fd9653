"""How likely a rank is lost with the next loss: as told, or as the losses of the job say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.controller.policy.failure_rates import KEPT, add_loss, failure_probability

PARTS = st.lists(st.floats(0.0, 1.0), max_size=KEPT)


def test_a_loss_is_the_part_of_the_ranks_that_are_gone() -> None:
    assert add_loss((), (0, 1, 2, 3), (0, 1, 3)) == (0.25,)
    assert add_loss((0.25,), (0, 1, 3), (0, 7)) == (0.25, 2 / 3), "7 is a newcomer"
    assert add_loss((0.25,), (0, 1), (0, 1, 2)) == (0.25,), "who joins loses nobody"
    assert add_loss((0.25,), (), (0,)) == (0.25,), "a job begins"
    assert len(add_loss((0.5,) * KEPT, (0, 1), (1,))) == KEPT


def test_settings_speak_until_the_second_loss() -> None:
    assert failure_probability(0.01, ()) == failure_probability(0.01, (0.5,)) == 0.01
    assert failure_probability(0.01, (0.5, 0.5)) == pytest.approx((0.02 + 1.0) / 4)
    assert failure_probability(0.01, (0.25,) * 30) == pytest.approx(0.25, rel=0.1)


@given(told=st.floats(0.0, 1.0), parts=PARTS)
def test_it_is_never_below_what_is_told_nor_above_what_was_seen(
    told: float, parts: list[float]
) -> None:
    found = failure_probability(told, tuple(parts))
    assert told <= found <= max([told, *parts]) + 1e-12
