"""Dropless dispatch of tokens to expert replicas on any ranks, by uneven all-to-all.

Shape suffixes: T own tokens, K experts per token, A = T * K assignments, R rows received, E experts
of the layer, W ranks of the group, D hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.layout.replica_spread import NO_DOMAINS, DomainOf, domain_of_rank
from pacekeeper.trainer.distributed.collectives import Collectives, all_to_all_autograd
from pacekeeper.trainer.toy.model.flop_counter import WorkPass
from pacekeeper.trainer.toy.parallel.all_to_all_splits import (
    Exchange,
    Neighbourhood,
    exchange,
    neighbourhoods,
)
from pacekeeper.trainer.toy.parallel.token_balancing import (
    Ints,
    ReplicaIndex,
    balance_rows,
    whole_capacities,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchPlan:
    """What one layer's dispatch knows before a step: hosts, their speeds, and who is near.

    `own`: this rank's position in the group; `held_E`: the experts it holds, ascending.
    """

    pairs: ReplicaIndex
    capacity_W: Ints
    passes: tuple[Neighbourhood, ...]
    own: int
    held_E: list[int]

    @classmethod
    def of(
        cls, layout: Layout, layer: int, fabric: Collectives, domain_of: DomainOf = NO_DOMAINS
    ) -> "DispatchPlan":
        """Routes of one layer. `domain_of`: the node of each rank."""
        position = {rank: i for i, rank in enumerate(fabric.ranks)}
        hosts = [[position[host.rank] for host in on] for on in layout.experts[layer]]
        pairs = ReplicaIndex.of(hosts, len(fabric.ranks))
        return cls(
            pairs=pairs,
            capacity_W=whole_capacities([layout.speed_by_rank[rank] for rank in fabric.ranks]),
            passes=neighbourhoods(
                pairs, [domain_of_rank(domain_of, rank) for rank in fabric.ranks]
            ),
            own=position[fabric.rank],
            held_E=[e for e, on in enumerate(hosts) if position[fabric.rank] in on],
        )

    def split(self, counts_WE: Tensor) -> Exchange:
        """Who computes what this rank brings, and what it gets, from the counts of all ranks."""
        counts = counts_WE.numpy()
        rows_P = balance_rows(self.pairs, counts, self.capacity_W).rows_P
        return exchange(self.pairs, counts, rows_P, self.own, self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows that arrived for the local experts, grouped by expert, and the way back.

    rows_RD are sorted by expert; counts_E how many each expert got here.
    """

    rows_RD: Tensor
    counts_E: Tensor
    routed_E: Tensor  # by all ranks, wherever they went
    sending_place_A: Tensor  # where each assignment stands in sending order
    arrival_place_R: Tensor  # where each arrived row stands in the order by expert
    sent_splits: list[int]
    received_splits: list[int]


def dispatch(
    tokens_TD: Tensor,
    experts_TK: Tensor,
    routes: DispatchPlan,
    num_experts: int,
    fabric: Collectives,
    work: WorkPass,
) -> Dispatched:
    """Send each token to a host of each of its experts; dropless. Raises PeerLost.

    All ranks tell all ranks their counts first, so that each splits this step's rows alike.
    """
    size = len(fabric.ranks)
    experts_A = experts_TK.reshape(-1)
    order_A = torch.argsort(experts_A, stable=True)
    # The split is found on the host, and counts travel through its memory anyway.
    counts_E = torch.bincount(experts_A, minlength=num_experts).cpu()
    counts_WE = counts_E.new_empty(size, num_experts)
    fabric.all_to_all(counts_WE, counts_E.repeat(size, 1), [1] * size, [1] * size)
    way = routes.split(counts_WE)
    # The pairs are ordered by expert, as `order_A` is: each takes the next so many rows.
    destination_A = torch.from_numpy(np.repeat(routes.pairs.host_P, way.sent_P)).to(order_A.device)
    # Ascending expert within each destination.
    source_A = order_A[torch.argsort(destination_A, stable=True)]
    sent_splits: list[int] = torch.bincount(destination_A, minlength=size).tolist()
    received_WE = counts_WE.new_zeros(size, num_experts)
    received_WE[:, routes.held_E] = torch.from_numpy(way.received_WQ)
    received_splits: list[int] = received_WE.sum(1).tolist()
    received_WE = received_WE.to(order_A.device)
    # index_select, here and below: advanced indexing costs several times as much on CPU.
    sent_AD = tokens_TD.index_select(0, source_A // experts_TK.shape[1])
    # Just after the counts' all-to-all, which nobody left before the last had come.
    arrived_RD = all_to_all_autograd(
        sent_AD, fabric, work, received_splits, sent_splits, entered_synchronously=True
    )
    expert_E = torch.arange(num_experts, device=received_WE.device)
    expert_R = expert_E.repeat(size).repeat_interleave(received_WE.reshape(-1))
    grouping_R = torch.argsort(expert_R, stable=True)
    return Dispatched(
        rows_RD=arrived_RD.index_select(0, grouping_R),
        counts_E=received_WE.sum(0),
        routed_E=counts_WE.sum(0),
        sending_place_A=_inverse(source_A),
        arrival_place_R=_inverse(grouping_R),
        sent_splits=sent_splits,
        received_splits=received_splits,
    )


def combine(
    answers_RD: Tensor,
    dispatched: Dispatched,
    weights_TK: Tensor,
    fabric: Collectives,
    work: WorkPass,
) -> Tensor:
    """Bring the experts' answers home and add them up by the router's weights: [T, D]."""
    arrival_RD = answers_RD.index_select(0, dispatched.arrival_place_R)
    home_AD = all_to_all_autograd(
        arrival_RD, fabric, work, dispatched.sent_splits, dispatched.received_splits
    )
    num_tokens, experts_per_token = weights_TK.shape
    # By assignment: a token's answers are added in a fixed order whatever way they travelled.
    answers_AD = home_AD.index_select(0, dispatched.sending_place_A)
    answers_TKD = answers_AD.view(num_tokens, experts_per_token, answers_RD.shape[1])
    return (answers_TKD * weights_TK[..., None]).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)
