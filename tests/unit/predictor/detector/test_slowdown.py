"""Rules on one rank's recent log ratios, as tables."""

from math import log

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.detector.slowdown import changed, is_over, measured, of_mean

CONFIG = DetectorConfig()
QUIET, NOISY = 0.02, 0.09
HEALTHY = [0.01, -0.02, 0.0, 0.015, -0.01, 0.005]


def series(*ratios: float) -> np.ndarray:
    return np.array(HEALTHY + [log(ratio) for ratio in ratios])


@pytest.mark.parametrize(
    ("ratios", "sigma", "doubt", "slowdown", "num_steps"),
    [
        pytest.param([1.6, 1.6], QUIET, 0.0, 1.6, 2, id="two steps of a device are enough"),
        pytest.param([1.6], QUIET, 0.0, None, 0, id="one is not"),
        pytest.param([1.6, 1.0], QUIET, 0.0, None, 0, id="a single wild step is not"),
        pytest.param([1.25, 1.6], QUIET, 0.0, None, 0, id="begun in mid-step: wait for one more"),
        pytest.param([1.25, 1.6, 1.6], QUIET, 0.0, 1.6, 2, id="the mixed step does not count"),
        pytest.param([*[0.9] * 8, *[1.03] * 20], QUIET / 5, 0.0, 1.03, 20, id="small, for long"),
        pytest.param([1.2, 1.2], QUIET, 0.0, 1.2, 2, id="a small one of a quiet device"),
        pytest.param([1.6, 1.6, 1.6], NOISY, 0.0, None, 0, id="a noisy clock must show more"),
        pytest.param([1.6] * 4, NOISY, 0.0, 1.6, 4, id="twice as many"),
        pytest.param([1.6, 1.6, 0.98, 1.6, 1.6], NOISY, 0.0, 1.6, 5, id="one in five may dissent"),
        pytest.param([1.2] * 12, NOISY, 0.0, 1.2, 12, id="small and noisy, but for long"),
        pytest.param([1.3] * 6, QUIET, 0.3, None, 0, id="what the model may be wrong by"),
        pytest.param([1.6] * 6, QUIET, 0.3, 1.6, 6, id="more than it may be wrong by"),
        pytest.param([0.5] * 9, QUIET, 0.0, None, 0, id="faster is no fault"),
    ],
)
def test_the_slowdown_that_the_last_steps_agree_on(
    ratios: list[float], sigma: float, doubt: float, slowdown: float | None, num_steps: int
) -> None:
    found = measured(CONFIG, series(*ratios), sigma=sigma, doubt=doubt)
    if slowdown is None:
        assert found is None
    else:
        assert found is not None
        assert found.value == pytest.approx(slowdown, rel=0.01)
        assert found.num_steps == num_steps


@pytest.mark.parametrize(
    ("ratios", "told", "sigma", "doubt", "over"),
    [
        pytest.param([1.6, 1.0, 1.0, 1.0], 1.6, QUIET, 0.0, True, id="three healthy steps"),
        pytest.param([1.6, 1.0, 1.0], 1.6, QUIET, 0.0, False, id="two are too few"),
        pytest.param([1.6, 1.0, 1.0, 1.5], 1.6, QUIET, 0.0, False, id="slow again"),
        pytest.param([1.3] * 9, 1.6, QUIET, 0.0, False, id="better is not healthy"),
        pytest.param([1.6] + [1.0] * 3, 1.6, NOISY, 0.0, False, id="a noisy clock must show more"),
        pytest.param([1.6] + [1.0] * 6, 1.6, NOISY, 0.0, True, id="twice as many"),
        pytest.param([1.15] + [1.0] * 6, 1.15, NOISY, 0.0, False, id="hard to tell apart: wait"),
        pytest.param([1.6] + [1.0] * 6, 1.2, QUIET, 0.3, False, id="the model may be wrong by it"),
        pytest.param([1.1] * 9, 1.6, QUIET, 0.06, True, id="all that is left may be the model"),
        pytest.param([1.3] * 9, 1.6, QUIET, 0.06, False, id="more is left than it may explain"),
    ],
)
def test_a_finding_is_over_when_its_rank_is_clearly_back(
    ratios: list[float], told: float, sigma: float, doubt: float, over: bool
) -> None:
    ill = np.array([log(1.6)] * 20 + [log(ratio) for ratio in ratios])
    assert is_over(CONFIG, ill, slowdown=told, sigma=sigma, doubt=doubt) is over


