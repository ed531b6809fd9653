"""Made-up step times of whole jobs: a pace, noise, a clock, and faults put in by hand."""

from dataclasses import replace

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.recorded.trace import StepTable, Trace


def job(pace_s: Array, *, seed: int = 0, noise: float = 0.01, resolution_s: float = 0.0) -> Trace:
    """A run whose steps take `pace_s` with relative noise, told by a clock of that resolution."""
    took_s = pace_s * np.exp(noise * np.random.default_rng(seed).standard_normal(pace_s.size))
    if resolution_s:
        clock_s = np.round(np.concatenate([[0.0], np.cumsum(took_s)]) / resolution_s) * resolution_s
        took_s = np.diff(clock_s)
    unknown = np.full(pace_s.size, np.nan)
    return Trace(
        name="made up",
        source="test",
        workers=(),
        steps=StepTable(
            step=np.arange(pace_s.size),
            duration_s=took_s,
            tokens=unknown,
            sum_len_squared=unknown,
        ),
        resolution_s=resolution_s,
    )


def slowed(pace_s: Array, begin: int, end: int, slowdown: float) -> Array:
    """The pace with its steps [begin, end) slowed."""
    pace_s = pace_s.copy()
    pace_s[begin:end] *= slowdown
    return pace_s


def with_work(trace: Trace, tokens: Array, sum_len_squared: Array) -> Trace:
    assert trace.steps is not None
    return replace(
        trace, steps=replace(trace.steps, tokens=tokens, sum_len_squared=sum_len_squared)
    )
