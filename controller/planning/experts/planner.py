"""The expert planner: replica ranks and token shares of every expert, with a certificate.

Takes the cheapest candidate in seconds until the next plan (`objective`). Entry point:
`plan_experts`, called by the policy, the joint planner, `eplb` and `pacekeeper plan`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.planning.experts.certificate import Proof, layer_proofs, prove
from pacekeeper.controller.planning.experts.incremental import (
    permute_ranks,
    refine,
    replan_copies_s,
    update_placement,
)
from pacekeeper.controller.planning.experts.objective import CandidatePlacement, PlacementProblem
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices, as_loads
from pacekeeper.controller.planning.experts.search import cheapest_placement, round_robin
from pacekeeper.controller.planning.token_split.min_max import MinMaxSplit, min_max_split
from pacekeeper.core.layout.layout import ExpertReplica, ReplicaSet
from pacekeeper.core.text import format_s

MOST_DRIFT = 100.0  # beyond, a load of today says nothing about that of tomorrow

Flags = npt.NDArray[np.bool_]


class NoPlacement(ValueError):
    """Floors, slots or the limit of copies leave no placement; the input itself is valid."""


@dataclass(frozen=True, slots=True)
class PresentPlacement:
    """The placement in use, which a new plan changes.

    Attributes:
        ranks: ranks[layer][expert], the ranks that hold it, without ranks that left. Every other
            replica of the new plan is a copy.
        max_copies: the most replicas to copy; None: no limit.
    """

    ranks: Sequence[Sequence[Sequence[int]]]
    max_copies: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """replicas[layer][expert]: (rank, share) of each replica by rank; and the certificate."""

    replicas: tuple[tuple[ReplicaSet, ...], ...]
    proof: Proof


def plan_experts(
    loads: npt.ArrayLike,
    cluster: Cluster,
    *,
    floors: Floors | None = None,
    prices: Prices | None = None,
    drift: float = 0.0,
    present: PresentPlacement | None = None,
    max_losses: int = 8,
) -> ExpertPlan:
    """The cheapest placement of all experts, with token shares and its proof.

    Args:
        loads: [layers, experts] in rows of one step.
        cluster: ranks with speeds, slots, nodes, racks and failure probabilities.
        floors: on how many distinct ranks, nodes and racks every expert must be.
        prices: convert waiting, losses and copies into seconds until the next plan.
        drift: standard deviation by which the load of an expert with one rank's fair work changes
            until the next plan, relative to it; a new plan keeps room for it.
        present: the placement in use; None: plan from scratch.
        max_losses: the largest number of lost nodes that survival is proven for.

    Returns:
        Replica ranks and shares of every expert, with bounds on balance and survival.

    Raises:
        ValueError: input out of range or of another shape.
        NoPlacement: floors, slots or the limit of copies leave no placement.
    """
    if not 0.0 <= drift <= MOST_DRIFT:
        raise ValueError(f"drift must be 0 to {MOST_DRIFT:g}, got {drift}")
    task = PlacementProblem(
        loads=as_loads(loads),
        cluster=cluster,
        floors=floors or Floors(),
        prices=prices or Prices(),
        drift=drift,
    )
    limit = task.loads.size * cluster.num_ranks
    now = None
    if present is not None:
        now = _flags(present.ranks, task)
        limit = limit if present.max_copies is None else present.max_copies
    lacking = _lacking_room(task)
    if lacking and (task.floors.is_strict or now is None):
        raise NoPlacement(lacking)
    best: CandidatePlacement | None = None
    saved_s = 0.0
    if now is not None:
        best = update_placement(task, now, limit)
        saved_s = replan_copies_s(task, len(task.loads))

    def near(draft: CandidatePlacement) -> CandidatePlacement | None:
        moved = draft if now is None else permute_ranks(draft, now, task)
        return moved if moved.num_copies <= limit else None

    if not lacking:
        best = cheapest_placement(task, best, saved_s=saved_s, adapt=near)
    if best is None and not lacking:
        best = next(filter(None, map(near, round_robin(task))), None)
    if best is None:
        raise NoPlacement("no placement was found that keeps the floors and the limit of copies")
    if now is None:
        best = refine(task, best)
    return _finished(best, task, now, max_losses)


def _flags(present: Sequence[Sequence[Sequence[int]]], task: PlacementProblem) -> Flags:
    """[layers, experts, ranks]"""
    num_layers, num_experts = task.loads.shape
    if len(present) != num_layers or any(len(layer) != num_experts for layer in present):
        raise ValueError(f"present replicas must be of {num_layers} layers x {num_experts} experts")
    num_ranks = task.cluster.num_ranks
    number = [len(ranks) for experts in present for ranks in experts]
    owner = np.repeat(np.arange(len(number)), number)
    ranks = np.array([r for experts in present for on in experts for r in on], dtype=np.intp)
    for at in ((ranks < 0) | (ranks >= num_ranks)).nonzero()[0].tolist():
        layer, expert = divmod(int(owner[at]), num_experts)
        raise ValueError(f"layer {layer} expert {expert}: replicas {ranks[at]} .. are no ranks")
    flags = np.zeros((num_layers * num_experts, num_ranks), dtype=np.bool_)
    flags[owner, ranks] = True
    return flags.reshape(num_layers, num_experts, num_ranks)


def _lacking_room(task: PlacementProblem) -> str:
    """Why counting slots excludes these floors, as a message; empty where it does not."""
    num_experts, floors = task.loads.shape[1], task.floors
    at_node: dict[int, int] = {}
    for node, slots in zip(task.cluster.nodes, task.cluster.slots, strict=True):
        at_node[node] = at_node.get(node, 0) + min(slots, num_experts)
    room = sum(min(slots, num_experts) for slots in at_node.values())
    if room < floors.nodes * num_experts or len(at_node) < floors.nodes:
        return (
            f"{num_experts} experts on {floors.nodes} nodes each do not fit"
            f" {sum(task.cluster.slots)} slots on {len(at_node)} nodes"
        )
    whole = sum(min(slots, num_experts) for slots in task.cluster.slots)
    if whole < floors.replicas * num_experts or task.cluster.num_ranks < floors.replicas:
        return (
            f"{num_experts} experts on {floors.replicas} ranks each do not fit"
            f" {whole} slots on {task.cluster.num_ranks} ranks"
        )
    num_racks = len(set(task.cluster.racks))
    if num_racks < floors.racks:
        return f"a floor of {floors.racks} racks, and there are {num_racks}"
    return ""


def _finished(
    draft: CandidatePlacement, task: PlacementProblem, present: Flags | None, max_losses: int
) -> ExpertPlan:
    even = draft.even or min_max_split(task.loads, draft.replicas, task.group_speeds(draft.groups))
    on_ranks = draft.on_ranks()
    proof = prove(
        layer_proofs(task.loads, even, draft.groups, on_ranks, task.cluster, task.floors),
        on_ranks,
        task.cluster,
        max_losses=max_losses,
        loss=draft.loss,
        reason=f"{draft.name}: {format_s(draft.price_s)} until the next plan",
        present=present,
    )
    return ExpertPlan(replicas=_replica_tuples(draft, even, task.speeds), proof=proof)


def _replica_tuples(
    draft: CandidatePlacement, even: MinMaxSplit, speeds: npt.NDArray[np.float64]
) -> tuple[tuple[ReplicaSet, ...], ...]:
    """Shares of groups split over their ranks by speed."""
    group_of, parts = np.empty(len(speeds), dtype=np.intp), np.empty(len(speeds))
    for group, ranks in enumerate(draft.groups):
        on_ranks = list(ranks)
        group_of[on_ranks] = group
        parts[on_ranks] = speeds[on_ranks] / speeds[on_ranks].sum()
    layers = []
    for replicas, shares in zip(draft.replicas, even.shares, strict=True):
        expert, rank = replicas[:, group_of].nonzero()
        share = shares[expert, group_of[rank]] * parts[rank]
        on = list(map(ExpertReplica, rank.tolist(), share.tolist()))
        ends = np.cumsum(np.bincount(expert, minlength=len(replicas))).tolist()
        layers.append(
            tuple(tuple(on[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
        )
    return tuple(layers)
