"""Who computes which share of the work, for fixed hosts and given speeds. Pure.

One layer's token split is a linear programme: minimise the largest load_j / speed_j. Its optimum
has a closed form, max over rank sets S of (load that only S can take) / (speed of S); the set that
attains it is the witness that says why a placement is stuck (research: FineMoE eq. 3 with speeds).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.core.layout import ExpertHosts, Host, Layout

# A split may stand this far above the optimum, to stay near speed-proportional shares: those
# average over many experts, so that noise in one expert's load hurts no one host.
SLACK = 0.005
AIMED_SLACK = 0.004  # the search's own error fits in between
MIN_SHARE = 1e-4  # smaller shares are none
MAX_ROUNDS = 200
SETTLED = 1e-5  # of the fluid load of a rank
LEAST_LOG_FACTOR = -30.0

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The least the largest load_j / speed_j can be over given hosts, in rows per unit of speed.

    `fluid`: total load / total speed, the least for any hosts; `witness`: the ranks that prove
    `value` (their own experts' load / their speed), ascending.
    """

    value: float
    fluid: float
    witness: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One layer's token shares; `value` is their largest load_j / speed_j, `bound` the least."""

    hosts: tuple[ExpertHosts, ...]
    value: float
    bound: Optimum


NO_WORK = Optimum(value=0.0, fluid=0.0, witness=())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """loads [experts], speed [ranks]; expert_of and rank_of [pairs]: each expert with each host."""

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


def token_shares(
    loads: Sequence[float],
    hosts: Sequence[Sequence[int]],
    speeds: Mapping[int, float],
) -> Split:
    """The best token shares for fixed hosts, within SLACK of the exact optimum.

    loads[e] >= 0, hosts[e] the ranks that hold expert e, speeds[rank] > 0. Among the splits within
    SLACK the one nearest to speed-proportional shares (relative entropy). Raises ValueError for a
    negative load, an expert without host, or a speed not above 0.
    """
    problem = _problem(loads, hosts, speeds)
    proportional = problem.normalised(problem.speed[problem.rank_of])
    if problem.loads.sum() <= 0.0:
        split = _with_shares(problem, proportional)
        return Split(hosts=split, value=0.0, bound=NO_WORK)
    bound, exact = _solve(problem)
    near = _nearest(problem, bound.value * (1.0 + AIMED_SLACK) * problem.speed)
    shares = _mixed(problem, near, exact, bound.value * (1.0 + SLACK) * problem.speed)
    cleaned = problem.normalised(np.where(shares > MIN_SHARE, shares, 0.0))
    return Split(
        hosts=_with_shares(problem, cleaned),
        value=float((problem.load_by_rank(cleaned) / problem.speed).max()),
        bound=bound,
    )


