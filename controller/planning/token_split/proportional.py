"""Token shares of a plan: close to speed-proportional ones, within SLACK of the optimum.

The optimum itself leaves some replicas without a share and others with nearly all of an expert.
Shares slightly above it average over many experts, so noise in one load affects no single rank.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.token_split.linear_program import (
    NO_WORK,
    Optimum,
    Split,
    SplitProblem,
    problem_of,
    with_shares,
)
from pacekeeper.controller.planning.token_split.min_max import shares_on_ranks
from pacekeeper.core.layout.layout import Layout

# A split may stand this far above the optimum, to stay near speed-proportional shares: those
# average over many experts, so that noise in one expert's load hurts no one replica.
SLACK = 0.005
AIMED_SLACK = 0.004  # the search's own error fits in between
MIN_SHARE = 1e-4  # smaller shares are none
MAX_ROUNDS = 200
SETTLED = 1e-5  # of the fluid load of a rank
LEAST_LOG_FACTOR = -30.0

Array = npt.NDArray[np.float64]


def token_shares(
    loads: Sequence[float],
    replicas: Sequence[Sequence[int]],
    speeds: Mapping[int, float],
) -> Split:
    """The best token shares for fixed replicas, within SLACK of the optimum.

    loads[e] >= 0, replicas[e] the ranks that hold expert e, speeds[rank] > 0. Among the splits
    within SLACK the one nearest to speed-proportional shares (relative entropy). Raises ValueError
    for a negative load, an expert without replica, or a speed not above 0.
    """
    (split,) = _splits([problem_of(loads, replicas, speeds)])
    return split


def split_layers(
    layout: Layout, *, loads: Sequence[Sequence[float]], speeds: Mapping[int, float]
) -> tuple[Split, ...]:
    """The same for every layer, with the replicas as they are. loads[layer][expert]."""
    problems, alike = [], dict[tuple[tuple[int, ...], int], list[int]]()
    for layer, layer_loads in enumerate(loads):
        on = [[replica.rank for replica in replicas] for replicas in layout.experts[layer]]
        ranks = layout.ranks_of_layer(layer)
        problems.append(problem_of(layer_loads, on, {rank: speeds[rank] for rank in ranks}))
        alike.setdefault((ranks, len(on)), []).append(layer)
    found: dict[int, Split] = {}
    for layers in alike.values():
        found |= zip(layers, _splits([problems[layer] for layer in layers]), strict=True)
    return tuple(found[layer] for layer in range(len(loads)))


def _splits(problems: Sequence[SplitProblem]) -> list[Split]:
    """Splits of layers with the same number of experts on the same ranks."""
    first = problems[0]
    replicas = np.zeros((len(problems), len(first.loads), len(first.ranks)), dtype=np.bool_)
    for of_layer, problem in zip(replicas, problems, strict=True):
        of_layer[problem.expert_of, problem.rank_of] = True
    if not replicas.size:  # layers without experts
        return [Split(replicas=(), value=0.0, bound=NO_WORK) for _ in problems]
    even = shares_on_ranks(np.stack([p.loads for p in problems]), replicas, first.speed)
    return [
        _split(
            problem,
            Optimum(
                value=float(even.bound[at]),
                fluid=problem.fluid,
                bottleneck=tuple(first.ranks[i] for i in even.inside[at].nonzero()[0]),
            ),
            even.shares[at][problem.expert_of, problem.rank_of],
        )
        for at, problem in enumerate(problems)
    ]


def _split(problem: SplitProblem, bound: Optimum, exact: Array) -> Split:
    """`exact` [pairs]: shares that reach the bound, or nearly."""
    if problem.loads.sum() <= 0.0:
        proportional = problem.normalised(problem.speed[problem.rank_of])
        return Split(replicas=with_shares(problem, proportional), value=0.0, bound=NO_WORK)
    near = _nearest(problem, bound.value * (1.0 + AIMED_SLACK) * problem.speed)
    shares = _mixed(problem, near, exact, bound.value * (1.0 + SLACK) * problem.speed)
    cleaned = problem.normalised(np.where(shares > MIN_SHARE, shares, 0.0))
    return Split(
        replicas=with_shares(problem, cleaned),
        value=float((problem.load_by_rank(cleaned) / problem.speed).max()),
        bound=bound,
    )


def _nearest(problem: SplitProblem, capacity: Array) -> Array:
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


def _mixed(problem: SplitProblem, near: Array, exact: Array, capacity: Array) -> Array:
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
