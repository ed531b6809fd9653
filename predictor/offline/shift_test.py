"""How strongly does one stretch of steps speak against a rank, by medians, less what others share?

A stretch is judged against what came before it, and, where the rank has peers, against their level;
from the first step on there are only the peers. Pure.
"""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.offline.noise import AlarmLevels, Noise
from pacekeeper.predictor.offline.residuals import Residuals
from pacekeeper.predictor.stats.robust import MEDIAN_ERROR, column_medians, robust_scale

SAMPLE_CLIP = 3.0  # sigmas that one micro-batch is worth at most, however wild
RECENT_STEPS = 8  # on either side of an onset: is it abrupt?
DRIFT = 0.005  # one sigma of what healthy GPUs change by gradually, as they warm up
SCATTER_DOUBT = 1.5  # how far off the scatter of a few micro-batches may well be
WORTH_A_LOOK = 0.5  # of the strength needed: the scan is rough
SHARED_BY = 4  # one in so many peers makes it a common matter
FALLEN = 0.5  # of a slowdown: beside peers that became faster by so much, nobody became slower
FALLEN_SIGMAS = 3.0
UNEVEN = 0.1  # the part of a common slowdown in which ranks may differ

Stretches = tuple[tuple[int, int], tuple[int, int]]  # steps before, steps looked at; end exclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Positions: `rank`, steps `first` to `end` (exclusive). `chunk`: the kind of chunk that
    slowed, None: all computing. `log_slowdown` with its one sigma `error`; `strength`: over what
    would be needed, accused from 1.0 on. `num_before`: steps before. `company`: the ranks
    that slowed together, itself among them; empty: it alone did.
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


def beyond(
    noise: Noise,
    inside: Array,
    before: Array,
    num_inside: Array,
    num_before: Array,
    sigmas: AlarmLevels,
    *,
    common: float = 0.0,
    scatter: float = 0.0,
    drift: float = 0.0,
) -> tuple[Array, Array]:
    """(strength, log slowdown) of stretches at level `inside` after `before` [..., ranks].

    The healthy level is what the peers say and what was measured before, weighted by their errors;
    a rank without peers has only its past. NaN where there is neither. `common`: what everybody
    lost; `scatter`: one sigma of a step by its own micro-batches; `drift`: of what came gradually.
    """
    healthy, own = _healthy(noise, before, num_before)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Few steps leave the measured noise in doubt, not what no clock betters.
        fast = np.maximum(sigmas.fast * noise.measured, sigmas.sure * noise.fast)
        needed_fast = np.sqrt(
            np.maximum(fast, sigmas.fast * scatter / SCATTER_DOUBT) ** 2 / num_inside
            + (own * fast) ** 2 / np.maximum(num_before, 1)
        )
        slow = np.sqrt(noise.wander**2 * (1.0 + own**2) + ((1.0 - own) * noise.spread) ** 2)
        slowdown = inside - healthy - common
        slow = np.hypot(slow, drift)
        needed = np.hypot(needed_fast, sigmas.slow * slow) + UNEVEN * common
        strength: Array = slowdown / needed
    return strength, slowdown


