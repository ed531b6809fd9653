"""Who comes late to every collective: others wait for it, it waits for nobody. Pure.

The rule of idle time: with equal transfers, a rank's time in collectives is its waiting plus a
constant, so who has the least arrives last (HolisticTraceAnalysis looks at starts instead).
"""

import numpy as np

from pacekeeper.core.findings import Tier
from pacekeeper.predictor.robust import MAD_TO_SIGMA
from pacekeeper.predictor.trace import Trace, WaitTable
from pacekeeper.predictor.verdict import Trouble, TroubleKind
from pacekeeper.predictor.workload import Array, Flags, Positions

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
    late_s, is_late = _lateness(wait_s, compute_s)
    troubles = []
    for column in np.flatnonzero(is_late.mean(axis=0) >= STEPS_THAT_AGREE).tolist():
        others = np.delete(np.arange(len(ranks)), column)
        busy_s = np.nan_to_num(np.median(compute_s[:, others], axis=1))
        whole_s = busy_s + np.median(wait_s[:, others], axis=1)
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


def _lateness(wait_s: Array, compute_s: Array) -> tuple[Array, Flags]:
    """How much later than its peers each rank came [steps, ranks], and is it beyond them?"""
    num_ranks = wait_s.shape[1]
    late_s = np.zeros_like(wait_s)
    is_late = np.zeros(wait_s.shape, dtype=np.bool_)
    for column in range(num_ranks):
        others = np.delete(wait_s, column, axis=1)
        middle = np.median(others, axis=1)
        spread = MAD_TO_SIGMA * np.median(np.abs(others - middle[:, None]), axis=1)
        late_s[:, column] = middle - wait_s[:, column]
        busy_s = np.nan_to_num(np.median(np.delete(compute_s, column, axis=1), axis=1))
        floor = np.maximum(OUTLYING * np.maximum(spread, LEAST_SPREAD * middle), 0.0)
        worth = LEAST_SHARE * (busy_s + middle)
        is_late[:, column] = late_s[:, column] > np.maximum(floor, worth)
    return late_s, is_late


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
