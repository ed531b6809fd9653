"""Finds slow links from transfer times of groups, and ranks that are late to collectives.

A transfer's time counts from the latest start in its group, so that it contains no waiting. One
slow group shows only that one of its links is slow; the slow and the healthy groups together locate
the place (`links/places.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, log, sqrt

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.core.incidents.link_places import PlaceKind
from pacekeeper.core.text import format_s
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.links.places import GroupReading, find_slow_places
from pacekeeper.predictor.links.slow_links import MIN_SLOWDOWN, MIN_STEPS
from pacekeeper.predictor.recorded.anomalies import Anomaly, AnomalyKind
from pacekeeper.predictor.recorded.trace import Trace, TransferTable
from pacekeeper.predictor.stats import change_points
from pacekeeper.predictor.stats.peers import medians_without_one
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA, SIGMAS_95

MIN_PEER_GROUPS = 3  # of one size, to distinguish a slow group from a busy fabric
LEAST_SIGMA = 0.01
OUTLYING = 6.0  # standard errors: groups are many, their noise is not normal
PENALTY = 12.0  # of a change of level, in squared sigmas
HEALTHY_SHARE = 0.25  # of a lone group's steps, or of a step's groups: assumed healthy
MIN_PEERS = 2
LEAST_SHARE = 0.05  # of a step: smaller lateness is not reported
LEAST_SPREAD = 0.02  # of the peers' median wait: lower bound of their spread in small samples
STEPS_THAT_AGREE = 0.8
EXPLAINED = 0.5  # of the lateness: if longer compute explains it, COMPUTE, else HOST
CERTAIN = 8  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """A slow stretch of a group.

    Attributes:
        group: its index.
        begin: position of the first step.
        end: position after the last step.
        log_slowdown: log of its transfer times over the healthy ones.
        error: one sigma of `log_slowdown`.
    """

    group: int
    begin: int
    end: int
    log_slowdown: float
    error: float


def link_faults(trace: Trace) -> tuple[Anomaly, ...]:
    """Return slow links, the largest slowdown first; () without transfer times."""
    table = trace.transfers
    if table is None or len(table.step) == 0:
        return ()
    steps, residual = _by_step(table, [len(group) for group in trace.groups])
    if len(steps) < MIN_STEPS:
        return ()
    slow = [s for group in range(residual.shape[1]) for s in _stretches(residual[:, group], group)]
    seen = set(np.flatnonzero(np.isfinite(residual).any(axis=0)).tolist())
    anomalies: list[Anomaly] = []
    while slow:
        first = max(slow, key=lambda s: s.log_slowdown)
        together = [s for s in slow if s.begin < first.end and first.begin < s.end]
        slow = [s for s in slow if s not in together]
        anomalies += _anomalies(trace, steps, together, seen - {s.group for s in together})
    return tuple(sorted(anomalies, key=lambda t: -t.slowdown))


def _by_step(table: TransferTable, sizes: Sequence[int]) -> tuple[Positions, Array]:
    """Return (steps, log(observed / usual) [steps, groups]), NaN where a group transferred nothing.

    Usual is the median over transfers of equal size in groups of as many ranks. With enough such
    groups, the part of a step that all of them share is subtracted.
    """
    steps, row = np.unique(table.step, return_inverse=True)
    size = np.array(sizes, dtype=np.intp)[table.group]
    bucket = np.stack([size.astype(np.float64), np.nan_to_num(table.num_bytes, nan=-1.0)])
    _, kind = np.unique(bucket, axis=1, return_inverse=True)
    log_s = np.log(np.maximum(table.transfer_s, 1e-9))
    usual = np.array([np.median(log_s[kind.reshape(-1) == k]) for k in range(int(kind.max()) + 1)])
    over = log_s - usual[kind.reshape(-1)]
    residual = np.full((len(steps), len(sizes)), np.nan)
    for group in np.unique(table.group):
        own = table.group == group
        for step in np.unique(row[own]):
            residual[step, group] = np.median(over[own & (row == step)])
    for width in np.unique(np.array(sizes)):
        alike = np.flatnonzero(np.array(sizes) == width)
        present = alike[np.isfinite(residual[:, alike]).any(axis=0)]
        if len(present) >= MIN_PEER_GROUPS:
            known = np.isfinite(residual[:, present]).any(axis=1)
            # Not the median: one node of three is crossed by more than half of all pairs.
            residual[np.ix_(known, present)] -= np.nanquantile(
                residual[np.ix_(known, present)], HEALTHY_SHARE, axis=1, keepdims=True
            )
    return steps, residual


def _stretches(series: Array, group: int) -> list[SlowGroup]:
    """Return the stretches in which this group is clearly above its healthy level."""
    present = np.flatnonzero(np.isfinite(series))
    if len(present) < MIN_STEPS:
        return []
    values = series[present]
    sigma = max(LEAST_SIGMA, change_points.noise(values))
    found = change_points.levels(values, sigma=sigma, penalty=PENALTY)
    # Its peers' level where it has any (0 by construction); never above its own fastest quarter.
    healthy = min(0.0, float(np.quantile(values, HEALTHY_SHARE)))
    slow = []
    for level in found:
        error = sigma / sqrt(level.num_blocks)
        above = level.mean - healthy
        if above > max(log(MIN_SLOWDOWN), OUTLYING * error) and level.num_blocks > 1:
            begin, end = int(present[level.begin]), int(present[level.end - 1]) + 1
            slow.append(
                SlowGroup(group=group, begin=begin, end=end, log_slowdown=above, error=error)
            )
    return slow


def _anomalies(
    trace: Trace, steps: Positions, together: Sequence[SlowGroup], healthy: Collection[int]
) -> Iterator[Anomaly]:
    """Yield one anomaly for each place that explains slow groups, and for what none explains."""
    slowdown_of = {s.group: exp(s.log_slowdown) for s in sorted(together, key=_height)}
    readings = [
        GroupReading(ranks=trace.groups[group], slowdown=slowdown_of.get(group, 1.0))
        for group in (*slowdown_of, *healthy)
    ]
    node_of = dict.fromkeys(chain(*trace.groups), "")
    node_of |= {worker.rank: worker.node for worker in trace.workers}
    places, left = find_slow_places(readings, node_of, slow_from=MIN_SLOWDOWN)
    margin = exp(SIGMAS_95 * max(s.error for s in together))
    begin, end = min(s.begin for s in together), max(s.end for s in together)
    told = [(p.place, p.slowdown, p.low, p.high, p.num_groups) for p in places]
    if left:
        worst = max(slowdown_of.values())
        told.append((None, worst, worst, worst, left))
    names = ", ".join(str(list(trace.groups[group])) for group in sorted(slowdown_of)[:4])
    for place, slowdown, low, high, count in told:
        rank = place.ranks[0] if place is not None and place.kind is PlaceKind.PORT else None
        where = place or f"groups such as {names} do not tell which link it is"
        yield Anomaly(
            kind=AnomalyKind.LINK,
            rank=rank,
            stage=_stage_of(trace, rank),
            slowdown=slowdown,
            low=low / margin,
            high=high * margin,
            first_step=int(steps[begin]),
            last_step=None if end >= len(steps) else int(steps[end - 1]),
            tier=Tier.PROBABLE if place is not None and count > 1 else Tier.SUSPECTED,
            reason=f"transfers of {count} groups take x{slowdown:.2f} of their usual time: {where}",
        )


def _height(group: SlowGroup) -> float:
    return group.log_slowdown


def collective_stragglers(trace: Trace) -> tuple[Anomaly, ...]:
    """Return the ranks that are late to collectives in nearly every step; () without waiting times.

    HOST: the rank computes as fast as its peers and still arrives late (input, launches, host).
    COMPUTE: its compute is longer by about its lateness. The slowdown refers to the whole step.
    """
    if trace.waits is None:
        return ()
    table = trace.waits
    steps, ranks = np.unique(table.step), np.unique(table.rank)
    wait_s = _sums(table.step, table.rank, table.wait_s, steps, ranks)
    whole = np.isfinite(wait_s).all(axis=1)
    steps, wait_s = steps[whole], wait_s[whole]
    if not len(steps) or len(ranks) <= MIN_PEERS:
        return ()
    compute_s = np.full(wait_s.shape, np.nan)
    if (known := trace.compute) is not None:
        compute_s = _sums(known.step, known.rank, known.compute_s, steps, ranks)
    # Of the others: a late rank among few would shift the median of all.
    busy_s, usual_s = np.nan_to_num(medians_without_one(compute_s)), medians_without_one(wait_s)
    late_s = usual_s - wait_s
    apart_s = np.abs(wait_s - np.median(wait_s, axis=1, keepdims=True))
    spread_s = MAD_TO_SIGMA * medians_without_one(apart_s)
    least_s = OUTLYING * np.maximum(spread_s, LEAST_SPREAD * usual_s)
    least_s = np.maximum(least_s, LEAST_SHARE * (busy_s + usual_s))
    is_late = late_s > least_s
    anomalies = []
    for at in np.flatnonzero(is_late.mean(axis=0) >= STEPS_THAT_AGREE).tolist():
        rank, whole_s = int(ranks[at]), busy_s[:, at] + usual_s[:, at]
        ratio = whole_s / np.maximum(whole_s - late_s[:, at], 1e-9)
        slowdown, typical_s = float(np.median(ratio)), float(np.median(late_s[:, at]))
        excess_s = float(np.median(compute_s[:, at] - busy_s[:, at]))
        is_compute = excess_s >= EXPLAINED * typical_s
        sigma = float(np.std(ratio, ddof=1)) if len(ratio) > 1 else 0.1 * slowdown
        margin = SIGMAS_95 * sigma / sqrt(len(ratio))
        why = "its device computes as fast as the others': its host, input or launches are late"
        anomalies.append(
            Anomaly(
                kind=AnomalyKind.COMPUTE if is_compute else AnomalyKind.HOST,
                rank=rank,
                stage=_stage_of(trace, rank),
                slowdown=slowdown,
                low=max(1.0, slowdown - margin),
                high=slowdown + margin,
                first_step=int(steps[np.flatnonzero(is_late[:, at])[0]]),
                tier=Tier.PROBABLE if len(steps) >= CERTAIN else Tier.SUSPECTED,
                reason=f"rank {rank} spends {format_s(np.median(wait_s[:, at]))} of a step in "
                f"collectives where the others spend {format_s(np.median(usual_s[:, at]))}: it "
                f"comes {format_s(typical_s)} late to a step of "
                f"{format_s(np.median(whole_s))}; "
                + ("its compute is longer by about as much" if is_compute else why),
            )
        )
    return tuple(anomalies)


def _sums(
    step: Positions, rank: Positions, seconds: Array, steps: Positions, ranks: Positions
) -> Array:
    """Sums of rows by step and rank [steps, ranks]; NaN where there is no row."""
    kept = np.isin(step, steps) & np.isin(rank, ranks)
    at = np.searchsorted(steps, step[kept]), np.searchsorted(ranks, rank[kept])
    sums = np.full((len(steps), len(ranks)), np.nan)
    sums[at] = 0.0
    np.add.at(sums, at, seconds[kept])
    return sums


def _stage_of(trace: Trace, rank: int | None) -> int | None:
    return next((worker.stage for worker in trace.workers if worker.rank == rank), None)
