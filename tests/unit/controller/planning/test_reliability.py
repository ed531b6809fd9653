"""Survival in cases known by hand, at sizes that can not be tried out, and its errors."""

import pytest

from pacekeeper.controller.planning import reliability as module
from pacekeeper.controller.planning.reliability import (
    DENSE_NODES,
    FEW,
    NEGLIGIBLE,
    loss_probability,
    minimal_cut_sets,
    survival,
    survival_bound,
    union_bound,
)


def test_segments_of_their_own_are_counted_exactly_at_any_size() -> None:
    segments = [range(i, i + 2) for i in range(0, 1000, 2)]
    found = survival(minimal_cut_sets(segments), 1000, max_losses=3)
    assert len(found) == 4
    assert found[1] == 1.0
    assert found[2] == pytest.approx(1.0 - 500 / (1000 * 999 / 2))


def test_layers_that_share_their_cut_sets_cost_nothing_more() -> None:
    one_layer = [(0, 1), (2, 3), (4, 5)]
    assert minimal_cut_sets(one_layer * 12) == minimal_cut_sets(one_layer)


def test_a_tiny_loss_probability_keeps_its_digits() -> None:
    killers = minimal_cut_sets([(0, 1), (2, 3)])
    found = loss_probability(killers, dict.fromkeys(range(4), 1e-9))
    assert found == pytest.approx(2e-18, rel=1e-6)


def test_with_many_nodes_only_losses_with_a_closed_form_are_counted() -> None:
    ring = minimal_cut_sets([(i, (i + 1) % 40) for i in range(40)])
    found = survival(ring, 40, max_losses=6)
    pairs = 40 / (40 * 39 / 2)
    assert found[:3] == pytest.approx((1.0, 1.0, 1.0 - pairs))
    assert len(found) == FEW + 1
    assert len(survival(minimal_cut_sets([(0, 1)]), DENSE_NODES, max_losses=6)) == 7


def test_a_loss_probability_too_long_to_find_is_bounded_from_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = minimal_cut_sets([(i, (i + 1) % 40) for i in range(40)])
    p = dict.fromkeys(range(40), 0.01)
    exact = loss_probability(ring, p)
    monkeypatch.setattr(module, "MAX_BRANCHES", 3)
    assert exact <= loss_probability(ring, p) == pytest.approx(40 * 1e-4)


def test_the_bound_is_that_of_the_rarest_expert() -> None:
    assert survival_bound(10, 2, 3) == 1.0
    assert survival_bound(10, 3, 3) == pytest.approx(1.0 - 1 / 120)


def test_an_expert_without_replica_and_unknown_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="without replica"):
        minimal_cut_sets([(0, 1), ()])
    with pytest.raises(ValueError, match="nodes 0 to 2"):
        survival(minimal_cut_sets([(0, 3)]), 3)
    with pytest.raises(ValueError, match=r"\[1\]"):
        loss_probability(minimal_cut_sets([(0, 1)]), {0: 0.5})
    with pytest.raises(ValueError, match="0 to 1"):
        loss_probability(minimal_cut_sets([(0,)]), {0: 1.5})


def test_sets_of_hundreds_of_nodes_are_as_good_as_never_lost_and_told_as_their_sum() -> None:
    killers = [frozenset(range(first, first + 300)) for first in range(16)]
    risk = dict.fromkeys(range(400), 0.13)
    assert loss_probability(killers, risk) == union_bound(killers, risk) < NEGLIGIBLE
    # What is not negligible is counted: the sum would be a tenth above it.
    near = [frozenset({*range(10), 10 + at}) for at in range(20)]
    exact = 0.01**10 * (1.0 - 0.99**20)
    assert loss_probability(near, dict.fromkeys(range(30), 0.01)) == pytest.approx(
        exact, rel=1e-9, abs=0.0
    )
