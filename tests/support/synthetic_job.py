"""A seeded job on paper: steps with real-looking work, a clock with noise, and faults."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pacekeeper.predictor.workload import StepSample

COEFFICIENTS = np.array([0.02, 4e-5, 1e-8, 2.5e-5, 4e-4])
TOKENS_PER_STEP = 8000


@dataclass(kw_only=True)
class SyntheticJob:
    """`noise`: sigma of the clock per rank; `common`: noise all ranks share; `outliers`: rate."""

    seed: int
    num_ranks: int = 4
    noise: float = 0.02
    common: float = 0.0
    outliers: float = 0.0
    correlation: float = 0.0
    shares: list[float] = field(default_factory=list)
    generation: int = 1
    step: int = -1

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._last = np.zeros(self.num_ranks)
        if not self.shares:
            self.shares = [1 / self.num_ranks] * self.num_ranks

    def next(self, slow: Mapping[int, float] | None = None) -> StepSample:
        """The next step; `slow` gives the true slowdown of some ranks."""
        self.step += 1
        draw, n = self._random, self.num_ranks
        share = np.array(self.shares)
        tokens = TOKENS_PER_STEP * share * draw.uniform(0.96, 1.0, n)
        squared = tokens * 200 * draw.lognormal(0.0, 0.15, n)
        rows = TOKENS_PER_STEP * 2 * 4 * share * draw.lognormal(0.0, 0.08, n)
        features = np.stack([np.ones(n), tokens, squared, rows, np.full(n, 16.0)], axis=1)
        true_s = features @ COEFFICIENTS
        fresh = draw.normal(0.0, self.noise, n)
        self._last = self.correlation * self._last + np.sqrt(1 - self.correlation**2) * fresh
        log_noise = self._last + draw.normal(0.0, self.common)
        log_noise = log_noise + (draw.random(n) < self.outliers) * draw.uniform(0.2, 0.8, n)
        factor = np.array([(slow or {}).get(rank, 1.0) for rank in range(n)])
        return StepSample(
            step=self.step,
            generation=self.generation,
            ranks=tuple(range(n)),
            features=features,
            observed_s=true_s * factor * np.exp(log_noise),
        )
