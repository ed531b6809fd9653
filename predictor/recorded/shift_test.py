"""Tests whether a rank was slower in one stretch of steps, by medians, less what peers share.

A stretch is compared with the rank's earlier steps and, if the rank has peers, with their level. A
stretch that begins at the first step is compared with peers only.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.detector.slowdown import Slowdown
from pacekeeper.predictor.recorded.noise import AlarmLevels, Noise
from pacekeeper.predictor.recorded.residuals import Residuals
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, column_medians, robust_scale

SAMPLE_CLIP = 3.0  # sigmas: the most that one micro-batch contributes to the evidence
RECENT_STEPS = 8  # on either side of an onset, to test whether it is abrupt
DRIFT = 0.005  # one sigma of the gradual change of healthy GPUs as they warm up
SCATTER_DOUBT = 1.5  # uncertainty factor of the scatter of a few micro-batches
WORTH_A_LOOK = 0.5  # of the strength needed: the scan is approximate
SHARED_BY = 4  # a slowdown of one in so many peers is a common one
FALLEN = 0.5  # of a slowdown: peers that became faster by so much explain it
FALLEN_SIGMAS = 3.0
UNEVEN = 0.1  # of a common slowdown: healthy ranks may differ by so much

Stretches = tuple[tuple[int, int], tuple[int, int]]  # steps before, steps tested; end exclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A rank's rise in level over a stretch of steps.

    Attributes:
        rank: position of the rank.
        chunk: the kind of chunk that slowed, None: all compute.
        first: position of the first step.
        end: position after the last step.
        log_slowdown: its size.
        error: one sigma of `log_slowdown`.
        strength: evidence as a multiple of the threshold; a rank is accused from 1.0 on.
        num_before: number of steps before `first`.
        company: the ranks that slowed together, itself included; empty if it slowed alone.
        now_and_then: it is slow in some of the steps only, and `log_slowdown` is the mean of all;
            None: in all of them.
    """

    rank: int
    chunk: int | None
    first: int
    end: int
    log_slowdown: float
    error: float
    strength: float
    num_before: int
    company: tuple[int, ...] = ()
    now_and_then: Slowdown | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """Levels and step counts of a stretch and of the earlier steps, each [..., ranks]."""

    inside: Array
    before: Array
    num_inside: Array
    num_before: Array


def beyond(
    noise: Noise,
    levels: Levels,
    sigmas: AlarmLevels,
    *,
    common: float = 0.0,
    scatter: float = 0.0,
    drift: float = 0.0,
) -> tuple[Array, Array]:
    """Compute how far stretches lie above the healthy level, relative to the threshold.

    The healthy level combines the peers' level and the rank's earlier level, weighted by their
    errors. A rank without peers has only its earlier level.

    Args:
        noise: of the ranks.
        levels: of the stretch and of the earlier steps.
        sigmas: thresholds.
        common: log slowdown that is not specific to the rank.
        scatter: one sigma of a step from its own micro-batches; 0: unknown.
        drift: one sigma of gradual change; 0 for an abrupt onset.

    Returns:
        (strength, log slowdown), each [..., ranks]; NaN without peers and earlier steps.
    """
    healthy, own = _healthy(noise, levels)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Few steps leave the measured noise uncertain, but not its lower bound.
        fast = np.maximum(sigmas.fast * noise.measured, sigmas.sure * noise.fast)
        squared = np.maximum(
            fast, sigmas.fast * scatter / SCATTER_DOUBT
        ) ** 2 / levels.num_inside + (own * fast) ** 2 / np.maximum(levels.num_before, 1)
        slow = np.hypot(_slow_error(noise, own), drift)
        slowdown = levels.inside - healthy - common
        needed = np.hypot(np.sqrt(squared), sigmas.slow * slow) + UNEVEN * common
        strength: Array = slowdown / needed
    return strength, slowdown


def _healthy(noise: Noise, levels: Levels) -> tuple[Array, Array]:
    """(healthy level, share of the rank's own past in it)."""
    has_past = levels.num_before > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        error = noise.wander**2 + noise.fast**2 / np.maximum(levels.num_before, 1)
    own = np.where(has_past, noise.spread**2 / (noise.spread**2 + error), 0.0)
    own = np.where(noise.has_peers, own, np.where(has_past, 1.0, np.nan))
    healthy = own * np.where(has_past, levels.before, 0.0)
    # A rank that was faster than its peers and now equals them is not slow.
    healthy = np.where(noise.has_peers, np.maximum(healthy, -2.0 * noise.spread), healthy)
    return healthy, own


