"""Dropless dispatch of tokens to expert replicas on any ranks, by uneven all-to-all.

Shape suffixes: T own tokens, K experts per token, A = T * K assignments, R rows received, E experts
of the layer, W ranks of the group, D hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pacekeeper.core.layout import ExpertHosts
from pacekeeper.trainer.fabric import Collectives
from pacekeeper.trainer.work import WorkMeter

_BEYOND = 2.0  # larger than any position within an expert's tokens, which lie in [0, 1)
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill [0, 1) evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Where each expert's tokens go: positions in the group and cumulative shares.

    destinations_EH int64 and bounds_EH float64, H = largest number of hosts of an expert; token
    number k of n of an expert goes to the first host whose bound is beyond its place in [0, 1),
    which is (k + phase_E) / n.
    """

    destinations_EH: Tensor
    bounds_EH: Tensor
    phase_E: Tensor

    @classmethod
    def of(cls, hosts: tuple[ExpertHosts, ...], fabric: Collectives) -> "Routes":
        """Routes of one layer.

        The phases of one expert are spread evenly over the ranks, so that their roundings add up to
        the shares; they turn from expert to expert, so that no host is favoured for standing first.
        """
        position = {rank: i for i, rank in enumerate(fabric.ranks)}
        width = max(len(h) for h in hosts)
        own_phase = (position[fabric.rank] + 0.5) / len(fabric.ranks)
        destinations, bounds = [], []
        for expert_hosts in hosts:
            used = [host for host in expert_hosts if host.share > 0.0]
            total, row = 0.0, []
            for host in used:
                total += host.share
                row.append(total)
            row[-1] = _BEYOND
            padding = width - len(used)
            destinations.append([position[h.rank] for h in used] + [0] * padding)
            bounds.append(row + [_BEYOND] * padding)
        return cls(
            destinations_EH=torch.tensor(destinations),
            bounds_EH=torch.tensor(bounds, dtype=torch.float64),
            phase_E=(own_phase + _GOLDEN * torch.arange(len(hosts), dtype=torch.float64)) % 1.0,
        )

    def to(self, device: torch.device) -> "Routes":
        """The same on that device."""
        return Routes(
            destinations_EH=self.destinations_EH.to(device),
            bounds_EH=self.bounds_EH.to(device),
            phase_E=self.phase_E.to(device),
        )

    def split(self, experts_A: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """(order_A, destination_A): assignments sorted by expert, and where each one goes.

        Each host gets its share of an expert's tokens to within one token.
        """
        order_A = torch.argsort(experts_A, stable=True)
        sorted_A = experts_A[order_A]
        counts_E = torch.bincount(experts_A, minlength=num_experts)
        first_E = torch.cumsum(counts_E, 0) - counts_E
        within_A = torch.arange(len(experts_A), device=experts_A.device) - first_E[sorted_A]
        place_A = (within_A + self.phase_E[sorted_A]) / counts_E[sorted_A]
        host_A = (place_A[:, None] >= self.bounds_EH[sorted_A]).sum(1)
        return order_A, self.destinations_EH[sorted_A, host_A]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """Rows that arrived for the local experts, grouped by expert, and the way back.

    rows_RD are sorted by expert; counts_E how many each expert got here.
    """

    rows_RD: Tensor
    counts_E: Tensor
    sending_place_A: Tensor  # where each assignment stands in sending order
    arrival_place_R: Tensor  # where each arrived row stands in the order by expert
    sent_splits: list[int]
    received_splits: list[int]


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose gradient is the opposite one; both are boundaries of the work meter."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        fabric: Collectives,
        meter: WorkMeter,
        output_splits: list[int],
        input_splits: list[int],
    ) -> Tensor:
        ctx.route = (fabric, meter, meter.boundary(), output_splits, input_splits)
        output = rows.new_empty((sum(output_splits), rows.shape[1]))
        fabric.all_to_all(output, rows.contiguous(), output_splits, input_splits)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        fabric, meter, number, output_splits, input_splits = ctx.route
        meter.backward_boundary(number)
        (gradient,) = gradients
        back = gradient.new_empty((sum(input_splits), gradient.shape[1]))
        fabric.all_to_all(back, gradient.contiguous(), input_splits, output_splits)
        return back, None, None, None, None


def _travel(
    rows: Tensor,
    fabric: Collectives,
    meter: WorkMeter,
    output_splits: list[int],
    input_splits: list[int],
) -> Tensor:
    arrived: Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        rows, fabric, meter, output_splits, input_splits
    )
    return arrived


def dispatch(
    tokens_TD: Tensor,
    experts_TK: Tensor,
    routes: Routes,
    num_experts: int,
    fabric: Collectives,
    meter: WorkMeter,
) -> Dispatched:
    """Send each token to a host of each of its experts; dropless. Raises PeerLost."""
    size = len(fabric.ranks)
    experts_A = experts_TK.reshape(-1)
    order_A, destination_A = routes.split(experts_A, num_experts)
    key_A = destination_A * num_experts + experts_A[order_A]
    # Ascending expert within each destination: `order_A` is sorted by expert already.
    source_A = order_A[torch.argsort(destination_A, stable=True)]
    sent_WE = torch.bincount(key_A, minlength=size * num_experts).view(size, num_experts)
    received_WE = torch.empty_like(sent_WE)
    fabric.all_to_all(received_WE, sent_WE, [1] * size, [1] * size)
    sent_splits: list[int] = sent_WE.sum(1).tolist()
    received_splits: list[int] = received_WE.sum(1).tolist()
    # index_select, here and below: advanced indexing costs several times as much on CPU.
    sent_AD = tokens_TD.index_select(0, source_A // experts_TK.shape[1])
    arrived_RD = _travel(sent_AD, fabric, meter, received_splits, sent_splits)
    expert_E = torch.arange(num_experts, device=received_WE.device)
    expert_R = expert_E.repeat(size).repeat_interleave(received_WE.reshape(-1))
    grouping_R = torch.argsort(expert_R, stable=True)
    return Dispatched(
        rows_RD=arrived_RD.index_select(0, grouping_R),
        counts_E=received_WE.sum(0),
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
    meter: WorkMeter,
) -> Tensor:
    """Bring the experts' answers home and add them up by the router's weights: [T, D]."""
    arrival_RD = answers_RD.index_select(0, dispatched.arrival_place_R)
    home_AD = _travel(arrival_RD, fabric, meter, dispatched.sent_splits, dispatched.received_splits)
    num_tokens, experts_per_token = weights_TK.shape
    # By assignment: a token's answers are added in a fixed order whatever way they travelled.
    answers_AD = home_AD.index_select(0, dispatched.sending_place_A)
    answers_TKD = answers_AD.view(num_tokens, experts_per_token, answers_RD.shape[1])
    return (answers_TKD * weights_TK[..., None]).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)
