"""Counts how high the charts of healthy ranks rise; thresholds are set from the counts. Pure.

An excursion is the part of a chart between two visits at zero. The rate of excursions that reach a
height is the false-alarm rate of a threshold at that height, for any distribution of the residuals,
with heavy tails, autocorrelation and bouts of slowness included. Beyond the heights that were seen
the tail is taken as exponential (Cramer and Lundberg; also for dependent residuals).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.stats.cusum_design import CLIPS, REFERENCES

EDGE_RATIO = 1.05  # of neighbouring edges
EDGES = EDGE_RATIO ** np.arange(160)  # of heights that are counted together, in sigma
TAIL = 50  # of the highest peaks: their mean excess is the scale of the tail
CHANCE = 2.0  # standard errors of a count
WILD = 0.9 * (CLIPS[-1] - REFERENCES[-1])  # height to which a sample at its clip takes a chart
FEWEST_WILD = 3  # excursions, to be no accident
OWN_RANKS = 3  # ranks whose findings may all be faults, however often they come back
_MIDDLES = np.concatenate([0.5 * (EDGES[1:] + EDGES[:-1]), EDGES[-1:]])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Excursions:
    """Peaks of the charts of healthy ranks.

    Attributes:
        num_samples: folded so far, of all ranks.
        num_folds: of a sample of each rank.
        counts: excursions that ended by themselves, by height [charts, EDGES].
        findings: by rank, those that opened a finding from which the rank recovered by itself
            [charts, EDGES].
    """

    num_samples: int = 0
    num_folds: int = 0
    counts: Array = field(default_factory=lambda: np.zeros((len(REFERENCES), len(EDGES))))
    findings: Mapping[int, Array] = field(default_factory=dict)


def by_height(peaks: Array) -> Array:
    """Count peaks by height: [peaks] -> [EDGES]; those below the first edge are left out."""
    at = np.searchsorted(EDGES, peaks[peaks >= EDGES[0]], side="right") - 1
    return np.bincount(at, minlength=len(EDGES)).astype(np.float64)


def with_finding(excursions: Excursions, rank: int, peaks: Array) -> Excursions:
    """Add a finding that has ended by itself, with its charts' peaks [charts].

    Noise strikes all ranks, faults a few: the `OWN_RANKS` ranks with the most are not counted.
    """
    own = excursions.findings.get(rank, np.zeros_like(excursions.counts))
    own = own + np.stack([by_height(np.array([peak])) for peak in peaks])
    return replace(excursions, findings={**excursions.findings, rank: own})


def wild_share(excursions: Excursions) -> float:
    """Return the share of samples of healthy ranks with which a large excursion begins that ends by
    itself, as of a process that pauses; 0.0 while hardly any was seen.
    """
    num_wild = float(excursions.counts[-1][EDGES >= WILD].sum())
    return num_wild / excursions.num_samples if num_wild >= FEWEST_WILD else 0.0


def mean_excess(excursions: Excursions) -> Array:
    """By how much an excursion that reaches a height rises beyond it in the mean [charts].

    The same at each height where the tail is exponential. That of all or of the TAIL highest, where
    it is more: bouts rise further than what neighbours differ by.
    """
    counts = excursions.counts
    beyond = np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]
    start = np.maximum((beyond >= TAIL).sum(axis=1, keepdims=True) - 1, 0)
    excess = np.zeros(len(counts))
    for first in (np.zeros_like(start), start):
        part = np.where(np.arange(len(EDGES)) >= first, counts, 0.0)
        mean = part @ _MIDDLES / np.maximum(part.sum(axis=1), 1.0)
        excess = np.maximum(excess, mean - EDGES[first[:, 0]])
    return excess


def height(excursions: Excursions, chart: int, samples: float) -> float | None:
    """The height that a chart of a healthy rank reaches once in so many samples.

    Returns:
        None while fewer than TAIL excursions were seen.
    """
    counts = excursions.counts[chart]
    if len(excursions.findings) > OWN_RANKS:
        ended = sorted((own[chart] for own in excursions.findings.values()), key=np.sum)
        counts = counts + np.sum(ended[:-OWN_RANKS], axis=0)
    beyond = np.cumsum(counts[::-1])[::-1]
    if beyond[0] < TAIL:
        return None
    allowed = excursions.num_samples / samples
    at = int(np.flatnonzero(beyond >= max(TAIL, allowed))[-1]) if beyond[0] >= allowed else 0
    excess = float(counts[at:] @ _MIDDLES[at:] / beyond[at] - EDGES[at])
    followed = EDGES[at] + excess * log(max(1.0, beyond[at] / allowed))
    too_often = int((beyond > allowed + CHANCE * sqrt(allowed)).sum())  # wild samples have no tail
    return float(max(followed, EDGES[min(too_often, len(EDGES) - 1)]))
