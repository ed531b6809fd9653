"""Who comes late to every collective: others wait for it, it waits for nobody. Pure.

The rule of idle time: with equal transfers, a rank's time in collectives is its waiting plus a
constant, so who has the least arrives last (HolisticTraceAnalysis looks at starts instead).
"""

import numpy as np

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array, Positions
from pacekeeper.predictor.offline.trace import Trace, WaitTable
from pacekeeper.predictor.offline.verdict import Trouble, TroubleKind
from pacekeeper.predictor.stats.peers import medians_without_one
from pacekeeper.predictor.stats.robust import MAD_TO_SIGMA

MIN_PEERS = 2
LEAST_SHARE = 0.05  # of a step: lateness below it is not worth naming
OUTLYING = 6.0  # robust deviations of the peers: with so few steps nothing less is beyond chance
LEAST_SPREAD = 0.02  # of the peers' typical wait: clocks that agree perfectly are a small sample
STEPS_THAT_AGREE = 0.8
EXPLAINED = 0.5  # of the lateness, by longer compute: then the device is slow, else its host
CERTAIN = 8  # steps


def late_ranks(trace: Trace) -> tuple[Trouble, ...]:
    """Ranks that are late in nearly every recorded step; nothing where waits are not told.

    HOST where the rank computes as fast as its peers and yet arrives late (input, launches, host);
    COMPUTE where its compute is longer by about its lateness. The slowdown is of the whole step.
    """
    if trace.waits is None or len(trace.workers) <= MIN_PEERS:
        return ()
    steps, ranks, wait_s = _matrix(trace.waits)
    if not len(steps) or wait_s.shape[1] <= MIN_PEERS:
        return ()
    compute_s = _compute_matrix(trace, steps, ranks)
    busy, waiting_s = _others_busy_s(compute_s), medians_without_one(wait_s)
    late_s = waiting_s - wait_s
    is_late = late_s > _worth_naming_s(wait_s, waiting_s, busy)
    troubles = []
    for column in np.flatnonzero(is_late.mean(axis=0) >= STEPS_THAT_AGREE).tolist():
        busy_s = busy[:, column]
        whole_s = busy_s + waiting_s[:, column]
        ratio = whole_s / np.maximum(whole_s - late_s[:, column], 1e-9)
        slowdown = float(np.median(ratio))
        excess_s = float(np.median(compute_s[:, column] - busy_s))
        typical_s = float(np.median(late_s[:, column]))
        kind = TroubleKind.COMPUTE if excess_s >= EXPLAINED * typical_s else TroubleKind.HOST
        spread = float(np.std(ratio, ddof=1)) if len(ratio) > 1 else 0.1 * slowdown
        margin = 1.96 * spread / np.sqrt(len(ratio))
        first = int(steps[np.flatnonzero(is_late[:, column])[0]])
        troubles.append(
            Trouble(
                kind=kind,
                rank=int(ranks[column]),
                stage=_stage_of(trace, int(ranks[column])),
                slowdown=slowdown,
                low=max(1.0, slowdown - margin),
                high=slowdown + margin,
                first_step=first,
                tier=Tier.PROBABLE if len(steps) >= CERTAIN else Tier.SUSPECTED,
                reason=_reason(int(ranks[column]), kind, typical_s, whole_s, wait_s, column),
            )
        )
    return tuple(troubles)


def _others_busy_s(compute_s: Array) -> Array:
    """Median compute of the others [steps, ranks]; 0 where one of them does not tell it."""
    unknown = np.isnan(compute_s)
    others_unknown = unknown.sum(axis=1, keepdims=True) - unknown
    return np.where(others_unknown > 0, 0.0, medians_without_one(compute_s))


def _worth_naming_s(wait_s: Array, waiting_s: Array, busy_s: Array) -> Array:
    """How much later than its peers a rank must come to be beyond them [steps, ranks].

    waiting_s, busy_s: medians of the others.
    """
    spread = np.empty_like(wait_s)
    open_ = np.ones(wait_s.shape, dtype=np.bool_)
    while open_.any():  # without one or the other, a step has three medians at most
        middle = np.where(open_, waiting_s, -np.inf).max(axis=1, keepdims=True)
        mine = open_ & (waiting_s == middle)
        spread[mine] = medians_without_one(np.abs(wait_s - middle))[mine]
        open_ &= ~mine
    floor = OUTLYING * np.maximum(MAD_TO_SIGMA * spread, LEAST_SPREAD * waiting_s)
    worth: Array = np.maximum(np.maximum(floor, 0.0), LEAST_SHARE * (busy_s + waiting_s))
    return worth


def _matrix(table: WaitTable) -> tuple[Positions, Positions, Array]:
    """(steps, ranks, waits [steps, ranks]) of the steps that all ranks told."""
    steps, at_step = np.unique(table.step, return_inverse=True)
    ranks, at_rank = np.unique(table.rank, return_inverse=True)
    wait_s = np.full((len(steps), len(ranks)), np.nan)
    wait_s[at_step, at_rank] = table.wait_s
    whole = np.isfinite(wait_s).all(axis=1)
    return steps[whole], ranks, wait_s[whole]


def _compute_matrix(trace: Trace, steps: Positions, ranks: Positions) -> Array:
    """Compute seconds [steps, ranks], NaN where unknown."""
    compute_s = np.full((len(steps), len(ranks)), np.nan)
    if trace.compute is None:
        return compute_s
    table = trace.compute
    kept = np.isin(table.step, steps) & np.isin(table.rank, ranks)
    row, column = np.searchsorted(steps, table.step[kept]), np.searchsorted(ranks, table.rank[kept])
    total = np.zeros_like(compute_s)
    np.add.at(total, (row, column), table.compute_s[kept])
    compute_s[row, column] = total[row, column]
    return compute_s


def _stage_of(trace: Trace, rank: int) -> int | None:
    return next((worker.stage for worker in trace.workers if worker.rank == rank), None)


def _reason(
    rank: int, kind: TroubleKind, late_s: float, whole_s: Array, wait_s: Array, column: int
) -> str:
    own_ms = float(np.median(wait_s[:, column])) * 1e3
    others_ms = float(np.median(np.delete(wait_s, column, axis=1))) * 1e3
    why = (
        "its compute is longer by about as much"
        if kind is TroubleKind.COMPUTE
        else "its device computes as fast as the others': its host, input or launches are late"
    )
    return (
        f"rank {rank} spends {own_ms:.1f} ms of a step in collectives where the others spend "
        f"{others_ms:.1f} ms: it comes {late_s * 1e3:.1f} ms late to a step of "
        f"{float(np.median(whole_s)) * 1e3:.0f} ms; {why}"
    )
