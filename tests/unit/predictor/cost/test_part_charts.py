"""Micro-batches in the charts: the rate of false alarms asked for, and no more than is there."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.predictor.cost.features import FEATURES, Array, StepSample
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.excursions import Excursions
from pacekeeper.predictor.detector.microbatch_residuals import MicrobatchResiduals
from pacekeeper.predictor.detector.thresholds import START_STEPS, StepNoise, Thresholds, thresholds

RANKS, PARTS, SIGMA, STEP_S = 4_000, 8, 0.02, 0.5


def limits(
    *, rate: float, excursions: Excursions | None = None, parts_per_step: int = PARTS
) -> Thresholds:
    sample = StepSample(
        step=0,
        generation=1,
        ranks=tuple(range(RANKS)),
        features=np.ones((RANKS, len(FEATURES))),
        observed_s=np.full(RANKS, STEP_S),
    )
    return thresholds(
        rate,
        [sample] * START_STEPS,
        noise=StepNoise(sigma=SIGMA, freedom=1e6),
        excursions=excursions or Excursions(),
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


@pytest.mark.parametrize("law", ["normal", "t3"])
def test_charts_of_micro_batches_keep_to_the_rate_asked_for(law: str) -> None:
    asked, steps, draw = 50_000.0, 240, np.random.default_rng(3)
    charts, crossed, taught = cusum.with_ranks(cusum.no_charts(), range(RANKS)), 0, 140
    for step in range(steps):
        rules = limits(rate=asked, excursions=charts.excursions)
        parts = draw.normal(size=(PARTS, RANKS))
        if law == "t3":
            parts = draw.standard_t(3, (PARTS, RANKS)) / 1.13
        charts = fold(rules, charts, step, SIGMA * PARTS**0.5 * parts)
        alarms = cusum.suspicion(rules, charts) >= 1.0
        charts = replace(charts, levels=np.where(alarms, 0.0, charts.levels))
        crossed += int(alarms.sum()) if step >= taught else 0
    per_day = crossed / ((steps - taught) * STEP_S) * 86_400
    assert asked / 4 < per_day < asked * 2


def test_more_micro_batches_take_higher_thresholds() -> None:
    one, many = limits(rate=0.1, parts_per_step=1), limits(rate=0.1)
    assert all(m.h >= o.h for m, o in zip(many.rules, one.rules, strict=True))
    assert many.rules[0].h > one.rules[0].h


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


@pytest.mark.parametrize("missing", [0, PARTS - 1])
def test_a_rank_without_a_micro_batch_keeps_its_charts(missing: int) -> None:
    rules = limits(rate=0.1)
    charts = cusum.with_ranks(cusum.no_charts(), range(RANKS))
    parts = np.full((PARTS, RANKS), 5 * SIGMA)
    parts[missing, 0] = np.nan
    charts = fold(rules, charts, 0, parts)
    assert 0.0 < charts.levels[0, 0] < charts.levels[0, 1]
