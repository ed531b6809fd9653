"""The permutation: exact, well mixed, and the same for ever."""

from collections import Counter

import numpy as np
import pytest

from pacekeeper.trainer.data.permutation import Permutation


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return list(map(int, Permutation(size, seed, epoch)(np.arange(size))))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 99, 4096, 99_991])
def test_it_is_a_bijection(size: int) -> None:
    assert sorted(order(size)) == list(range(size))


def test_the_order_of_a_seed_never_changes() -> None:
    """A job resumes with another version of numpy or of pacekeeper, and repeats no row."""
    assert order(10, seed=7, epoch=3) == [8, 2, 9, 1, 6, 0, 5, 4, 7, 3]
    assert Permutation(10**12, 1, 2)(np.array([0, 1, 10**12 - 1])).tolist() == [
        481084520435,
        586649551316,
        380413663764,
    ]


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(-5, 5) for epoch in range(5)}
    assert len(orders) == 50


def test_all_orders_of_few_values_are_about_as_frequent() -> None:
    counts = Counter(tuple(order(4, seed, epoch)) for seed in range(600) for epoch in range(4))
    assert len(counts) == 24
    expected = 2400 / 24
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 49.7  # 0.1 % of fair draws pass this, of 23 degrees of freedom


def test_neighbours_and_runs_are_mixed() -> None:
    found = np.array(order(100_003, seed=1))
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.01
    steps = np.bincount(found[:1000] * 10 // 100_003, minlength=10)
    assert steps.min() > 60
    other = np.array(order(100_003, seed=1, epoch=1))
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.01