def _healthy(noise: Noise, before: Array, num_before: Array) -> tuple[Array, Array]:
    """(healthy level, share of the rank's own past in it)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        error = noise.wander**2 + noise.fast**2 / np.maximum(num_before, 1)
    own = np.where(num_before > 0, noise.spread**2 / (noise.spread**2 + error), 0.0)
    own = np.where(noise.has_peers, own, np.where(num_before > 0, 1.0, np.nan))
    healthy = own * np.where(num_before > 0, before, 0.0)
    # A rank that was faster than its peers and no longer is, is not slow.
    healthy = np.where(noise.has_peers, np.maximum(healthy, -2.0 * noise.spread), healthy)
    return healthy, own


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """How far one stretch lies above `base`, the healthy level and what is common; logs."""

    level: float
    strength: float
    base: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Levels:
    """Medians of a stretch and of what came before it, and how many steps each holds [ranks]."""

    inside: Array
    before: Array
    num_inside: Array
    num_before: Array


@dataclass(frozen=True, slots=True)
class ShiftTest:
    """Weighs single stretches by medians, less what everybody shares.

    Ranks of one `company` slowed together: they do not speak for each other.
    """

    residuals: Residuals
    noise: Noise
    sigmas: AlarmLevels
    min_slowdown: float
    needed: float = 1.0
    company: tuple[int, ...] = ()

    def shift(self, rank: int, first: int, end: int) -> Shift | None:
        """None where it is not worth naming. It begins with the first step that the rank told."""
        noise = self.noise
        told = np.flatnonzero(np.isfinite(self.residuals.by_step[first:end, rank]))
        if not len(told):
            return None
        first += int(told[0])
        whole = (0, first), (first, end)
        near = (max(0, first - RECENT_STEPS), first), (first, min(end, first + RECENT_STEPS))
        # What others share only takes away from it, and costs a look at all of them.
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
    ) -> tuple["_Weight", float]:
        """The stretch weighed, and how strongly it speaks against the rank all in all."""
        weight = self.weighed(rank, *whole, drift=0.0, common=common[0])
        if whole[1][0] == 0:
            return weight, weight.strength
        # Warm GPUs drift by a percent: what did not come at once has to be more than that.
        abrupt = self.weighed(rank, *near, drift=0.0, common=common[1])
        gradual = self.weighed(rank, *whole, drift=DRIFT, common=common[0])
        return weight, min(weight.strength, max(abrupt.strength, gradual.strength))

    def weighed(
        self, rank: int, past: tuple[int, int], now: tuple[int, int], *, drift: float, common: float
    ) -> "_Weight":
        """The stretch `now` of a rank after `past`; `common`: what everybody lost."""
        noise, levels = self._levels(np.array([rank]), past, now)
        healthy, own = _healthy(noise, levels.before, levels.num_before)
        # Where the micro-batches of the stretch disagree, it was no slower device that they met.
        scatter = float(np.sqrt(np.mean(self.residuals.errors[now[0] : now[1], rank] ** 2)))
        strength, above = beyond(
            noise,
            levels.inside,
            levels.before,
            levels.num_inside,
            levels.num_before,
            self.sigmas,
            common=common,
            scatter=scatter,
            drift=drift,
        )
        num_inside, num_before = int(levels.num_inside[0]), int(levels.num_before[0])
        return _Weight(
            level=float(above[0]),
            strength=float(strength[0]),
            base=float(healthy[0]) + common,
            error=self._error(rank, num_inside, num_before, float(own[0])),
        )

    def _levels(
        self, ranks: Positions, past: tuple[int, int], now: tuple[int, int]
    ) -> tuple[Noise, "_Levels"]:
        """Medians of these ranks in both stretches."""
        earlier, stretch = (self.residuals.by_step[slice(*part), ranks] for part in (past, now))
        return self.noise.of(ranks), _Levels(
            inside=column_medians(stretch),
            before=column_medians(earlier),
            num_inside=np.isfinite(stretch).sum(axis=0, dtype=np.float64),
            num_before=np.isfinite(earlier).sum(axis=0, dtype=np.float64),
        )

    def slowdowns(self, past: tuple[int, int], now: tuple[int, int]) -> Array:
        """Log slowdown of each rank in the stretch `now` after `past` [ranks]; NaN: not known."""
        noise, levels = self._levels(np.arange(len(self.noise.stage)), past, now)
        healthy, _ = _healthy(noise, levels.before, levels.num_before)
        slowdown: Array = levels.inside - healthy
        return slowdown

    def common(self, rank: int, past: tuple[int, int], now: tuple[int, int]) -> float:
        """What is not the rank's own: all others lost it too, or a quarter of its peers did.

        Ranks that share experts or a data loader move together.
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
        """Is a half of the slowdown or more only that its peers became faster just then?

        Beyond what goes up and down with them in any step.
        """
        if first == 0:
            return False
        before, inside = self.residuals.shared[:first, rank], self.residuals.shared[first:end, rank]
        fallen = float(np.median(before) - np.median(inside))
        jitter = robust_scale(np.diff(self.residuals.shared[:, rank])) / sqrt(2.0)
        error = MEDIAN_ERROR * jitter * sqrt(1.0 / len(before) + 1.0 / len(inside))
        return fallen > max(FALLEN * level, FALLEN_SIGMAS * error)

    def _agreeing(self, rank: int, first: int, end: int, at_least: float) -> int:
        """Micro-batches of the stretch that lie above `at_least`."""
        within = (self.residuals.step_of >= first) & (self.residuals.step_of < end)
        return int((self.residuals.samples[within, rank] > at_least).sum())

    def _error(self, rank: int, num_inside: int, num_before: int, own: float) -> float:
        noise = self.noise
        fast = float(noise.fast[rank]) * (MEDIAN_ERROR if num_inside > 2 else 1.0)
        squared = fast**2 * (1.0 / num_inside + (own**2 / num_before if num_before else 0.0))
        squared += float(noise.wander[rank]) ** 2 * (1.0 + own**2)
        return sqrt(squared + ((1.0 - own) * noise.spread) ** 2)


def edges_of(series: Array, shift: Shift) -> tuple[int, int]:
    """Where the stretch begins and ends if its level is as judged: the likeliest, steps clipped."""
    inside = float(np.nanmedian(series[shift.first : shift.end]))
    half = 0.5 * shift.log_slowdown
    votes = np.nan_to_num(np.clip(series - (inside - half), -half, half))
    middle = (shift.first + shift.end) // 2
    left, right = np.cumsum(votes[: middle + 1][::-1]), np.cumsum(votes[middle:])
    first = middle - int(left.argmax())
    return first, middle + int(right.argmax()) + 1


def base_of(residuals: Residuals, noise: Noise, shift: Shift) -> float:
    """The level that a shift's rank would have had without it: its health and what others share."""
    sigmas = AlarmLevels(fast=1.0, slow=1.0, sure=1.0)
    judge = ShiftTest(residuals, noise, sigmas, min_slowdown=1.0, company=shift.company)
    before, stretch = (0, shift.first), (shift.first, shift.end)
    common = judge.common(shift.rank, before, stretch)
    return judge.weighed(shift.rank, before, stretch, drift=0.0, common=common).base
