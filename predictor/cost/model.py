"""Expected time of a step's work: one linear model for all ranks of a role.

Linear in the features, not in the work: an expert's price is convex and piecewise linear in its
rows (`features.BENDS`), flat until the device is full.

All ranks share the coefficients, so that a slow rank cannot bias its own expectation; each rank has
one multiplier for its health. The fit is robust (Huber weights, relative errors), non-negative, and
has a prior for directions that the data do not determine: in warm-up all ranks have the same share,
so that fixed cost and cost per token are collinear (`regression.py`).

A regressor named in the settings (`named_regressor.py`) replaces the linear model in `expected_s`
and `interval_s`, and so in the detector. Planners price layouts with the coefficients, seconds per
unit of work, which no other regressor provides.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from pacekeeper.predictor.cost.features import BENDS, FEATURES, Array, Flags, Positions, StepSample
from pacekeeper.predictor.cost.named_regressor import FittedRegressor, fit_regressor
from pacekeeper.predictor.cost.regression import LEAST_SPREAD, Prior, regress
from pacekeeper.predictor.stats.group_ids import grouped
from pacekeeper.predictor.stats.peers import relative_to_peers
from pacekeeper.predictor.stats.robust import (
    MAD_TO_SIGMA,
    MEDIAN_ERROR,
    SIGMAS_95,
    column_medians,
    tailed_scale,
)

# Shares of the mean time, in the order of FEATURES: mostly work, some fixed cost of kernels, and
# experts that cost in proportion to their rows until the data show otherwise.
PRIOR_SHARES = np.array([0.12, 0.38, 0.05, 0.40, 0.05, 0.0, 0.0, *[0.0] * len(BENDS)])
STANDS_OUT = 4.0  # times the usual largest change of a step: a fault begins
# One sigma of the prior's shares: attention takes next to no time with short documents and half of
# the time with long ones; a bend may double the cost of a row.
PRIOR_SPREAD = np.array([0.12, 0.12, 0.30, 0.12, 0.12, 0.03, 0.12, *[0.12] * len(BENDS)])
# A bend is measured in the cost of a row: its slope is relative to that, even if few rows lie
# beyond the knot so far.
PRIOR = Prior(
    shares=PRIOR_SHARES,
    spread=PRIOR_SPREAD,
    unit=np.array(
        [FEATURES.index("expert_rows") if n in BENDS else i for i, n in enumerate(FEATURES)]
    ),
)
ROUNDS = 3  # of removing the common part of steps and ranks with a level of their own
LEVEL_STEPS = 64  # newest steps, which set the level of the coefficients if times drift
MAX_ROWS = 4096  # rows beyond this are thinned evenly: the fit costs the same at any cluster size
OWN_PACE = 0.07  # log multiplier beyond which a rank is left out of the common fit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """Cost model of one role: coefficients, their uncertainty, and the noise of steps.

    Attributes:
        coefficients: [FEATURES] seconds per unit.
        covariance: [FEATURES, FEATURES] of the coefficients.
        sigma: robust scale of one step's log residuals relative to the peers.
        spread: the same including the part that all ranks share.
        multipliers: observed / expected of a rank relative to its peers, 1.0 if not significantly
            different. `expected_s` excludes them: it is the time of a healthy rank.
        named: the regressor named in the settings; None: the linear model is used.
        note: why a named regressor is not in use.
    """

    coefficients: Array
    covariance: Array
    sigma: float
    spread: float = LEAST_SPREAD
    multipliers: Mapping[int, float] = field(default_factory=dict)
    named: FittedRegressor | None = None
    note: str = ""

    def expected_s(self, features: Array) -> Array:
        """Expected compute seconds [...] of features [..., FEATURES]."""
        linear_s = self._linear_s(features)
        return linear_s if self.named is None else self.named.expected_s(features, linear_s)

    def _linear_s(self, features: Array) -> Array:
        expected: Array = np.maximum(features @ self.coefficients, 1e-9)
        return expected

    def doubt(self, features: Array, is_witness: Flags | None = None) -> Array:
        """One sigma of log expected_s relative to the peers [ranks], from uncertain coefficients.

        Zero if all ranks do the same work, large if a plan gave a rank a mixture outside the fitted
        range. Disagreement of a named regressor with the linear model beyond its usual extent adds
        to it, because trees do not extrapolate.

        Args:
            features: of the ranks' work [ranks, FEATURES].
            is_witness: the reference ranks [ranks], as in `relative_to_peers`; None: all.
        """
        linear_s = self._linear_s(features)
        work = features / linear_s[:, None]
        work = work - _work_of_peers(work, is_witness)
        variance = np.maximum(((work @ self.covariance) * work).sum(axis=1), 0.0)
        if self.named is not None:
            variance += self.named.disagreement(features, linear_s) ** 2
        doubt: Array = np.sqrt(variance)
        return doubt

    def interval_s(self, features: Array) -> tuple[Array, Array]:
        """95 % interval of healthy steps of this work: [..., FEATURES] -> least, most [...].

        Wider if the work differs from what the model was fitted to: the prior alone is imprecise.
        """
        expected_s = self.expected_s(features)
        work = features / self._linear_s(features)[..., None]
        of_model = np.maximum(((work @ self.covariance) * work).sum(axis=-1), 0.0)
        factor = np.exp(SIGMAS_95 * np.sqrt(self.spread**2 + of_model))
        return expected_s / factor, expected_s * factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """All usable observations, one row each, with the step and rank they belong to."""

    at: Positions  # among the rows of all samples
    features: Array
    observed_s: Array
    step: Positions  # position in the samples
    rank: Positions


def fit(samples: Sequence[StepSample], cost_model: str = "") -> CostModel:
    """Fit the common model to quiet steps.

    Alternates between non-negative least squares of observed / expected around 1, re-weighted
    (Huber 1964), with a ridge to the prior; and removal of the steps' common part and of ranks with
    a level of their own, so that neither a noisy host nor a slow rank biases the coefficients. A
    named regressor is fitted to the remaining rows.

    Args:
        samples: quiet steps.
        cost_model: a regressor in place of the linear model (`[detector] cost_model`); empty: none.

    Raises:
        ValueError: no step took any time.
        ConfigError: the regressor cannot be made.
    """
    rows = _rows_of(samples)
    common = np.zeros(len(samples))  # log of the part that a step's ranks share
    own_pace: Collection[int] = ()
    for _ in range(ROUNDS):
        usable = ~np.isin(rows.rank, list(own_pace))
        quiet_s = rows.observed_s * np.exp(-common[rows.step])
        found = regress(rows.features[usable], quiet_s[usable], rows.rank[usable], PRIOR)
        log_ratio = np.log(rows.observed_s / np.maximum(rows.features @ found.coefficients, 1e-9))
        common = _common_parts(rows, log_ratio, usable, len(samples))
        model = CostModel(coefficients=found.coefficients, covariance=found.covariance, sigma=0.0)
        residuals, ranks = residual_table(
            [model.expected_s(sample.features) for sample in samples], samples
        )
        sigma = _sigma(residuals)
        offsets = _offsets(residuals, sigma)
        own_pace = _outlying_ranks(ranks, offsets)
    model = replace(
        model, spread=max(LEAST_SPREAD, float(tailed_scale(np.abs(log_ratio[usable]), 0.95)))
    )
    if cost_model:
        quiet_s = rows.observed_s * np.exp(-common[rows.step])
        work = np.concatenate([sample.features for sample in samples])
        num_ranks = [len(sample.ranks) for sample in samples]
        named, expected_s, note = fit_regressor(
            cost_model,
            work,
            model.expected_s(work),
            np.repeat(np.arange(len(samples)), num_ranks),
            rows.at[usable],
            quiet_s[usable],
        )
        model = replace(model, named=named, note=note)
        if named is not None:
            # From out-of-sample predictions: an overfitted tree would give too small a sigma.
            residuals, ranks = residual_table(
                np.split(expected_s, np.cumsum(num_ranks)[:-1]), samples
            )
            sigma = _sigma(residuals)
            offsets = _offsets(residuals, sigma)
            model = replace(model, spread=max(LEAST_SPREAD, named.spread))
    return replace(
        model, sigma=sigma, multipliers=dict(zip(ranks, np.exp(offsets).tolist(), strict=True))
    )


def _work_of_peers(work: Array, is_witness: Flags | None) -> Array:
    """Return the work that each rank is compared with [ranks, FEATURES]; zero without a reference.

    The median over the reference ranks, the rank itself included; with two of them, the other one.
    A single reference counts in full, as the log ratio relative to it bounds the evidence.
    """
    witnesses = work if is_witness is None else work[is_witness]
    reference = np.zeros_like(work)
    if len(witnesses):
        reference += np.median(witnesses, axis=0)
    if len(witnesses) < 3:
        own = slice(None) if is_witness is None else is_witness
        reference[own] = witnesses[::-1] if len(witnesses) == 2 else 0.0
    return reference


def log_ratios(model: CostModel, sample: StepSample, slow: Collection[int] = ()) -> Array:
    """log(observed / expected) of each rank relative to its peers, the slow ranks left out."""
    ratio = np.log(np.maximum(sample.observed_s, 1e-9) / model.expected_s(sample.features))
    return relative_to_peers(ratio, witnesses(sample, slow))


def witnesses(sample: StepSample, slow: Collection[int]) -> Flags | None:
    """Return the reference ranks of a sample, all but the slow ones [ranks]; None: all."""
    return ~np.isin(sample.ranks, list(slow)) if slow else None


def residual_table(
    expected_s: Sequence[Array], samples: Sequence[StepSample]
) -> tuple[Array, tuple[int, ...]]:
    """Return the log ratios of all steps and ranks [steps, ranks], and the ranks.

    NaN where a rank is missing in a step. Ratios are relative to the peers.

    Args:
        expected_s: [ranks] of each step.
        samples: the steps.
    """
    ranks = np.unique(np.concatenate([np.array(s.ranks, dtype=np.intp) for s in samples]))
    table = np.full((len(samples), len(ranks)), np.nan)
    with_ranks: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        with_ranks.setdefault(tuple(sample.ranks), []).append(i)
    for present, steps in with_ranks.items():  # steps of the same ranks at once
        observed_s = np.stack([samples[i].observed_s for i in steps])
        ratios = np.log(np.maximum(observed_s, 1e-9) / np.stack([expected_s[i] for i in steps]))
        table[np.ix_(np.array(steps), np.searchsorted(ranks, present))] = relative_to_peers(ratios)
    return table, tuple(ranks.tolist())


def _rows_of(samples: Sequence[StepSample]) -> _Rows:
    if not samples:
        raise ValueError("a fit needs at least one sample")
    features = np.concatenate([sample.features for sample in samples])
    observed_s = np.concatenate([sample.observed_s for sample in samples])
    step = np.repeat(np.arange(len(samples)), [len(sample.ranks) for sample in samples])
    rank = np.concatenate([np.array(sample.ranks, dtype=np.intp) for sample in samples])
    at = np.flatnonzero(observed_s > 0.0)
    if len(at) == 0:
        raise ValueError("no step took any time")
    if len(at) > MAX_ROWS:
        at = at[np.linspace(0, len(at) - 1, MAX_ROWS).astype(np.intp)]
    return _Rows(
        at=at, features=features[at], observed_s=observed_s[at], step=step[at], rank=rank[at]
    )


def _common_parts(rows: _Rows, log_ratio: Array, usable: Flags, num_steps: int) -> Array:
    """Median log ratio of each step with at least three ranks, else 0 [steps].

    Centred on the newest steps: if all times drift, the coefficients follow the current level.
    """
    rank, first = grouped(rows.rank)
    table = np.full((num_steps, len(first)), np.nan)
    table[rows.step[usable], rank[usable]] = log_ratio[usable]
    known = np.isfinite(table).sum(axis=1) >= 3
    parts = np.where(known, column_medians(table, axis=1), 0.0)
    if known.any():
        parts[known] -= np.median(parts[known][-LEVEL_STEPS:])
    return parts


def _sigma(residuals: Array) -> float:
    """Scale of one step's residual: the largest of three estimates.

    Each is insensitive to a single bad rank: median and tail of step-to-step changes (clocks of
    shared hosts have heavy tails), and the spread around each rank's own level, which includes slow
    wander. A fault that begins in the window is one change: a change that stands out is left out,
    and the steps before and after it have levels of their own.
    """
    parts = split_at_onset(residuals)
    changes = np.concatenate([np.abs(np.diff(part, axis=0)).ravel() for part in parts])
    deviations = np.abs(np.concatenate([part - column_medians(part) for part in parts]))
    around_level = MAD_TO_SIGMA * float(np.median(column_medians(deviations)))
    return max(float(tailed_scale(changes, 0.9)) / sqrt(2.0), around_level)


def split_at_onset(residuals: Array) -> list[Array]:
    """Split residuals [steps, ranks] where a rank changed by far more than any does elsewhere.

    Returns:
        The steps before and after; the whole table where no change stands out.
    """
    changes = np.nan_to_num(np.abs(np.diff(residuals, axis=0)))
    if len(changes) < 2 or not changes.size:
        return [residuals]
    largest = changes.max(axis=1)
    at = int(largest.argmax())
    if largest[at] <= STANDS_OUT * float(np.median(np.delete(largest, at))):
        return [residuals]
    return np.split(residuals, [at + 1])


def _offsets(residuals: Array, sigma: float) -> Array:
    """Median log residual of each rank [ranks], shrunk by two standard errors towards 0."""
    count = np.isfinite(residuals).sum(axis=0)
    chance = 2.0 * MEDIAN_ERROR * max(sigma, LEAST_SPREAD) / np.sqrt(count)
    middle = column_medians(residuals)
    offsets: Array = np.sign(middle) * np.maximum(np.abs(middle) - chance, 0.0)
    return offsets


def _outlying_ranks(ranks: Sequence[int], offsets: Array) -> tuple[int, ...]:
    """Ranks with a level of their own, the largest first, always fewer than half of all ranks."""
    furthest = np.argsort(-np.abs(offsets), kind="stable")[: max(0, (len(ranks) - 1) // 2)]
    return tuple(ranks[i] for i in furthest if abs(offsets[i]) > OWN_PACE)
