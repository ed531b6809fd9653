"""Micro-batches in the charts: the rate of false alarms asked for, and no more than is there."""

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.online import cusum
from pacekeeper.predictor.online.microbatch_residuals import MicrobatchResiduals
from pacekeeper.predictor.online.thresholds import START_STEPS, Thresholds, thresholds
from pacekeeper.predictor.stats.cusum_design import LEAST_HISTORY

RANKS, PARTS, SIGMA, STEP_S = 4_000, 8, 0.02, 0.5


def limits(*, rate: float, parts: Array | None = None, parts_per_step: int = PARTS) -> Thresholds:
    sample = StepSample(
        step=0,
        generation=1,
        ranks=tuple(range(RANKS)),
        features=np.ones((RANKS, len(FEATURES))),
        observed_s=np.full(RANKS, STEP_S),
    )
    # Enough to know sigma, too few to say their law.
    residuals = np.random.default_rng(0).normal(0.0, SIGMA, (4_000, 4))
    return thresholds(
        rate,
        [sample] * START_STEPS,
        sigma=SIGMA,
        residuals=residuals,
        parts=parts,
        parts_per_step=parts_per_step,
    )


def fold(rules: Thresholds, charts: cusum.Charts, step: int, parts: Array) -> cusum.Charts:
    ratios = MicrobatchResiduals(
        log_ratio=parts, doubt=np.zeros_like(parts), size=np.ones_like(parts)
    )
    return cusum.advance(
        rules,
        charts,
        step=step,
        log_ratio=parts.mean(axis=0),
        doubt=np.zeros(RANKS),
        sigma=SIGMA,
        is_open=np.zeros(RANKS, dtype=np.bool_),
        parts=ratios,
    )


def test_charts_of_micro_batches_keep_to_the_rate_asked_for() -> None:
    asked, steps, draw = 200_000.0, 60, np.random.default_rng(3)
    rules = limits(rate=asked)
    charts, crossed = cusum.with_ranks(cusum.no_charts(), range(RANKS)), np.zeros(RANKS, np.bool_)
    for step in range(steps):
        charts = fold(rules, charts, step, SIGMA * PARTS**0.5 * draw.normal(size=(PARTS, RANKS)))
        crossed |= cusum.suspicion(rules, charts) >= 1.0
    per_day = -np.log(1.0 - crossed.mean()) * RANKS / (steps * STEP_S) * 86_400
    assert asked / 2 < per_day < asked * 2


def test_more_micro_batches_take_higher_thresholds() -> None:
    one, many = limits(rate=0.1, parts_per_step=1), limits(rate=0.1)
    assert all(m.h > o.h for m, o in zip(many.rules, one.rules, strict=True))


def test_what_a_steps_micro_batches_share_is_no_more_evidence_than_one_step() -> None:
    rules, draw = limits(rate=0.1), np.random.default_rng(4)
    together = cusum.with_ranks(cusum.no_charts(), range(RANKS))
    whole = together
    for step in range(40):
        shared = SIGMA * draw.normal(size=RANKS)
        together = fold(rules, together, step, np.tile(shared, (PARTS, 1)))
        whole = fold(rules, whole, step, shared[None])
    highest = [float(cusum.suspicion(rules, charts).max()) for charts in (together, whole)]
    assert highest[0] <= highest[1] < 1.0


def test_wild_micro_batches_are_clipped_by_their_own_law() -> None:
    draw = np.random.default_rng(5)
    wild = SIGMA * PARTS**0.5 * draw.standard_t(3, (LEAST_HISTORY // RANKS + 2, RANKS)) / 1.73
    assert limits(rate=0.1, parts=wild).rules != limits(rate=0.1).rules


@pytest.mark.parametrize("missing", [0, PARTS - 1])
def test_a_rank_without_a_micro_batch_keeps_its_charts(missing: int) -> None:
    rules = limits(rate=0.1)
    charts = cusum.with_ranks(cusum.no_charts(), range(RANKS))
    parts = np.full((PARTS, RANKS), 5 * SIGMA)
    parts[missing, 0] = np.nan
    charts = fold(rules, charts, 0, parts)
    assert 0.0 < charts.levels[0, 0] < charts.levels[0, 1]
