"""PLT: the closed form is what taking turns loses, and Dynamic-K stays within its limit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.partial_experts import (
    LOST_TOKENS_LIMIT,
    expected_faults,
    expected_lost_token_ratio,
    longest_save_gap,
    lost_token_ratio,
    lost_tokens_by_layer,
    mean_age,
    next_num_saved,
    select_experts,
)
from pacekeeper.core.layout.layout import Block


def in_turn(number: int, num_saved: int, experts: list[int]) -> frozenset[Block]:
    return select_experts([[0.0] * count for count in experts], num_saved, number)


class Run:
    """A run whose experts are saved in turn; counts as a real one would."""

    def __init__(self, num_experts: int, num_layers: int, period: int) -> None:
        self.period = period
        self.experts = [num_experts] * num_layers
        self.now = [[0] * num_experts for _ in self.experts]
        self.saved = [list(layer) for layer in self.now]
        self.number = self.step = 0
        self.at_save = [list(layer) for layer in self.now]

    def go_on(self, num_saved: int, routed: list[list[int]]) -> None:
        """One period, then a checkpoint."""
        for layer, tokens in enumerate(routed):
            for expert, count in enumerate(tokens):
                self.now[layer][expert] += count
        self.step += self.period
        for block in in_turn(self.number, num_saved, self.experts):
            self.saved[block.layer][block.index] = self.now[block.layer][block.index]
        self.number += 1


@given(st.integers(1, 12), st.integers(1, 12))
def test_the_mean_age_is_that_of_turns_that_go_on_for_ever(n: int, k: int) -> None:
    last = dict.fromkeys(range(n), 0)
    ages = []
    for number in range(longest_save_gap(n, k) + n):
        for block in in_turn(number, k, [n]):
            last[block.index] = number
        if number >= longest_save_gap(n, k):
            ages += [number - last[e] for e in last]
    assert mean_age(n, k) == pytest.approx(sum(ages) / len(ages))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_measured_is_planned_where_routing_is_uniform(
    gap: int, k: int, num_layers: int, num_faults: int
) -> None:
    """Faults at checkpoints, as restores always are; every layer loses alike at each of them."""
    n = gap * k
    run = Run(n, num_layers, period=7)
    lost_so_far = [0] * num_layers
    for _ in range(gap):
        run.go_on(k, [[70] * n] * num_layers)
    for _ in range(num_faults):
        run.go_on(k, [[70] * n] * num_layers)
        lost_so_far = [
            a + b
            for a, b in zip(lost_so_far, lost_tokens_by_layer(run.now, run.saved), strict=True)
        ]
    measured = lost_token_ratio(lost_so_far, [sum(layer) for layer in run.now])
    planned = expected_lost_token_ratio(
        num_faults=num_faults, period_steps=7, total_steps=run.step, num_experts=n, num_saved=k
    )
    assert measured == pytest.approx(planned)


def test_measured_is_within_a_tenth_of_planned_where_tokens_choose_by_chance() -> None:
    draw = random.Random(0)
    n, k, num_layers = 16, 1, 4
    run, lost_so_far, num_faults = Run(n, num_layers, period=1), [0] * num_layers, 0
    for number in range(400):
        routed = [[0] * n for _ in range(num_layers)]
        for layer in routed:
            for expert in draw.choices(range(n), k=200):
                layer[expert] += 1
        run.go_on(k, routed)
        if number >= n and draw.random() < 0.05:
            num_faults += 1
            more = lost_tokens_by_layer(run.now, run.saved)
            lost_so_far = [a + b for a, b in zip(lost_so_far, more, strict=True)]
    measured = lost_token_ratio(lost_so_far, [sum(layer) for layer in run.now])
    planned = expected_lost_token_ratio(
        num_faults=num_faults, period_steps=1, total_steps=400, num_experts=n, num_saved=k
    )
    assert num_faults > 5
    assert measured == pytest.approx(planned, rel=0.1)


def test_the_papers_limit_is_two_of_eight_after_one_fault_in_40_periods() -> None:
    found = expected_lost_token_ratio(
        num_faults=1, period_steps=32, total_steps=1280, num_experts=8, num_saved=2
    )
    assert found == pytest.approx(LOST_TOKENS_LIMIT)


@given(st.integers(1, 32), st.integers(1, 40), st.lists(st.integers(1, 60), max_size=30))
def test_dynamic_k_keeps_plt_within_its_limit_once_it_could(
    n: int, period: int, gaps: list[int]
) -> None:
    """Faults at any checkpoints: after the first, none takes the sum beyond the limit."""
    total, step, k, so_far = 4000, 0, 1, 0.0
    for number, gap in enumerate(gaps, 1):
        step += gap * period
        cost = expected_lost_token_ratio(
            num_faults=1, period_steps=period, total_steps=total, num_experts=n, num_saved=k
        )
        if number > 1 and so_far <= LOST_TOKENS_LIMIT:
            assert so_far + cost <= LOST_TOKENS_LIMIT + 1e-12
        so_far += cost
        before = k
        k = next_num_saved(
            num_saved=k, num_experts=n, plt_so_far=so_far, limit=LOST_TOKENS_LIMIT,
            num_faults=expected_faults(number, step, total), total_steps=total, period_steps=period,
        )  # fmt: skip
        assert before <= k <= n


@pytest.mark.parametrize(("limit", "wanted"), [(1.0, 1), (0.05, 2), (0.01, 4), (0.0, 16)])
def test_k_doubles_until_the_next_fault_fits(limit: float, wanted: int) -> None:
    """16 experts, one fault to come, 1/200 of the run between checkpoints: K = 1 costs 0.0375."""
    found = next_num_saved(
        num_saved=1, num_experts=16, plt_so_far=0.02 if limit == 0.05 else 0.0, limit=limit,
        num_faults=expected_faults(0, 10, 1000), total_steps=1000, period_steps=5,
    )  # fmt: skip
    assert found == wanted


def test_a_copy_that_knows_more_than_was_routed_is_refused() -> None:
    assert lost_tokens_by_layer([[5, 7], []], [[5, 3], []]) == (4, 0)
    with pytest.raises(ValueError, match="more tokens"):
        lost_tokens_by_layer([[5, 7]], [[6, 7]])


def test_dense_layers_have_no_part_in_the_mean() -> None:
    assert lost_token_ratio([5, 0, 1], [10, 0, 10]) == pytest.approx(0.3)
    assert lost_token_ratio([0], [0]) == 0.0
