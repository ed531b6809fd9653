"""Survival in cases known by hand, at sizes that can not be tried out, and its errors."""

import pytest

from pacekeeper.controller.planning import reliability as module
from pacekeeper.controller.planning.reliability import (
    NEGLIGIBLE,
    kill_sets,
    loss_probability,
    survival,
    survival_bound,
    union_bound,
)


def test_segments_of_their_own_are_counted_exactly_at_any_size() -> None:
    segments = [range(i, i + 2) for i in range(0, 1000, 2)]
    found = survival(kill_sets(segments), 1000, max_losses=3)
    assert found.is_exact
    assert found.by_losses[1] == 1.0
    assert found.by_losses[2] == pytest.approx(1.0 - 500 / (1000 * 999 / 2))


def test_layers_that_share_their_kill_sets_cost_nothing_more() -> None:
    one_layer = [(0, 1), (2, 3), (4, 5)]
    assert kill_sets(one_layer * 12) == kill_sets(one_layer)


def test_a_tiny_loss_probability_keeps_its_digits() -> None:
    killers = kill_sets([(0, 1), (2, 3)])
    found = loss_probability(killers, dict.fromkeys(range(4), 1e-9))
    assert found == pytest.approx(2e-18, rel=1e-6)


def test_what_can_not_be_counted_is_sampled_and_says_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BRANCHES", 3)
    ring = kill_sets([(i, (i + 1) % 40) for i in range(40)])
    found = survival(ring, 40, max_losses=6)
    assert not found.is_exact
    assert found.standard_error[3] == 0.0 and found.standard_error[4] > 0.0
    monkeypatch.undo()
    exact = survival(ring, 40, max_losses=6)
    assert exact.is_exact
    for k in range(7):
        assert found.by_losses[k] == pytest.approx(
            exact.by_losses[k], abs=5.0 * found.standard_error[k] + 1e-12
        )


def test_a_loss_probability_too_long_to_find_is_bounded_from_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = kill_sets([(i, (i + 1) % 40) for i in range(40)])
    p = dict.fromkeys(range(40), 0.01)
    exact = loss_probability(ring, p)
    monkeypatch.setattr(module, "MAX_BRANCHES", 3)
    assert exact <= loss_probability(ring, p) == pytest.approx(40 * 1e-4)


def test_another_seed_takes_other_samples_the_same_seed_the_same() -> None:
    ring = kill_sets([(i, (i + 1) % 40) for i in range(40)])
    parts = [module._sampled(ring, 40, 8, seed).by_losses for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]


def test_the_bound_is_that_of_the_rarest_expert() -> None:
    assert survival_bound(10, 2, 3) == 1.0
    assert survival_bound(10, 3, 3) == pytest.approx(1.0 - 1 / 120)


def test_an_expert_without_host_and_unknown_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="without host"):
        kill_sets([(0, 1), ()])
    with pytest.raises(ValueError, match="nodes 0 to 2"):
        survival(kill_sets([(0, 3)]), 3)
    with pytest.raises(ValueError, match=r"\[1\]"):
        loss_probability(kill_sets([(0, 1)]), {0: 0.5})
    with pytest.raises(ValueError, match="0 to 1"):
        loss_probability(kill_sets([(0,)]), {0: 1.5})


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