def exact_shares(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> Split:
    """Shares that attain the optimum itself, at the price of one programme; some hosts get none."""
    problem = _problem(loads, hosts, speeds)
    bound, exact = _solve(problem)
    return Split(
        hosts=_with_shares(problem, exact),
        value=float((problem.load_by_rank(exact) / problem.speed).max()),
        bound=bound,
    )


def best_value(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> Optimum:
    """What the best shares over these hosts would reach, without the shares."""
    problem = _problem(loads, hosts, speeds)
    if problem.loads.sum() <= 0.0:
        return NO_WORK
    return _solve(problem)[0]


def batch_rows(num_rows: int, speeds: Mapping[int, float]) -> dict[int, int]:
    """Whole rows per rank that minimise the largest rows_j / speed_j (greedy is exact here).

    Raises ValueError for fewer rows than none, no rank, or a speed not above 0.
    """
    if num_rows < 0 or not speeds or not all(speed > 0.0 for speed in speeds.values()):
        raise ValueError("rows must not be negative and speeds must be above 0")
    rows = dict.fromkeys(sorted(speeds), 0)
    heap = [(1.0 / speeds[rank], rank) for rank in rows]
    heapq.heapify(heap)
    for _ in range(num_rows):
        _, rank = heap[0]
        rows[rank] += 1
        heapq.heapreplace(heap, ((rows[rank] + 1) / speeds[rank], rank))
    return rows


def split_layers(
    layout: Layout, *, loads: Sequence[Sequence[float]], speeds: Mapping[int, float]
) -> tuple[Split, ...]:
    """The best token shares of every layer for the hosts as they are. loads[layer][expert]."""
    splits = []
    for layer, layer_loads in enumerate(loads):
        on = [[host.rank for host in hosts] for hosts in layout.experts[layer]]
        at = {rank: speeds[rank] for rank in layout.stage_of(layer).ranks}
        splits.append(token_shares(layer_loads, on, at))
    return tuple(splits)


def _solve(problem: _Problem) -> tuple[Optimum, Array]:
    """The exact optimum with its witness, and shares [pairs] that attain it."""
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
        witness=tuple(r for r, is_in in zip(problem.ranks, inside, strict=True) if is_in),
    )
    shares = problem.normalised(np.maximum(solution.x[:num_pairs], 0.0))
    return optimum, shares


def _nearest(problem: _Problem, capacity: Array) -> Array:
    """The shares [pairs] nearest to speed-proportional ones with no rank above its capacity.

    Nearest in relative entropy, weighted by load: then one factor per rank, at most 1, scales all
    its replicas alike, and the logarithms of the factors minimise a smooth convex function. All
    ranks are treated alike whatever their numbers.
    """
    from scipy.optimize import minimize

    own, loads = problem.speed[problem.rank_of], problem.loads / problem.fluid
    limit = capacity / problem.fluid

    def dual(log_factor: Array) -> tuple[float, Array]:
        weights = own * np.exp(log_factor[problem.rank_of])
        total = np.bincount(problem.expert_of, weights=weights, minlength=len(loads))
        rows = loads[problem.expert_of] * weights / total[problem.expert_of]
        at_rank = np.bincount(problem.rank_of, weights=rows, minlength=len(limit))
        return float(loads @ np.log(total) - limit @ log_factor), at_rank - limit

    start = np.zeros(len(problem.ranks))
    natural = problem.normalised(own)
    if (problem.load_by_rank(natural) <= capacity).all():
        return natural
    solution = minimize(
        dual,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(LEAST_LOG_FACTOR, 0.0)] * len(start),
        options={"maxiter": MAX_ROUNDS, "ftol": 1e-12, "gtol": SETTLED},
    )
    return problem.normalised(own * np.exp(solution.x[problem.rank_of]))


def _mixed(problem: _Problem, near: Array, exact: Array, capacity: Array) -> Array:
    """As much of `near` as fits the capacity, the rest of `exact`: loads mix as shares do."""
    from_near, from_exact = problem.load_by_rank(near), problem.load_by_rank(exact)
    over = from_near > capacity
    if not over.any():
        return near
    room = (capacity - from_exact)[over] / (from_near - from_exact)[over]
    part = max(0.0, float(room.min()))
    has_load = problem.loads[problem.expert_of] > 0.0  # no load: any shares fit, the near ones stay
    mixed: Array = np.where(has_load, part * near + (1.0 - part) * exact, near)
    return mixed


def _with_shares(problem: _Problem, shares: Array) -> tuple[ExpertHosts, ...]:
    found: list[list[Host]] = [[] for _ in problem.loads]
    for expert, at, share in zip(
        problem.expert_of.tolist(), problem.rank_of.tolist(), shares.tolist(), strict=True
    ):
        found[expert].append(Host(problem.ranks[at], share))
    return tuple(map(tuple, found))


def _problem(
    loads: Sequence[float], hosts: Sequence[Sequence[int]], speeds: Mapping[int, float]
) -> _Problem:
    if len(loads) != len(hosts):
        raise ValueError(f"{len(loads)} loads for {len(hosts)} experts")
    if any(not 0.0 <= load < np.inf for load in loads):
        raise ValueError("loads must be finite and not negative")
    if not speeds or any(not 0.0 < speed < np.inf for speed in speeds.values()):
        raise ValueError("speeds must be finite and above 0")
    for expert, on in enumerate(hosts):
        if not on or not set(on) <= set(speeds) or len(set(on)) != len(on):
            raise ValueError(f"expert {expert}: hosts {list(on)} must be ranks with a speed, once")
    ranks = tuple(sorted(speeds))
    position = {rank: i for i, rank in enumerate(ranks)}
    pairs = [(e, position[rank]) for e, on in enumerate(hosts) for rank in sorted(on)]
    return _Problem(
        ranks=ranks,
        loads=np.array(loads, dtype=np.float64),
        speed=np.array([speeds[rank] for rank in ranks], dtype=np.float64),
        expert_of=np.array([e for e, _ in pairs], dtype=np.intp),
        rank_of=np.array([at for _, at in pairs], dtype=np.intp),
    )
