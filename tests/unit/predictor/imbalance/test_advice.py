"""What uneven work costs, and when that is told and taken back."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.cost.model import CostModel
from pacekeeper.predictor.imbalance.advice import (
    OVER,
    WINDOW_STEPS,
    Advice,
    SpreadWindow,
    lost_to_spread,
    update_spread,
)

SEQUENCE, EXPERT = FindingKind.SEQUENCE_IMBALANCE, FindingKind.EXPERT_IMBALANCE
AT = {name: at for at, name in enumerate(FEATURES)}
EVEN = {"one": 1.0, "tokens": 100.0, "sum_len_squared": 1000.0, "expert_rows": 200.0}
SECONDS = {"one": 0.1, "tokens": 0.001, "sum_len_squared": 0.0001, "expert_rows": 0.001}
EVEN_S = 0.1 + 0.1 + 0.1 + 0.2


def losses(**of_rank_2: float) -> Mapping[FindingKind, float]:
    """Of four ranks that all do the same, but for what is said of rank 2."""
    features = np.zeros((4, len(FEATURES)))
    coefficients = np.zeros(len(FEATURES))
    for name, amount in EVEN.items():
        features[:, AT[name]], coefficients[AT[name]] = amount, SECONDS[name]
    for name, amount in of_rank_2.items():
        features[2, AT[name]] = amount
    model = CostModel(
        coefficients=coefficients, covariance=np.zeros((len(FEATURES),) * 2), sigma=0.01
    )
    sample = StepSample(
        step=0, generation=1, ranks=(0, 1, 2, 3), features=features, observed_s=np.ones(4)
    )
    return lost_to_spread(model, sample)


def test_even_work_costs_nothing() -> None:
    assert losses() == pytest.approx({SEQUENCE: 0.0, EXPERT: 0.0})


def test_what_one_rank_has_above_the_mean_is_lost_by_its_kind() -> None:
    assert losses(sum_len_squared=2000.0) == pytest.approx({SEQUENCE: 0.075, EXPERT: 0.0})
    assert losses(expert_rows=400.0) == pytest.approx({SEQUENCE: 0.0, EXPERT: 0.15})


def test_losses_of_both_kinds_add_up_to_what_a_wholly_even_step_saves() -> None:
    both = losses(tokens=200.0, expert_rows=400.0)
    assert sum(both.values()) == pytest.approx(0.075 + 0.15)
    hidden = losses(tokens=200.0, expert_rows=0.0)  # the lighter experts make up for the sequences
    assert sum(hidden.values()) == pytest.approx(EVEN_S - (EVEN_S + 0.1 / 4 - 0.2 / 4), abs=1e-9)


def run(
    window: SpreadWindow,
    shares: list[float],
    *,
    told: Mapping[FindingKind, float] | None = None,
    generation: int = 1,
) -> tuple[SpreadWindow, list[Advice]]:
    said = []
    for step, share in enumerate(shares):
        window, advice = update_spread(
            window,
            {SEQUENCE: share * 0.5},
            step=step,
            generation=generation,
            duration_s=0.5,
            told=told or {},
        )
        said.append(advice)
    return window, said


def noisy(share: float, count: int = WINDOW_STEPS) -> list[float]:
    return [share * (1.3 if step % 2 else 0.7) for step in range(count)]


def test_a_share_that_is_surely_worth_telling_is_told_once_the_window_is_full() -> None:
    _, said = run(SpreadWindow(), noisy(0.06))
    assert [len(advice.opened) for advice in said] == [0] * (WINDOW_STEPS - 1) + [1]
    (finding,) = said[-1].opened
    assert (finding.kind, finding.rank) == (SEQUENCE, None)
    assert 1.0 - 1.0 / finding.slowdown == pytest.approx(0.06)
    assert "6.0%" in finding.reason


@pytest.mark.parametrize("share", [0.0, 0.02, 0.031])
def test_what_may_well_be_less_is_not_told(share: float) -> None:
    assert not any(advice.opened for advice in run(SpreadWindow(), noisy(share, 80))[1])


def test_what_is_told_stays_until_it_is_surely_over() -> None:
    told = {SEQUENCE: 1.0 / (1.0 - 0.03)}
    between, said = run(SpreadWindow(), noisy(0.024), told=told)
    assert not any(advice.over or advice.opened for advice in said)
    _, said = run(between, noisy(OVER / 2), told=told)
    assert said[-1].over == (SEQUENCE,)


def test_told_advice_is_measured_again_where_its_share_is_clearly_another() -> None:
    told = {SEQUENCE: 1.0 / (1.0 - 0.05)}
    assert not any(advice.changed for advice in run(SpreadWindow(), noisy(0.06), told=told)[1])
    _, said = run(SpreadWindow(), noisy(0.2), told=told)
    assert said[-1].changed == pytest.approx({SEQUENCE: 1.25})


def test_steps_of_another_layout_do_not_count() -> None:
    window, _ = run(SpreadWindow(), noisy(0.2, WINDOW_STEPS - 1))
    window, said = run(window, [0.2], generation=2)
    assert said == [Advice()]
    assert window == replace(window, generation=2, lost={SEQUENCE: (0.2,)})


def test_a_step_without_a_duration_says_nothing() -> None:
    window, advice = update_spread(
        SpreadWindow(), {SEQUENCE: 1.0}, step=0, generation=0, duration_s=0.0, told={}
    )
    assert (window.lost, advice) == ({}, Advice())
