"""Expected time of a step's work: one linear model for all ranks of a role.

Linear in the features, not in the work: an expert's price is convex and piecewise linear in its
rows (`features.BENDS`), flat until the device is full.

Coefficients are common, so that a slow rank cannot teach the model its slowness; a rank has one
multiplier of its own, its health. The fit is robust (Huber weights, relative error), non-negative,
and has a prior for what the data cannot separate: in warm-up all ranks have the same share, so
"fixed" and "per token" look alike (`regression.py`).

A regressor named in the settings (`named_regressor.py`) takes the place of the linear model in
`expected_s` and `interval_s`, so in all that the detector judges. Planners price layouts with the
coefficients: these are seconds per unit of work, which no other regressor has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pacekeeper.predictor.cost.features import BENDS, FEATURES, Array, Flags, Positions, StepSample
from pacekeeper.predictor.cost.named_regressor import FittedRegressor, fit_regressor
from pacekeeper.predictor.cost.regression import LEAST_SPREAD, Prior, regress
from pacekeeper.predictor.stats.peers import relative_to_peers
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, MEDIAN_ERROR, column_medians

# Shares of the mean time, in the order of FEATURES: mostly work, some fixed cost of kernels, and
# experts that cost in proportion to their rows until the data say otherwise.
PRIOR_SHARES = np.array([0.12, 0.38, 0.05, 0.40, 0.05, 0.0, 0.0, *[0.0] * len(BENDS)])
# How far off a share of the prior may well be (one sigma): attention is next to nothing with short
# documents, and half of the time with long ones; a bend may double what a row costs.
PRIOR_SPREAD = np.array([0.12, 0.12, 0.30, 0.12, 0.12, 0.03, 0.12, *[0.12] * len(BENDS)])
# A bend is measured in what a row costs: how steep g is at a knot compares with that, however few
# rows lie beyond it as yet.
PRIOR = Prior(
    shares=PRIOR_SHARES,
    spread=PRIOR_SPREAD,
    unit=np.array(
        [FEATURES.index("expert_rows") if n in BENDS else i for i, n in enumerate(FEATURES)]
    ),
)
ROUNDS = 3  # of setting ranks and steps right
LEVEL_STEPS = 64  # newest steps that say how long work takes now, whatever it took before
MAX_ROWS = 4096  # rows beyond this are thinned evenly: the fit costs the same at any cluster size
INTERVAL_SIGMAS = 1.96  # 95 % of a normal law
OWN_PACE = 0.07  # log of a multiplier that is a rank's own and must not bend the common fit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostModel:
    """coefficients [FEATURES] in seconds per unit; sigma: robust scale of one step's log residuals
    beside the peers; spread: the same with what all ranks share.

    `covariance` [FEATURES, FEATURES] says how well the coefficients are known. `multipliers`: a
    rank's observed / expected beside its peers', 1.0 where it can not be told from theirs;
    `expected_s` leaves them out: it says what a healthy rank takes. `named`: the regressor of the
    settings, None: the linear model itself. `note`: why a named one is not in use.
    """

    coefficients: Array
    covariance: Array
    sigma: float
    spread: float = LEAST_SPREAD
    multipliers: Mapping[int, float] = field(default_factory=dict)
    named: FittedRegressor | None = None
    note: str = ""

    def expected_s(self, features: Array) -> Array:
        """Expected compute seconds: features [..., FEATURES] -> [...]."""
        linear_s = self._linear_s(features)
        return linear_s if self.named is None else self.named.expected_s(features, linear_s)

    def _linear_s(self, features: Array) -> Array:
        expected: Array = np.maximum(features @ self.coefficients, 1e-9)
        return expected

    def doubt(self, features: Array, is_witness: Flags | None = None) -> Array:
        """One sigma of log expected_s beside the peers [ranks], from not knowing the coefficients.

        Nothing where all ranks do the same; large where a plan gave one a mixture never seen. What
        a named regressor and the linear model disagree by, more than they used to, is doubt, too:
        trees know nothing beyond the work that they were fitted to.

        Args:
            features: of the ranks' work [ranks, FEATURES].
            is_witness: with whom the ranks are compared, as in `relative_to_peers`; default: all.
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
        """What 95 % of healthy steps of this work take: [..., FEATURES] -> least, most [...].

        Wider where the work is unlike what the model was fitted to: the prior alone says little.
        """
        expected_s = self.expected_s(features)
        work = features / self._linear_s(features)[..., None]
        of_model = np.maximum(((work @ self.covariance) * work).sum(axis=-1), 0.0)
        if self.named is not None:
            of_model = np.maximum(of_model, self.named.log_error(features) ** 2 - self.spread**2)
        factor = np.exp(INTERVAL_SIGMAS * np.sqrt(self.spread**2 + of_model))
        return expected_s / factor, expected_s * factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """All usable observations, one row each: [rows, FEATURES], [rows] and where they are from."""

    features: Array
    observed_s: Array
    step: Positions  # position in the samples
    rank: Positions


