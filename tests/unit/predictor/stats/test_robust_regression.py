"""Slopes of times against what explains them: hiccups bend none, much work tells most."""

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.robust_regression import shared_slope, work_slopes
from support.examples import seeds

NUM = 4000


def documents(random: np.random.Generator) -> Array:
    """Two regressors that go together, as forward and backward of another stage do."""
    work = random.lognormal(0.0, 0.5, NUM) - 1.0
    return np.stack([work, 2.0 * work + random.normal(0.0, 0.01, NUM)], axis=1)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("share", [0.0, 0.005, 0.02])
def test_hiccups_among_the_regressors_bend_no_slope(seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    columns = documents(random)
    target = columns @ [0.5, 0.4] + random.normal(0.0, 0.01, NUM)
    hiccup = random.random(columns.shape) < share
    slopes = work_slopes(np.where(hiccup, columns + 19.0, columns), target)
    assert slopes @ [1.0, 2.0] == pytest.approx(1.3, rel=0.005)


def test_hiccups_of_the_target_bend_no_slope() -> None:
    random = np.random.default_rng(0)
    columns = documents(random)
    target = columns @ [0.5, 0.4] + np.where(random.random(NUM) < 0.02, 19.0, 0.0)
    assert work_slopes(columns, target) @ [1.0, 2.0] == pytest.approx(1.3, rel=0.005)


def test_the_few_with_much_work_tell_more_than_the_many_with_hardly_any() -> None:
    """All that is known of the second regressor lies far out."""
    random = np.random.default_rng(0)
    work = np.where(np.arange(NUM) < 40, 100.0, 1.0) * random.normal(0.0, 0.01, NUM)
    target = 1.3 * work + random.normal(0.0, 0.03, NUM)
    assert work_slopes(work[:, None], target)[0] == pytest.approx(1.3, rel=0.02)


def test_what_lies_far_out_and_agrees_tells_in_full() -> None:
    """Four rows tell ten times as much as all others together: of one sigma of 1.1 % of the slope.

    Were they still distrusted in the end, it would be some 4 %.
    """
    off = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        work = np.where(np.arange(NUM) < 4, 100.0, 1.0) * random.choice([-0.01, 0.01], NUM)
        target = 1.3 * work + random.normal(0.0, 0.03, NUM)
        off.append(work_slopes(work[:, None], target)[0] / 1.3 - 1.0)
    assert np.sqrt(np.mean(np.square(off))) < 0.02


def test_what_tells_nothing_has_no_slope() -> None:
    random = np.random.default_rng(0)
    nothing, noise = np.zeros((NUM, 1)), random.normal(0.0, 1.0, NUM)
    assert work_slopes(nothing, noise).tolist() == [0.0]
    assert work_slopes(np.zeros((0, 2)), np.zeros(0)).tolist() == [0.0, 0.0]
    assert shared_slope(np.zeros(0), np.zeros(0)) == 0.0


def test_one_jump_of_all_is_shared() -> None:
    """As where most of a stage slows at once: no hiccup, whoever goes with it shares it."""
    random = np.random.default_rng(0)
    peers, own = random.normal(0.0, 0.003, (2, 30))
    peers[10] += 0.3
    own[10] += 0.3
    assert shared_slope(peers, own) > 0.9
    assert shared_slope(-peers, own) == 0.0