def _slow_error(noise: Noise, own: Array) -> Array:
    """One sigma of what does not average out: wander, and the spread of ranks."""
    error: Array = np.sqrt(noise.wander**2 * (1.0 + own**2) + ((1.0 - own) * noise.spread) ** 2)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """Height of a stretch above `base` (the healthy level plus the common part), in logs."""

    level: float
    strength: float
    base: float
    error: float


@dataclass(frozen=True, slots=True)
class ShiftTest:
    """Tests single stretches by medians, after subtracting the common part.

    Attributes:
        residuals: of all ranks.
        noise: of these residuals.
        sigmas: thresholds.
        min_slowdown: smaller slowdowns give no shift.
        needed: calibrated strength, as a multiple of the threshold under normal noise.
        company: positions of the ranks that slowed together; they are no reference for each other.
    """

    residuals: Residuals
    noise: Noise
    sigmas: AlarmLevels
    min_slowdown: float
    needed: float = 1.0
    company: tuple[int, ...] = ()

    def shift(self, rank: int, first: int, end: int) -> Shift | None:
        """Return the shift of a stretch, starting at the rank's first recorded step in it.

        None if the rank has no recorded step in it, if the evidence is weak, if the slowdown is
        below the minimum, or if the peers became faster instead.
        """
        noise = self.noise
        recorded = np.flatnonzero(np.isfinite(self.residuals.by_step[first:end, rank]))
        if not len(recorded):
            return None
        first += int(recorded[0])
        whole = (0, first), (first, end)
        near = (max(0, first - RECENT_STEPS), first), (first, min(end, first + RECENT_STEPS))
        # The common part only reduces the strength and is expensive: first test without it.
        alone, strength = self._strength(rank, whole, near, common=(0.0, 0.0))
        if not (alone.level >= log(self.min_slowdown) and strength > WORTH_A_LOOK * self.needed):
            return None
        common = self.common(rank, *whole), self.common(rank, *near) if first > 0 else 0.0
        weight, strength = self._strength(rank, whole, near, common=common)
        if not weight.level >= log(self.min_slowdown):
            return None
        if self.have_peers_fallen(rank, first, end, weight.level):
            return None
        witnesses = self._agreeing(rank, first, end, weight.base + 0.5 * weight.level)
        if not noise.has_peers[rank]:
            witnesses = min(witnesses, int(self.residuals.counts[:first, rank].sum()))
        return Shift(
            rank=rank,
            chunk=self.residuals.chunk,
            first=first,
            end=end,
            log_slowdown=weight.level,
            error=weight.error,
            strength=min(strength / self.needed, SAMPLE_CLIP * sqrt(witnesses) / self.sigmas.sure),
            num_before=int(np.isfinite(self.residuals.by_step[:first, rank]).sum()),
            company=self.company,
        )

    def _strength(
        self, rank: int, whole: Stretches, near: Stretches, *, common: tuple[float, float]
    ) -> tuple[_Weight, float]:
        """Return the weight of the stretch, and its strength after the test for gradual drift."""
        weight = self.weighed(rank, *whole, drift=0.0, common=common[0])
        if whole[1][0] == 0:
            return weight, weight.strength
        # GPUs drift by a percent as they warm up: a gradual change has to exceed that.
        abrupt = self.weighed(rank, *near, drift=0.0, common=common[1])
        gradual = self.weighed(rank, *whole, drift=DRIFT, common=common[0])
        return weight, min(weight.strength, max(abrupt.strength, gradual.strength))

    def weighed(
        self, rank: int, past: tuple[int, int], now: tuple[int, int], *, drift: float, common: float
    ) -> _Weight:
        """Weigh the stretch `now` of a rank against the earlier steps `past`; as `beyond`."""
        noise, levels = self.noise.of(np.array([rank])), self._levels(np.array([rank]), past, now)
        healthy, own = _healthy(noise, levels)
        # A slower device slows all micro-batches: their disagreement counts as noise.
        scatter = float(np.sqrt(np.mean(self.residuals.errors[now[0] : now[1], rank] ** 2)))
        strength, above = beyond(
            noise, levels, self.sigmas, common=common, scatter=scatter, drift=drift
        )
        fast = noise.fast * np.where(levels.num_inside > 2, MEDIAN_ERROR, 1.0)
        squared = 1.0 / levels.num_inside + own**2 / np.maximum(levels.num_before, 1)
        error = np.hypot(fast * np.sqrt(squared), _slow_error(noise, own))
        return _Weight(
            level=float(above[0]),
            strength=float(strength[0]),
            base=float(healthy[0]) + common,
            error=float(error[0]),
        )

    def _levels(self, ranks: Positions, past: tuple[int, int], now: tuple[int, int]) -> Levels:
        """Return the medians of these ranks in both stretches."""
        earlier, stretch = (self.residuals.by_step[slice(*part), ranks] for part in (past, now))
        return Levels(
            inside=column_medians(stretch),
            before=column_medians(earlier),
            num_inside=np.isfinite(stretch).sum(axis=0, dtype=np.float64),
            num_before=np.isfinite(earlier).sum(axis=0, dtype=np.float64),
        )

    def slowdowns(self, past: tuple[int, int], now: tuple[int, int]) -> Array:
        """Log slowdown of each rank in the stretch `now` after `past` [ranks]; NaN: unknown."""
        levels = self._levels(np.arange(len(self.noise.stage)), past, now)
        slowdown: Array = levels.inside - _healthy(self.noise, levels)[0]
        return slowdown

    def common(self, rank: int, past: tuple[int, int], now: tuple[int, int]) -> float:
        """Return the part of a slowdown that is not specific to the rank.

        The larger of the smallest loss of all other ranks and the loss that a quarter of its peers
        reach; at least 0. Ranks that share experts or a data loader slow down together.
        """
        slowdown = self.slowdowns(past, now)
        others = np.isfinite(slowdown)
        others[[rank, *self.company]] = False
        is_peer = others & (self.noise.stage == self.noise.stage[rank])
        shared = [float(slowdown[others].min())] if others.any() else []
        if is_peer.any():
            peers = np.sort(slowdown[is_peer])
            shared.append(float(peers[-1 - len(peers) // SHARED_BY]))
        return max(0.0, *shared) if shared else 0.0

    def have_peers_fallen(self, rank: int, first: int, end: int, level: float) -> bool:
        """Return whether peers that became faster explain at least half of the slowdown.

        Only a change at the onset beyond the step-to-step jitter of the common part counts.
        """
        if first == 0:
            return False
        before, inside = self.residuals.shared[:first, rank], self.residuals.shared[first:end, rank]
        fallen = float(np.median(before) - np.median(inside))
        jitter = robust_scale(np.diff(self.residuals.shared[:, rank])) / sqrt(2.0)
        error = MEDIAN_ERROR * jitter * sqrt(1.0 / len(before) + 1.0 / len(inside))
        return fallen > max(FALLEN * level, FALLEN_SIGMAS * error)

    def _agreeing(self, rank: int, first: int, end: int, at_least: float) -> int:
        """Count the micro-batches of the stretch that lie above `at_least`."""
        within = (self.residuals.step_of >= first) & (self.residuals.step_of < end)
        return int((self.residuals.samples[within, rank] > at_least).sum())


def edges_of(series: Array, shift: Shift) -> tuple[int, int]:
    """Return first and end of the likeliest stretch with the shift's level.

    Each step's vote is clipped.
    """
    inside = float(np.nanmedian(series[shift.first : shift.end]))
    half = 0.5 * shift.log_slowdown
    votes = np.nan_to_num(np.clip(series - (inside - half), -half, half))
    middle = (shift.first + shift.end) // 2
    left, right = np.cumsum(votes[: middle + 1][::-1]), np.cumsum(votes[middle:])
    first = middle - int(left.argmax())
    return first, middle + int(right.argmax()) + 1


def base_of(residuals: Residuals, noise: Noise, shift: Shift) -> float:
    """Return the level of a shift's rank without the shift: healthy level plus common part."""
    sigmas = AlarmLevels(fast=1.0, slow=1.0, sure=1.0)
    judge = ShiftTest(residuals, noise, sigmas, min_slowdown=1.0, company=shift.company)
    before, stretch = (0, shift.first), (shift.first, shift.end)
    common = judge.common(shift.rank, before, stretch)
    return judge.weighed(shift.rank, before, stretch, drift=0.0, common=common).base
