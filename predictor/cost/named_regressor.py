"""A regressor named in the settings that replaces the linear model: `[detector] cost_model`.

Any class with `fit(X, y)` and `predict(X)` by scikit-learn's conventions. If its `predict` takes
`return_std`, that gives the interval; otherwise the residuals of held-out steps do. Imported only
if named, so that neither agents nor commands need it.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, Protocol, cast

import numpy as np

from pacekeeper.core.config.detector import parse_cost_model
from pacekeeper.core.errors import ConfigError
from pacekeeper.predictor.cost.features import FEATURES, Array, Flags, Positions
from pacekeeper.predictor.stats.robust import tailed_scale

FOLDS = 5  # blocks of steps, each predicted by a regressor fitted to the others
FAR = 0.95  # quantile of the disagreement with the linear model that counts as usual
TRIAL_ROWS = 40


class Regressor(Protocol):
    """The part of scikit-learn's interface that is used."""

    def fit(self, X: Array, y: Array) -> object: ...

    def predict(self, X: Array) -> Array: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRegressor:
    """A regressor fitted to scaled work and time, with its errors on held-out steps.

    Attributes:
        regressor: fitted to features / `scale` and seconds / `typical_s`.
        scale: [features] mean of each feature.
        typical_s: median seconds.
        spread: one sigma of the log residuals.
        usual_disagreement: usual |log| of its expected time over the linear model's.
        has_std: whether `predict` takes `return_std`.
    """

    regressor: Regressor
    scale: Array
    typical_s: float
    spread: float = 0.0
    usual_disagreement: float = 0.0
    has_std: bool = False

    def expected_s(self, features: Array, linear_s: Array) -> Array:
        """Expected seconds [...] of work [..., features].

        `linear_s` [...] replaces values that are not finite and positive.
        """
        predicted = np.asarray(self.regressor.predict(self._flat(features)), dtype=np.float64)
        found_s = (predicted * self.typical_s).reshape(features.shape[:-1])
        usable = np.isfinite(found_s) & (found_s > 0.0)
        return found_s if usable.all() else np.where(usable, found_s, linear_s)

    def disagreement(self, features: Array, linear_s: Array) -> Array:
        """Log disagreement with the linear model beyond the usual [ranks].

        Of three ranks and more relative to their median.

        Args:
            features: [ranks, features] work of the ranks.
            linear_s: [ranks] expected seconds of the linear model.
        """
        apart = np.log(self.expected_s(features, linear_s) / linear_s)
        if len(apart) >= 3:
            apart = apart - np.median(apart)
        beyond: Array = np.maximum(np.abs(apart) - self.usual_disagreement, 0.0)
        return beyond

    def log_error(self, features: Array) -> Array:
        """One sigma of the log of an observation [...], for work [..., features]."""
        if not self.has_std:
            return np.full(features.shape[:-1], self.spread)
        expected, std = cast(Any, self.regressor).predict(self._flat(features), return_std=True)
        ratio = np.asarray(std, dtype=np.float64) / np.maximum(np.abs(expected), 1e-12)
        error: Array = np.where(np.isfinite(ratio), ratio, self.spread).reshape(features.shape[:-1])
        return error

    def _flat(self, features: Array) -> Array:
        return (features / self.scale).reshape(-1, features.shape[-1])


def fit_regressor(
    cost_model: str,
    features: Array,
    observed_s: Array,
    step: Positions,
    samples: Sequence[tuple[Array, Array]],
) -> tuple[FittedRegressor | None, list[Array], str]:
    """Fit the named regressor to quiet rows.

    Args:
        cost_model: the setting's value.
        features: [rows, features].
        observed_s: [rows].
        step: [rows] positions in `samples`.
        samples: for each step the work [ranks, features] and the linear model's seconds [ranks].

    Returns:
        The regressor, None if it failed; the out-of-sample expected seconds [ranks] of each step;
        and the reason of a failure.

    Raises:
        ConfigError: the regressor cannot be made.
    """
    make = regressor_factory(cost_model)
    scale = features.mean(axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    typical_s = float(np.median(observed_s))
    fold_of = np.arange(len(samples)) * min(FOLDS, len(samples)) // len(samples)

    def fitted(rows: Flags) -> FittedRegressor:
        regressor = make()
        regressor.fit(features[rows] / scale, observed_s[rows] / typical_s)
        return FittedRegressor(regressor=regressor, scale=scale, typical_s=typical_s)

    try:
        whole = fitted(np.ones(len(step), dtype=np.bool_))
        unseen_s, expected_s = np.empty(len(step)), list[Array]()
        for fold in np.unique(fold_of):  # ascending, as the samples are
            rows = fold_of[step] == fold
            one = whole if rows.all() else fitted(~rows)
            unseen_s[rows] = one.expected_s(features[rows], observed_s[rows])
            expected_s += [
                one.expected_s(*samples[i]) for i in np.flatnonzero(fold_of == fold).tolist()
            ]
        is_by_std = "return_std" in signature(whole.regressor.predict).parameters
    except Exception as error:  # of foreign code: detection continues with the linear model
        return None, [], f"{cost_model} failed, the linear model is used: {error!r:.200}"
    residual = np.abs(np.log(observed_s / unseen_s))
    linear_s = np.concatenate([seconds for _, seconds in samples])
    apart = np.abs(np.log(np.concatenate(expected_s) / linear_s))
    found = FittedRegressor(
        regressor=whole.regressor,
        scale=scale,
        typical_s=typical_s,
        spread=float(tailed_scale(residual, 0.95)),
        usual_disagreement=float(np.quantile(apart, FAR)),
        has_std=is_by_std,
    )
    return found, expected_s, ""


@lru_cache(maxsize=16)
def regressor_factory(cost_model: str) -> Callable[[], Regressor]:
    """Return a factory of unfitted regressors of this name, after fitting one to synthetic work.

    Raises:
        ConfigError: the class cannot be imported or made, has no `fit` or `predict`, or does not
            predict one number per row.
    """
    where = "[detector] cost_model"
    path, params = parse_cost_model(cost_model)
    module_name, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise ConfigError(
            f"{where}: {module_name} cannot be imported: {error}",
            remedy="install it where the controller runs, or correct the name",
        ) from error
    if not isinstance(kind, type):
        raise ConfigError(f"{where}: {module_name} has no class {name}")
    for method in ("fit", "predict"):
        if not callable(getattr(kind, method, None)):
            raise ConfigError(
                f"{where}: {path} has no {method}()",
                remedy="expected a regressor by scikit-learn's conventions",
            )

    def make() -> Regressor:
        return cast(Regressor, kind(**params))

    work = np.abs(np.sin(np.arange(TRIAL_ROWS * len(FEATURES)))).reshape(TRIAL_ROWS, -1)
    try:
        trial = make()
        trial.fit(work, 0.5 + work.mean(axis=1))
        shape = np.shape(trial.predict(work))
    except Exception as error:  # of foreign code, whatever it is
        raise ConfigError(
            f"{where}: {cost_model} cannot be fitted: {error!r:.300}",
            remedy="correct its parameters",
        ) from error
    if shape != (TRIAL_ROWS,):
        raise ConfigError(
            f"{where}: {path} predicts an array of shape {shape} for {TRIAL_ROWS} rows",
            remedy="expected a regressor with one output",
        )
    return make
