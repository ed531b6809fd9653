"""Where every expert replica of a model goes, and which share each host takes. Pure.

The cheapest candidate wins, in seconds until the next plan: steps that wait for the fullest rank,
restarts after losses, replicas to copy. It comes with its proof: what no hosts in these slots could
beat, what no split over these hosts could beat, and survival.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pacekeeper.controller.even_shares import EvenShares, even_shares
from pacekeeper.controller.expert_cluster import Cluster, Floors, Prices, as_loads
from pacekeeper.controller.expert_drafts import Draft, Task, candidates, dealt
from pacekeeper.controller.expert_proof import Proof, layer_proofs, prove
from pacekeeper.core.layout import ExpertHosts, Host


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """hosts[layer][expert]: (rank, share) of each host, ascending, with what is proven of them."""

    hosts: tuple[tuple[ExpertHosts, ...], ...]
    proof: Proof


def plan_experts(
    loads: npt.ArrayLike,
    cluster: Cluster,
    *,
    floors: Floors | None = None,
    prices: Prices | None = None,
    drift: float = 0.0,
    expert_bytes: int = 0,
    max_losses: int = 8,
) -> ExpertPlan:
    """Hosts and shares for loads [layers, experts] in rows.

    `drift`: by how much the load of an expert with one rank's fair work changes until the next
    plan, relative to it (standard deviation); the plan keeps room for it. `expert_bytes`: of one
    replica's state. `max_losses`: survival is proven up to so many lost nodes. Raises ValueError
    for bad loads, and where the floors or all experts do not fit the slots.
    """
    task = Task(
        loads=as_loads(loads),
        cluster=cluster,
        floors=floors or Floors(),
        prices=prices or Prices(),
        drift=drift,
    )
    _check_room(task)
    best: Draft | None = None
    for candidate in candidates(task):
        if best is not None and candidate.least_s >= best.price_s:
            break
        for draft in candidate.drafts():
            if best is None or draft.price_s < best.price_s:
                best = draft
    if best is None:
        best = next(iter(dealt(task)), None)
    if best is None:
        raise ValueError("no placement was found that keeps the floors")
    return _finished(best, task, expert_bytes, max_losses)


def _check_room(task: Task) -> None:
    num_experts = task.loads.shape[1]
    at_node: dict[int, int] = {}
    for node, slots in zip(task.cluster.nodes, task.cluster.slots, strict=True):
        at_node[node] = at_node.get(node, 0) + min(slots, num_experts)
    room = sum(min(slots, num_experts) for slots in at_node.values())
    if room < task.floors.nodes * num_experts or len(at_node) < task.floors.nodes:
        raise ValueError(
            f"{num_experts} experts on {task.floors.nodes} nodes each do not fit"
            f" {sum(task.cluster.slots)} slots on {len(at_node)} nodes"
        )
    num_racks = len(set(task.cluster.racks))
    if num_racks < task.floors.racks:
        raise ValueError(f"a floor of {task.floors.racks} racks, and there are {num_racks}")


def _finished(draft: Draft, task: Task, expert_bytes: int, max_losses: int) -> ExpertPlan:
    even = even_shares(task.loads, draft.hosts, task.group_speeds(draft.groups))
    proof = prove(
        layer_proofs(task.loads, even, draft.groups, task.cluster, task.floors),
        draft.on_ranks(),
        task.cluster,
        expert_bytes=expert_bytes,
        max_losses=max_losses,
        loss=draft.loss,
        reason=f"{draft.name}: {draft.price_s:.3g} s until the next plan",
    )
    return ExpertPlan(hosts=_host_tuples(draft, even, task.speeds), proof=proof)


def _host_tuples(
    draft: Draft, even: EvenShares, speeds: npt.NDArray[np.float64]
) -> tuple[tuple[ExpertHosts, ...], ...]:
    """Shares of groups split over their ranks by speed."""
    parts = [
        [(rank, float(speeds[rank] / speeds[list(ranks)].sum())) for rank in ranks]
        for ranks in draft.groups
    ]
    layers = []
    for hosts, shares in zip(draft.hosts, even.shares, strict=True):
        on: list[list[Host]] = [[] for _ in hosts]
        expert, group = hosts.nonzero()
        for e, g, share in zip(
            expert.tolist(), group.tolist(), shares[expert, group].tolist(), strict=True
        ):
            on[e] += [Host(rank, share * part) for rank, part in parts[g]]
        layers.append(tuple(tuple(sorted(found)) for found in on))
    return tuple(layers)
