"""Residuals relative to peers: log ratios less the part that all ranks share."""

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags

MIN_PEERS = 2  # with fewer, a common disturbance is indistinguishable from the peer's own


def relative_to_peers(log_ratio: Array, is_witness: Flags | None = None) -> Array:
    """Subtract from each rank's log(observed / expected) the median of the other reference ranks.

    What affects all ranks alike (a common throttle, a noisy host) cancels. The rank itself is left
    out of the median, because a slow rank among few would shift it. With a single reference rank
    the smaller of the absolute and the relative log ratio counts; with none the absolute one.

    Args:
        log_ratio: [ranks] or [steps, ranks].
        is_witness: which ranks are references [ranks], those without a finding; None: all.
    """
    if is_witness is None:
        is_witness = np.ones(log_ratio.shape[-1], dtype=np.bool_)
    relative = log_ratio.copy()
    witnesses = log_ratio[..., is_witness]
    num_witnesses = witnesses.shape[-1]
    if num_witnesses == 0:
        return relative
    common = np.median(witnesses, axis=-1, keepdims=True)
    relative[..., ~is_witness] = _less(log_ratio[..., ~is_witness], common, num_witnesses)
    if num_witnesses > 1:
        others = medians_without_one(witnesses)
        relative[..., is_witness] = _less(witnesses, others, num_witnesses - 1)
    return relative


def _less(log_ratio: Array, common: Array, num_witnesses: int) -> Array:
    relative: Array = log_ratio - common
    return relative if num_witnesses >= MIN_PEERS else np.minimum(log_ratio, relative)


def medians_without_one(values: Array) -> Array:
    """For each value, the median of all other finite values along the last axis; NaN without any.

    Sorts once: the median of the others is determined by the middle three of all.
    """
    known = np.isfinite(values)
    if known.all():
        num_known = np.full((*values.shape[:-1], 1), values.shape[-1])
    else:
        values, num_known = np.where(known, values, np.nan), known.sum(axis=-1, keepdims=True)
    order = np.argsort(values, axis=-1)  # NaN last
    ascending = np.take_along_axis(values, order, axis=-1)
    position = np.arange(values.shape[-1])
    left = num_known - (position < num_known)
    low, high = (left - 1) // 2, left // 2
    # Positions at or beyond the value's own shift by one, because it is left out.
    low, high = low + (position <= low), high + (position <= high)
    last = values.shape[-1] - 1
    by_position = 0.5 * (
        np.take_along_axis(ascending, np.clip(low, 0, last), axis=-1)
        + np.take_along_axis(ascending, np.clip(high, 0, last), axis=-1)
    )
    by_position = np.where(left > 0, by_position, np.nan)
    medians = np.empty_like(values)
    np.put_along_axis(medians, order, by_position, axis=-1)
    return medians
