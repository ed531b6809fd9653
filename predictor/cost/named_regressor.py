"""A regressor named in the settings that replaces the linear model: `[detector] cost_model`.

Any class with `fit(X, y)` and `predict(X)` by scikit-learn's conventions. Imported only if named,
so that neither agents nor commands need it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, cast

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
    """

    regressor: Regressor
    scale: Array
    typical_s: float
    spread: float = 0.0
    usual_disagreement: float = 0.0

    def expected_s(self, features: Array, linear_s: Array) -> Array:
        """Expected seconds [...] of work [..., features].

        `linear_s` [...] replaces values that are not finite and positive.
        """
        flat = (features / self.scale).reshape(-1, features.shape[-1])
        predicted = np.asarray(self.regressor.predict(flat), dtype=np.float64)
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


def fit_regressor(
    cost_model: str,
    features: Array,
    linear_s: Array,
    step: Positions,
    at: Positions,
    quiet_s: Array,
) -> tuple[FittedRegressor | None, Array, str]:
    """Fit the named regressor to quiet rows.

    Args:
        cost_model: the setting's value.
        features: [rows, features] work of all ranks in all steps.
        linear_s: [rows] the linear model's expected seconds.
        step: [rows] number of the step, ascending from 0.
        at: [quiet rows] the rows to fit to.
        quiet_s: [quiet rows] their observed seconds.

    Returns:
        The regressor, None if it failed; the out-of-sample expected seconds [rows]; and the reason
        of a failure.

    Raises:
        ConfigError: the regressor cannot be made.
    """
    make = regressor_factory(cost_model)
    scale = features[at].mean(axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    typical_s = float(np.median(quiet_s))
    num_steps = int(step[-1]) + 1
    fold = step * min(FOLDS, num_steps) // num_steps

    def fitted(used: Flags) -> FittedRegressor:
        regressor = make()
        regressor.fit(features[at[used]] / scale, quiet_s[used] / typical_s)
        return FittedRegressor(regressor=regressor, scale=scale, typical_s=typical_s)

    try:
        whole = fitted(np.ones(len(at), dtype=np.bool_))
        expected_s = np.empty(len(step))
        for number in np.unique(fold):
            held = fold == number
            one = whole if held[at].all() else fitted(~held[at])
            expected_s[held] = one.expected_s(features[held], linear_s[held])
    except Exception as error:  # of foreign code: detection continues with the linear model
        return None, linear_s, f"{cost_model} failed, the linear model is used: {error!r:.200}"
    found = replace(
        whole,
        spread=float(tailed_scale(np.abs(np.log(quiet_s / expected_s[at])), 0.95)),
        usual_disagreement=float(np.quantile(np.abs(np.log(expected_s / linear_s)), FAR)),
    )
    return found, expected_s, ""


@lru_cache(maxsize=16)
def regressor_factory(cost_model: str) -> Callable[[], Regressor]:
    """Return a factory of unfitted regressors of this name, after fitting one to synthetic work.

    Raises:
        ConfigError: it cannot be imported, made or fitted, or does not predict one number per row.
    """
    path, params = parse_cost_model(cost_model)
    module_name, _, name = path.rpartition(".")
    work = np.abs(np.sin(np.arange(TRIAL_ROWS * len(FEATURES)))).reshape(TRIAL_ROWS, -1)
    try:
        kind = getattr(importlib.import_module(module_name), name)
        trial = kind(**params)
        trial.fit(work, 0.5 + work.mean(axis=1))
        shape = np.shape(trial.predict(work))
        if shape != (TRIAL_ROWS,):
            raise ValueError(f"it predicts an array of shape {shape} for {TRIAL_ROWS} rows")
    except Exception as error:  # of foreign code, whatever it is
        raise ConfigError(
            f"[detector] cost_model: {cost_model} cannot be used: {error!r:.300}",
            remedy="install it where the controller runs, or correct its name or parameters; "
            "expected a regressor by scikit-learn's conventions with one output",
        ) from error
    return lambda: cast(Regressor, kind(**params))