def fit(samples: Sequence[StepSample], cost_model: str = "") -> CostModel:
    """Fit the common model to quiet steps.

    In turns: non-negative least squares of observed / expected around 1, re-weighted (Huber 1964),
    with a ridge to the prior; then the steps' common part and the ranks that have their own pace
    are taken out, so that neither a noisy host nor a slow rank bends the coefficients. What is left
    is what a named regressor is fitted to.

    Args:
        samples: quiet steps.
        cost_model: a regressor in place of the linear model (`[detector] cost_model`); empty: none.

    Raises:
        ValueError: no step took any time.
        ConfigError: the regressor cannot be made.
    """
    rows = _rows_of(samples)
    common = np.zeros(len(samples))  # log of what a step's ranks share
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
        own_pace = _outlying(ranks, offsets)
    model = replace(model, spread=_scale_of(np.abs(log_ratio[usable])))
    if cost_model:
        quiet_s = rows.observed_s * np.exp(-common[rows.step])
        named, expected_s, note = fit_regressor(
            cost_model,
            rows.features[usable],
            quiet_s[usable],
            rows.step[usable],
            [(sample.features, model.expected_s(sample.features)) for sample in samples],
        )
        model = replace(model, named=named, note=note)
        if named is not None:
            # By predictions for steps that were not fitted to: what a tree has learnt by heart
            # would pass for a quiet clock.
            residuals, ranks = residual_table(expected_s, samples)
            sigma = _sigma(residuals)
            offsets = _offsets(residuals, sigma)
            model = replace(model, spread=max(LEAST_SPREAD, named.spread))
    return replace(
        model, sigma=sigma, multipliers=dict(zip(ranks, np.exp(offsets).tolist(), strict=True))
    )


def _work_of_peers(work: Array, is_witness: Flags | None) -> Array:
    """The work that each rank's is compared with [ranks, FEATURES]; zero without a witness.

    One witness counts whole, as the log ratio beside it bounds what is evidence; the middle of
    several has the rank itself among them.
    """
    witnesses = work if is_witness is None else work[is_witness]
    beside = np.zeros_like(work)
    if len(witnesses):
        beside += np.median(witnesses, axis=0)
    if len(witnesses) < 3:
        own = slice(None) if is_witness is None else is_witness
        beside[own] = witnesses[::-1] if len(witnesses) == 2 else 0.0
    return beside


def log_ratios(model: CostModel, sample: StepSample, slow: Collection[int] = ()) -> Array:
    """log(observed / expected) of each rank beside its peers; `slow` ranks are no witnesses."""
    ratio = np.log(np.maximum(sample.observed_s, 1e-9) / model.expected_s(sample.features))
    return relative_to_peers(ratio, witnesses(sample, slow))


def witnesses(sample: StepSample, slow: Collection[int]) -> Flags | None:
    """The ranks of a sample that others are compared with, all but the slow ones; None: all."""
    return ~np.isin(sample.ranks, list(slow)) if slow else None


def residual_table(
    expected_s: Sequence[Array], samples: Sequence[StepSample]
) -> tuple[Array, tuple[int, ...]]:
    """Log ratios of all steps and ranks [steps, ranks], NaN where a rank is missing; the ranks."""
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
    return _Rows(features=features[at], observed_s=observed_s[at], step=step[at], rank=rank[at])


def _scale_of(deviations: Array) -> float:
    """One sigma of these absolute deviations, by their middle or their tail, whichever is more."""
    middle = MAD_TO_SIGMA * float(np.median(deviations))
    return max(LEAST_SPREAD, middle, float(np.quantile(deviations, 0.95)) / INTERVAL_SIGMAS)


def _common_parts(rows: _Rows, log_ratio: Array, usable: Flags, num_steps: int) -> Array:
    """Median log ratio of each step with three ranks or more, else 0.

    Centred over the newest steps: where everything drifts, the coefficients are of today.
    """
    step, ratio = rows.step[usable], log_ratio[usable]
    order = np.lexsort((ratio, step))
    count = np.bincount(step, minlength=num_steps)
    first = np.cumsum(count) - count
    known = count >= 3
    low, high = first + (count - 1) // 2, first + count // 2
    parts = np.zeros(num_steps)
    parts[known] = 0.5 * (ratio[order[low[known]]] + ratio[order[high[known]]])
    if known.any():
        parts[known] -= np.median(parts[known][-LEVEL_STEPS:])
    return parts


def _sigma(residuals: Array) -> float:
    """Scale of one step's residual: the widest of three views, each blind to a single bad rank.

    By step-to-step changes (a fault that begins in the window is one change): their middle, and
    their tail, since clocks of shared hosts have heavy ones; by the spread around each rank's own
    level, which sees slow wander that changes do not.
    """
    scales = [0.0]
    changes = np.abs(np.diff(residuals, axis=0))
    changes = changes[np.isfinite(changes)] / np.sqrt(2.0)
    if len(changes):
        scales += [
            MAD_TO_SIGMA * float(np.median(changes)),
            float(np.quantile(changes, 0.9)) / 1.645,
        ]
    deviations = np.abs(residuals - column_medians(residuals))
    scales.append(MAD_TO_SIGMA * float(np.median(column_medians(deviations))))
    return max(scales)


def _offsets(residuals: Array, sigma: float) -> Array:
    """Each rank's median log residual, less the part that chance alone may well have made."""
    count = np.isfinite(residuals).sum(axis=0)
    chance = 2.0 * MEDIAN_ERROR * max(sigma, LEAST_SPREAD) / np.sqrt(count)
    middle = column_medians(residuals)
    offsets: Array = np.sign(middle) * np.maximum(np.abs(middle) - chance, 0.0)
    return offsets


def _outlying(ranks: Sequence[int], offsets: Array) -> tuple[int, ...]:
    """Ranks with a pace of their own, the furthest first, and never half of all ranks or more."""
    furthest = np.argsort(-np.abs(offsets), kind="stable")[: max(0, (len(ranks) - 1) // 2)]
    return tuple(ranks[i] for i in furthest if abs(offsets[i]) > OWN_PACE)
