"""Token shares over given replica ranks by linear programming.

One layer: minimise the largest load_j / speed_j. The optimum is the maximum over rank sets S of
(load that only S can compute) / (speed of S); the set that attains it is the bottleneck (FineMoE
eq. 3 with speeds).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout.layout import ExpertReplica, ReplicaSet

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Lowest possible largest load_j / speed_j over given replica ranks, in rows per unit of speed.

    Attributes:
        value: the optimum.
        fluid: total load / total speed; the lowest for any replica ranks.
        bottleneck: ranks that attain `value` (load of experts that only they hold / their speed).
    """

    value: float
    fluid: float
    bottleneck: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One layer's token shares; `value` is their largest load_j / speed_j, `bound` the least."""

    replicas: tuple[ReplicaSet, ...]
    value: float
    bound: Optimum


NO_WORK = Optimum(value=0.0, fluid=0.0, bottleneck=())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitProblem:
    """loads [experts], speed [ranks]; expert_of and rank_of [pairs]: one pair a replica."""

    ranks: tuple[int, ...]
    loads: Array
    speed: Array
    expert_of: npt.NDArray[np.intp]
    rank_of: npt.NDArray[np.intp]

    @property
    def fluid(self) -> float:
        return float(self.loads.sum() / self.speed.sum())

    def load_by_rank(self, shares: Array) -> Array:
        rows: Array = np.bincount(
            self.rank_of, weights=self.loads[self.expert_of] * shares, minlength=len(self.ranks)
        ).astype(np.float64)
        return rows

    def normalised(self, weights: Array) -> Array:
        """Weights of pairs as shares: each expert's add up to 1."""
        total = np.bincount(self.expert_of, weights=weights, minlength=len(self.loads))
        shares: Array = weights / total[self.expert_of]
        return shares


def exact_shares(
    loads: Sequence[float], replicas: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> Split:
    """Shares that attain the optimum itself, at the price of one programme; some get none."""
    problem = problem_of(loads, replicas, speeds)
    bound, exact = _solve(problem)
    return Split(
        replicas=with_shares(problem, exact),
        value=float((problem.load_by_rank(exact) / problem.speed).max()),
        bound=bound,
    )


def best_value(
    loads: Sequence[float], replicas: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> Optimum:
    """The optimum over these replica ranks, without the shares."""
    problem = problem_of(loads, replicas, speeds)
    if problem.loads.sum() <= 0.0:
        return NO_WORK
    return _solve(problem)[0]


def batch_rows(num_rows: int, speeds: Mapping[int, float], *, least: int = 0) -> dict[int, int]:
    """Whole rows per rank that minimise the largest rows_j / speed_j; greedy is exact here.

    Args:
        num_rows: rows to divide.
        speeds: relative speed by rank.
        least: rows that each rank gets at least.

    Raises:
        ValueError: fewer rows than `least` for each, no rank, or a speed not above 0.
    """
    left = num_rows - least * len(speeds)
    if left < 0 or not speeds or not all(speed > 0.0 for speed in speeds.values()):
        raise ValueError(f"rows must be at least {least} for each rank and speeds above 0")
    rows = dict.fromkeys(sorted(speeds), least)
    heap = [((least + 1) / speeds[rank], rank) for rank in rows]
    heapq.heapify(heap)
    for _ in range(left):
        _, rank = heap[0]
        rows[rank] += 1
        heapq.heapreplace(heap, ((rows[rank] + 1) / speeds[rank], rank))
    return rows


def _solve(problem: SplitProblem) -> tuple[Optimum, Array]:
    """The exact optimum with its bottleneck, and shares [pairs] that attain it."""
    from scipy.optimize import linprog  # a quarter second to import: not at start-up
    from scipy.sparse import coo_array

    num_pairs, num_ranks = len(problem.expert_of), len(problem.ranks)
    pair_range = np.arange(num_pairs)
    # Variables: the share of each pair, then the value; loads and value in units of the fluid.
    load_of = problem.loads[problem.expert_of] / problem.fluid
    per_rank = coo_array(
        (
            np.concatenate([load_of, -problem.speed]),
            (
                np.concatenate([problem.rank_of, np.arange(num_ranks)]),
                np.concatenate([pair_range, np.full(num_ranks, num_pairs)]),
            ),
        ),
        shape=(num_ranks, num_pairs + 1),
    )
    per_expert = coo_array(
        (np.ones(num_pairs), (problem.expert_of, pair_range)),
        shape=(len(problem.loads), num_pairs + 1),
    )
    cost = np.zeros(num_pairs + 1)
    cost[-1] = 1.0
    solution = linprog(
        cost,
        A_ub=per_rank.tocsr(),
        b_ub=np.zeros(num_ranks),
        A_eq=per_expert.tocsr(),
        b_eq=np.ones(len(problem.loads)),
        bounds=(0.0, None),
        method="highs",
    )
    assert solution.status == 0, f"a split is always feasible: {solution.message}"
    # Ranks with a price: their union is a set that attains the optimum (such sets form a lattice).
    inside = solution.ineqlin.marginals < -1e-9
    outside_pairs = np.bincount(
        problem.expert_of, weights=~inside[problem.rank_of], minlength=len(problem.loads)
    )
    bound = float(problem.loads[outside_pairs == 0.0].sum() / problem.speed[inside].sum())
    optimum = Optimum(
        value=max(bound, problem.fluid),
        fluid=problem.fluid,
        bottleneck=tuple(r for r, is_in in zip(problem.ranks, inside, strict=True) if is_in),
    )
    shares = problem.normalised(np.maximum(solution.x[:num_pairs], 0.0))
    return optimum, shares


def with_shares(problem: SplitProblem, shares: Array) -> tuple[ReplicaSet, ...]:
    """Shares [pairs] as replicas of each expert."""
    ranks = map(problem.ranks.__getitem__, problem.rank_of.tolist())
    on = list(map(ExpertReplica, ranks, shares.tolist()))  # pairs come expert by expert
    ends = np.cumsum(np.bincount(problem.expert_of, minlength=len(problem.loads))).tolist()
    return tuple(tuple(on[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))


def problem_of(
    loads: Sequence[float], replicas: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> SplitProblem:
    """Raises ValueError for a negative load, an expert without replica, or a speed not above 0."""
    if len(loads) != len(replicas):
        raise ValueError(f"{len(loads)} loads for {len(replicas)} experts")
    if any(not 0.0 <= load < np.inf for load in loads):
        raise ValueError("loads must be finite and not negative")
    if not speeds or any(not 0.0 < speed < np.inf for speed in speeds.values()):
        raise ValueError("speeds must be finite and above 0")
    for expert, on in enumerate(replicas):
        if not on or not set(on) <= set(speeds) or len(set(on)) != len(on):
            raise ValueError(
                f"expert {expert}: replicas {list(on)} must be ranks with a speed, once"
            )
    ranks = tuple(sorted(speeds))
    position = {rank: i for i, rank in enumerate(ranks)}
    pairs = [(e, position[rank]) for e, on in enumerate(replicas) for rank in sorted(on)]
    return SplitProblem(
        ranks=ranks,
        loads=np.array(loads, dtype=np.float64),
        speed=np.array([speeds[rank] for rank in ranks], dtype=np.float64),
        expert_of=np.array([e for e, _ in pairs], dtype=np.intp),
        rank_of=np.array([at for _, at in pairs], dtype=np.intp),
    )
