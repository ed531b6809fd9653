"""The stated time-out of what is frozen: all that follows the freeze fits into it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.trainer.elastic.agreement.consensus import FailureTimeouts


@given(st.floats(0.1, 1000.0))
def test_all_waits_for_a_frozen_rank_or_node_fit_into_what_is_stated(timeout_s: float) -> None:
    patience = FailureTimeouts(timeout_s=timeout_s)
    rank_s = patience.wait_s + patience.grace_s
    node_s = patience.wait_s + 2.0 * patience.answer_s  # the home of the reports, then all others
    assert max(rank_s, node_s) == pytest.approx(patience.fenced_s)
    assert patience.fenced_s + patience.resume_s == pytest.approx(timeout_s)


@given(st.floats(0.1, 1000.0))
def test_most_of_it_is_left_for_who_computes(timeout_s: float) -> None:
    patience = FailureTimeouts(timeout_s=timeout_s)
    assert patience.wait_s > timeout_s / 2
    assert min(patience.resume_s, patience.answer_s, patience.grace_s) > 0.0