@pytest.mark.parametrize(
    ("ratios", "now"),
    [
        pytest.param([2.0] * 5, 2.0, id="worse"),
        pytest.param([1.3] * 5, 1.3, id="better"),
        pytest.param([2.0] * 3, None, id="still settling"),
        pytest.param([1.65] * 9, None, id="not worth telling"),
        pytest.param([1.0] * 9, None, id="healthy is a recovery, not a change"),
        pytest.param([1.08] * 9, None, id="hardly slow: perhaps on its way back"),
        pytest.param([1.08] * 20, 1.08, id="hardly slow, but for long"),
    ],
)
def test_a_changed_slowdown_is_told_once_it_has_settled(
    ratios: list[float], now: float | None
) -> None:
    ill = np.array([log(1.6)] * 6 + [log(ratio) for ratio in ratios])
    value = changed(CONFIG, ill, slowdown=1.6, sigma=QUIET, doubt=0.0)
    assert value == (None if now is None else pytest.approx(now, rel=0.01))


def test_what_the_model_may_explain_is_not_told_as_a_smaller_slowdown() -> None:
    """From "hardly slow" a recovery could not be told any more: the finding would stay for ever."""
    ill = np.array([log(1.6)] * 6 + [log(1.1)] * 20)
    assert changed(CONFIG, ill, slowdown=1.6, sigma=QUIET, doubt=0.06) is None
    assert changed(CONFIG, ill, slowdown=1.6, sigma=QUIET, doubt=0.0) == pytest.approx(1.1)


def test_the_interval_narrows_with_the_steps_and_widens_with_the_doubt() -> None:
    few, many, doubtful = (
        measured(CONFIG, series(*ratios), sigma=QUIET, doubt=doubt)
        for ratios, doubt in (([1.2] * 2, 0.0), ([1.2] * 20, 0.0), ([1.2] * 20, 0.1))
    )
    assert few is not None and many is not None and doubtful is not None
    assert few.interval[0] < many.interval[0] < 1.2 < many.interval[1] < few.interval[1]
    assert doubtful.interval[0] < many.interval[0]


def test_a_smallest_slowdown_of_interest_is_kept_to() -> None:
    ratios = series(1.08, 1.08, 1.08)
    assert measured(CONFIG, ratios, sigma=QUIET, doubt=0.0) is not None
    assert measured(CONFIG, ratios, sigma=QUIET, doubt=0.0, least=1.1) is None


def test_what_the_model_doubted_then_still_counts_when_a_better_one_is_fitted() -> None:
    ratios = series(1.15, 1.15, 1.15, 1.15)
    then = np.where(np.arange(len(ratios)) < len(ratios) - 1, 0.15, 0.01)
    assert measured(CONFIG, ratios, sigma=QUIET, doubt=0.01) is not None
    assert measured(CONFIG, ratios, sigma=QUIET, doubt=then) is None


def test_the_mean_of_all_last_steps_and_the_median_of_the_slow_ones() -> None:
    log_ratios = series(1.5, 1.0, 1.0, 3.0, 1.0, 1.0, 2.0)
    found = of_mean(log_ratios, log_ratios > log(1.2), 7)
    assert (found.num_steps, found.num_slow) == (7, 3)
    assert found.value == pytest.approx(1.5)
    assert found.when_slow == pytest.approx(2.0)
