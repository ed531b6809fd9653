"""What a rank's peers say of a step: its log ratio, less the part that all of them share. Pure."""

from collections.abc import Sequence

import numpy as np

from pacekeeper.predictor.cost.features import Array, Flags

BLOM = 0.375  # of a rank in an ordered sample of normal values
MIN_PEERS = 2  # fewer can not tell a common disturbance from their own


def relative_to_peers(log_ratio: Array, is_witness: Flags | None = None) -> Array:
    """Each rank's log(observed / expected) less the median over its witnesses, itself left out.

    What hits all ranks alike - a common throttle, a noisy host - accuses nobody. Ranks known to be
    slow are no witnesses. Left out itself, because a slow rank among few pulls the median its way.
    With a single witness a rank is as late as it is both by the clock and beside the other; with
    none, by the clock alone. log_ratio: [ranks] or [steps, ranks]; is_witness: [ranks].
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


def beside(log_ratio: Array, others: Sequence[float], sigma: float) -> Array:
    """The log ratios [...] of a rank without peers beside those of ranks that do other work.

    What all others share is not its own; several that are slow with it do not speak for it. So the
    least late of them counts, less what chance makes of the least of so many (Blom 1958).

    Args:
        log_ratio: of the rank.
        others: log ratios of the others in the same step; none: the clock alone tells.
        sigma: one sigma of such a ratio.
    """
    if not others:
        return log_ratio
    from scipy.special import ndtri  # slow to import: not at start-up

    least = float(ndtri((1.0 - BLOM) / (len(others) + 1.0 - 2.0 * BLOM)))
    return np.minimum(log_ratio, log_ratio - (min(others) - least * sigma))


def _less(log_ratio: Array, common: Array, num_witnesses: int) -> Array:
    relative: Array = log_ratio - common
    return relative if num_witnesses >= MIN_PEERS else np.minimum(log_ratio, relative)


def medians_without_one(values: Array) -> Array:
    """For each value the median of all the others along the last axis that are finite; NaN where
    there is none. Sorted once: the others' middle is one of the three in the middle of all.
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
    # Beyond its own place each is one further; a NaN stands behind all of them.
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
