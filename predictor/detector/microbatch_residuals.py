"""Residuals of the micro-batches of a step, relative to the rank's mean micro-batch. Pure.

A micro-batch counts by its size: a tiny one, whose time is mostly what a model knows least, must
not weigh as much as a whole one. Of micro-batches of one size it is the log of observed / expected.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions, StepSample
from pacekeeper.predictor.cost.model import CostModel, witnesses
from pacekeeper.predictor.stats.peers import relative_to_peers

LEAST_RATIO = 0.05  # a micro-batch can be so much quicker than expected, no more
LEAST_PARTS = 4  # fewer micro-batches are no jury
CLIP = 2.0  # sigmas of one that it may stand apart from the middle of its step (Huber)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchResiduals:
    """Arrays [micro-batches, ranks], NaN where there is no record.

    `log_ratio`: residual relative to the peers; `doubt`: one sigma of the cost model's error in it;
    `size`: expected time over the rank's mean.
    """

    log_ratio: Array
    doubt: Array
    size: Array

    def at(self, positions: Positions, num_ranks: int) -> "MicrobatchResiduals":
        """The same among `num_ranks` columns, at `positions` [ranks]; NaN in all others."""
        full = np.full((3, len(self.log_ratio), num_ranks), np.nan)
        full[:, :, positions] = self.log_ratio, self.doubt, self.size
        return MicrobatchResiduals(log_ratio=full[0], doubt=full[1], size=full[2])

    def clipped(self, sigma: Array) -> "MicrobatchResiduals":
        """The same, each drawn to the middle of its rank's step: a slower device slows all of them,
        a hiccup of the host some. `sigma`: of one [ranks].
        """
        if len(self.log_ratio) < LEAST_PARTS:
            return self
        even = even_log_ratios(self.log_ratio, self.size)
        apart = np.clip(self.log_ratio - even, -CLIP * sigma, CLIP * sigma)
        return MicrobatchResiduals(log_ratio=even + apart, doubt=self.doubt, size=self.size)

    @property
    def of_step(self) -> Array:
        """Log ratio of all micro-batches together [ranks]."""
        together: Array = np.log(np.exp(self.log_ratio).mean(axis=0))
        return together


def even_log_ratios(log_ratio: Array, size: Array) -> Array:
    """Return the residuals of micro-batches of these sizes [parts, ...] under one common slowdown,
    the median of theirs.
    """
    slower = np.median(np.expm1(log_ratio) / size, axis=0)
    even: Array = np.log(np.maximum(1.0 + size * slower, LEAST_RATIO))
    return even


def microbatch_residuals(
    model: CostModel, sample: StepSample, slow: Collection[int] = ()
) -> MicrobatchResiduals | None:
    """Return log(1 + (observed - expected) / the rank's mean expected), relative to the peers.

    `slow` ranks are not used as peers. None if the step has no micro-batches.
    """
    parts = sample.parts
    if parts is None:
        return None
    expected_s = model.expected_s(parts.features)
    mean_s = expected_s.mean(axis=0)
    ratio = np.maximum(1.0 + (parts.observed_s - expected_s) / mean_s, LEAST_RATIO)
    is_witness = witnesses(sample, slow)
    doubt = np.stack([model.doubt(work, is_witness) for work in parts.features])
    return MicrobatchResiduals(
        log_ratio=relative_to_peers(np.log(ratio), is_witness),
        doubt=doubt * expected_s / mean_s,
        size=expected_s / mean_s,
    )
