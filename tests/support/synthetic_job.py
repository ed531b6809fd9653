"""A seeded job on paper: real-looking work, layouts that change it, a clock with noise, faults.

The truth is *not* the detector's linear model: experts cost per layer and expert with a knee (few
rows do not fill the device), routing is skewed and drifts, rows are split in whole numbers, and
what tokens, rows, squares and starting kernels cost differs from job to job (by seed).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from pacekeeper.core.telemetry.expert_row_features import KNOTS
from pacekeeper.predictor.cost.features import BENDS, FEATURES, MicrobatchSamples, StepSample

Array = npt.NDArray[np.float64]

NUM_LAYERS, NUM_EXPERTS = 4, 8
NUM_SITES = NUM_LAYERS * NUM_EXPERTS
TOKENS_PER_ROW, ROWS_PER_RANK, EXPERTS_PER_TOKEN = 160, 8, 2
MOVING = [FEATURES.index(f) for f in ("tokens", "sum_len_squared", "expert_rows", *BENDS)]
STEP_S, KNEE_ROWS = 0.2, 16.0


class Noise(TypedDict, total=False):
    """What a clock does to a step: keyword arguments of SyntheticJob."""

    noise: float
    common: float
    correlation: float
    outliers: float
    missing: float


DEVICE_CLOCK: Noise = {"noise": 0.02}
CPU_CLOCK: Noise = {"noise": 0.08, "common": 0.1, "correlation": 0.2, "outliers": 0.01}


@dataclass(kw_only=True)
class SyntheticJob:
    """`noise`: sigma of the log of a rank's step time, `correlation`: of consecutive ones (AR(1));
    with `num_microbatches` above 1 both are of micro-batches, which differ in size by a half;
    `common`: sigma of noise that all ranks share; `outliers`: rate of wild single samples;
    `missing`: rate of steps that lack a rank; `skew`: sigma of the log of expert loads.
    """

    seed: int
    num_ranks: int = 4
    noise: float = 0.02
    common: float = 0.0
    correlation: float = 0.0
    outliers: float = 0.0
    missing: float = 0.0
    skew: float = 0.5
    num_microbatches: int = 1
    generation: int = 1
    step: int = -1
    batch_rows: Array = field(init=False)  # [ranks]
    hosts: Array = field(init=False)  # [ranks, layers x experts] share of the expert's tokens

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._noise = np.zeros(self.num_ranks)
        self._costs = self._draw_costs()
        self._loads = self._random.normal(0.0, self.skew, NUM_SITES)
        self._lay_out(np.ones(self.num_ranks), replicas=min(2, self.num_ranks))

    def plan(self, slow: Mapping[int, float] | None = None, *, replicas: int = 2) -> None:
        """A new generation: work in proportion to speed, experts on `replicas` ranks."""
        speeds = np.array([1.0 / (slow or {}).get(rank, 1.0) for rank in range(self.num_ranks)])
        self._lay_out(speeds, replicas=min(replicas, self.num_ranks))
        self.generation += 1

    def shuffle(self) -> None:
        """A new generation with shares of 0.4 to 1.6 of an even one, unequal from rank to rank."""
        self._lay_out(
            self._random.uniform(0.4, 1.6, self.num_ranks),
            replicas=int(self._random.integers(1, min(4, self.num_ranks) + 1)),
        )
        self.generation += 1

    def next(
        self, slow: Mapping[int, float] | None = None, *, slow_from_part: int = 0
    ) -> StepSample:
        """The next step; `slow`: the true slowdown of some ranks, since that micro-batch of it."""
        self.step += 1
        features, true_s, standing_s = self._work()
        factor = np.array([(slow or {}).get(rank, 1.0) for rank in range(self.num_ranks)])
        parts = None
        if self.num_microbatches == 1:
            observed_s = true_s * factor * np.exp(self._log_noise())
        else:
            parts = self._parts(features, true_s, standing_s, factor, slow_from_part)
            features, observed_s = parts.features.sum(axis=0), parts.observed_s.sum(axis=0)
        ranks = np.arange(self.num_ranks)
        if self.num_ranks > 1 and self._random.random() < self.missing:
            ranks = np.delete(ranks, self._random.integers(self.num_ranks))
        if parts is not None:
            parts = MicrobatchSamples(
                features=parts.features[:, ranks], observed_s=parts.observed_s[:, ranks]
            )
        return StepSample(
            step=self.step,
            generation=self.generation,
            ranks=tuple(ranks.tolist()),
            features=features[ranks],
            observed_s=observed_s[ranks],
            parts=parts,
        )

    def _parts(
        self, features: Array, true_s: Array, standing_s: Array, factor: Array, slow_from: int
    ) -> MicrobatchSamples:
        """The step's work shared out; each micro-batch starts its part of the kernels."""
        count, n = self.num_microbatches, self.num_ranks
        shares = self._random.uniform(0.5, 1.5, (count, n))
        shares /= shares.sum(axis=0)
        work = np.repeat(features[None], count, axis=0)
        work[:, :, MOVING] *= shares[:, :, None]
        moving_s = true_s - standing_s
        noise = np.stack([self._log_noise() for _ in range(count)])
        slowed = np.where((np.arange(count) >= slow_from)[:, None], factor, 1.0)
        true_s = standing_s / count + shares * moving_s
        return MicrobatchSamples(features=work, observed_s=true_s * slowed * np.exp(noise))

    def _draw_costs(self) -> tuple[float, ...]:
        """Seconds per step, token, squared token, row and active expert."""
        draw = self._random
        fixed, square, expert = draw.uniform((0.02, 0.0, 0.0), (0.3, 0.15, 0.1))
        token = (1.0 - fixed - square - expert) * draw.uniform(0.25, 0.75)
        row = 1.0 - fixed - square - expert - token
        tokens = TOKENS_PER_ROW * ROWS_PER_RANK
        rows = tokens * EXPERTS_PER_TOKEN * NUM_LAYERS
        units = (1.0, tokens, tokens * TOKENS_PER_ROW / 2, rows, NUM_SITES / 2)
        shares = (fixed, token, square, row, expert)
        return tuple(STEP_S * share / unit for share, unit in zip(shares, units, strict=True))

    def _lay_out(self, speeds: Array, *, replicas: int) -> None:
        rows = speeds / speeds.sum() * ROWS_PER_RANK * self.num_ranks
        self.batch_rows = np.maximum(1.0, np.round(rows))
        # Neighbours host an expert together, another neighbourhood in each layer.
        first = np.arange(NUM_SITES) * max(1, self.num_ranks // NUM_EXPERTS)
        first += np.arange(NUM_SITES) // NUM_EXPERTS
        hosts = np.zeros((self.num_ranks, NUM_SITES))
        for replica in range(max(replicas, self.num_ranks * replicas // NUM_EXPERTS)):
            at = (first + replica) % self.num_ranks
            hosts[at, np.arange(NUM_SITES)] = speeds[at]
        self.hosts = hosts / hosts.sum(axis=0)

    def _work(self) -> tuple[Array, Array, Array]:
        """(features, true seconds, those of starting kernels and experts) of every rank for one
        step's documents and routing."""
        draw, n = self._random, self.num_ranks
        tokens = np.round(self.batch_rows * TOKENS_PER_ROW * draw.uniform(0.96, 1.0, n))
        squared = np.round(tokens * TOKENS_PER_ROW / 2 * draw.lognormal(0.0, 0.2, n))
        self._loads += draw.normal(0.0, 0.01, NUM_SITES)
        popularity = np.exp(self._loads + draw.normal(0.0, 0.05, NUM_SITES))
        popularity = popularity.reshape(NUM_LAYERS, NUM_EXPERTS)
        popularity /= popularity.sum(axis=1, keepdims=True)
        routed = popularity.ravel() * tokens.sum() * EXPERTS_PER_TOKEN
        rows = np.round(self.hosts * routed)
        active = (rows > 0).sum(axis=1)
        over = [np.maximum(rows - knot, 0.0).sum(axis=1) for knot in KNOTS]
        none = np.zeros(n)
        columns = [np.ones(n), tokens, squared, rows.sum(axis=1), active, none, none, *over]
        features = np.stack(columns, axis=1)
        fixed, per_token, per_square, per_row, per_expert = self._costs
        experts_s = np.where(rows > 0, per_expert + per_row * np.maximum(rows, KNEE_ROWS), 0.0)
        dense_s = fixed + per_token * tokens + per_square * squared
        return features, dense_s + experts_s.sum(axis=1), fixed + per_expert * active

    def _log_noise(self) -> Array:
        draw, n = self._random, self.num_ranks
        fresh = draw.normal(0.0, self.noise, n)
        self._noise = self.correlation * self._noise + np.sqrt(1 - self.correlation**2) * fresh
        wild = (draw.random(n) < self.outliers) * draw.uniform(0.2, 0.8, n)
        noise: Array = self._noise + draw.normal(0.0, self.common) + wild
        return noise
