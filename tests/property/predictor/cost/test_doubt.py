"""What a wrong coefficient may show of healthy ranks lies within the model's doubt of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.cost.model import CostModel, log_ratios, witnesses

SMALL = 1e-4  # error of a coefficient, relative: so small that logs are linear


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ranks=st.integers(1, 5),
    num_witnesses=st.integers(1, 2),
    slowdown=st.floats(1.1, 3.0),
)
def test_no_healthy_rank_beside_one_witness_or_none_shows_more_than_the_doubt(
    seed: int, num_ranks: int, num_witnesses: int, slowdown: float
) -> None:
    rng, num = np.random.default_rng(seed), len(FEATURES)
    coefficients = rng.uniform(0.1, 1.0, num)
    root = SMALL * coefficients[:, None] * rng.standard_normal((num, num)) / num
    model = CostModel(coefficients=coefficients, covariance=root @ root.T, sigma=0.0)
    features = rng.uniform(0.0, 1.0, (num_ranks, num)) ** 4  # mixtures far from each other
    slow = rng.permutation(num_ranks)[num_witnesses:].tolist()
    direction = rng.standard_normal(num)
    wrong = coefficients + root @ (direction / np.linalg.norm(direction))  # one sigma
    observed_s = features @ wrong
    observed_s[slow] *= slowdown
    sample = StepSample(
        step=0, generation=1, ranks=tuple(range(num_ranks)), features=features,
        observed_s=observed_s,
    )  # fmt: skip
    shown = log_ratios(model, sample, slow)
    doubt = model.doubt(features, witnesses(sample, slow))
    healthy = np.delete(np.arange(num_ranks), slow)
    assert (shown[healthy] <= doubt[healthy] + SMALL**1.5).all()
