"""Which rank computes which routed rows of one layer: integer bounds from the layout's shares.

All is computed on the device from the counts of all ranks, with the same result on every rank and
no host synchronisation. Each replica gets the rounded share of its expert's rows of this
micro-batch; it takes rows of its own rank first, and the rest is matched in rank order.

Shape suffixes: W ranks of the group, E experts of the layer, Q experts held here, S slots, A rows
routed here (tokens times experts per token), R rows received here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pacekeeper.core.layout.layout import ReplicaSet


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaShares:
    """Replicas of one layer's experts, as tensors on the device.

    Attributes:
        bounds_WE: Cumulative shares in rank order, float64: rounding errors are far below a row.
        own: Position of this rank in the group.
        held_Q: Experts held here, ascending.
        slot_order_Q: Positions in `held_Q` in ascending order of their slots.
        slots_Q: Slots of the held experts, ascending.
        slot_E: Slot of each expert held here; of others 0.
        num_slots: Slots of a rank.
    """

    bounds_WE: Tensor
    own: int
    held_Q: Tensor
    slot_order_Q: Tensor
    slots_Q: Tensor
    slot_E: Tensor
    num_slots: int

    @classmethod
    def of(
        cls,
        experts: Sequence[ReplicaSet],
        slots: Mapping[int, int],
        *,
        ranks: Sequence[int],
        rank: int,
        num_slots: int,
        device: torch.device,
    ) -> "ReplicaShares":
        """Build the tensors of one layer.

        Args:
            experts: Replicas of each expert of the layer.
            slots: Slot of each expert held on this rank.
            ranks: Members of the group, ascending.
            rank: This rank.
            num_slots: Slots of a rank.
            device: Where plans are computed.
        """
        position = {member: i for i, member in enumerate(ranks)}
        shares_WE = torch.zeros(len(ranks), len(experts), dtype=torch.float64)
        for expert, replicas in enumerate(experts):
            for replica in replicas:
                shares_WE[position[replica.rank], expert] = replica.share
        bounds_WE = (shares_WE / shares_WE.sum(0)).cumsum(0)
        held = sorted(slots)
        in_order = sorted(range(len(held)), key=lambda i: slots[held[i]])
        return cls(
            bounds_WE=bounds_WE.to(device),
            own=position[rank],
            held_Q=torch.tensor(held, dtype=torch.int64, device=device),
            slot_order_Q=torch.tensor(in_order, dtype=torch.int64, device=device),
            slots_Q=torch.tensor(sorted(slots.values()), dtype=torch.int64, device=device),
            slot_E=torch.tensor([slots.get(e, 0) for e in range(len(experts))], device=device),
            num_slots=num_slots,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DispatchPlan:
    """Routes of one micro-batch through one layer.

    Attributes:
        sent_from_A: Assignment (token * experts per token + choice) at each place of what is sent.
        sent_to_A: Place of each assignment in what is sent; the inverse of `sent_from_A`.
        send: Rows to each rank.
        receive: Rows from each rank.
        grouped_from_R: Place of arrival of each row in the order by slot.
        grouped_to_R: Place in the order by slot of each row that arrives.
        rows_S: Rows of each slot.
    """

    sent_from_A: Tensor
    sent_to_A: Tensor
    send: list[int]
    receive: list[int]
    grouped_from_R: Tensor
    grouped_to_R: Tensor
    rows_S: Tensor


def split_rows(counts_WE: Tensor, bounds_WE: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Return the rows [W, E] that rank `own` sends to each rank, and those it receives from each.

    Args:
        counts_WE: Rows that each rank routes to each expert, int64.
        bounds_WE: Cumulative shares of the replicas, as in `ReplicaShares`.
        own: Position of this rank.
    """
    total_E = counts_WE.sum(0)
    quota_WE = torch.diff((bounds_WE * total_E).round_().long(), dim=0, prepend=total_E[None] * 0)
    local_WE = torch.minimum(counts_WE, quota_WE)
    # What is left on both sides is laid out in rank order; overlaps are the transfers.
    end_WE = (counts_WE - local_WE).cumsum(0)
    begin_WE = end_WE - (counts_WE - local_WE)
    quota_end_WE = (quota_WE - local_WE).cumsum(0)
    quota_begin_WE = quota_end_WE - (quota_WE - local_WE)
    sent_WE = _overlap(begin_WE[own], end_WE[own], quota_begin_WE, quota_end_WE)
    received_WE = _overlap(begin_WE, end_WE, quota_begin_WE[own], quota_end_WE[own])
    sent_WE[own] += local_WE[own]
    received_WE[own] += local_WE[own]
    return sent_WE, received_WE


def plan_dispatch(
    expert_A: Tensor,
    counts_WE: Tensor,
    shares: ReplicaShares,
    read: Callable[[Tensor], list[list[int]]] = Tensor.tolist,
) -> DispatchPlan:
    """Plan the exchange of one micro-batch; the sizes are its one host synchronisation.

    Args:
        expert_A: Expert of each assignment of this rank, int64.
        counts_WE: Rows that each rank routes to each expert, int64.
        shares: Replicas of the layer.
        read: Reads integers on the host; waits for the device.
    """
    if len(counts_WE) == 1:
        return _plan_of_one_rank(expert_A, counts_WE[0], shares)
    sent_WE, received_WE = split_rows(counts_WE, shares.bounds_WE, shares.own)
    order_A = torch.argsort(expert_A, stable=True)
    # By expert and then destination, as `order_A` is cut; sent by destination and then expert.
    place_A = _moved(sent_WE.T, _starts(sent_WE).T, len(expert_A))
    sent_from_A = torch.empty_like(order_A).index_copy_(0, place_A, order_A)
    sent_to_A = torch.empty_like(order_A).index_copy_(0, order_A, place_A)
    send, receive = read(torch.stack([sent_WE.sum(1), received_WE.sum(1)]))
    # Arrives by source and then expert; computed by slot and then source.
    arrived_WQ = received_WE.index_select(1, shares.held_Q)
    by_slot_QW = arrived_WQ.index_select(1, shares.slot_order_Q).T
    starts_QW = torch.empty_like(by_slot_QW).index_copy_(
        0, shares.slot_order_Q, _starts(by_slot_QW)
    )
    grouped_to_R = _moved(arrived_WQ, starts_QW.T, sum(receive))
    in_place_R = torch.arange(sum(receive), device=grouped_to_R.device)
    grouped_from_R = torch.empty_like(grouped_to_R).index_copy_(0, grouped_to_R, in_place_R)
    rows_S = counts_WE.new_zeros(shares.num_slots)
    return DispatchPlan(
        sent_from_A=sent_from_A,
        sent_to_A=sent_to_A,
        send=send,
        receive=receive,
        grouped_from_R=grouped_from_R,
        grouped_to_R=grouped_to_R,
        rows_S=rows_S.index_copy_(0, shares.slots_Q, by_slot_QW.sum(1)),
    )


def _plan_of_one_rank(expert_A: Tensor, counts_E: Tensor, shares: ReplicaShares) -> DispatchPlan:
    """Plan without an exchange: rows are taken in the order by slot at once."""
    from_A = torch.argsort(shares.slot_E[expert_A], stable=True)
    in_place_A = torch.arange(len(from_A), device=from_A.device)
    return DispatchPlan(
        sent_from_A=from_A,
        sent_to_A=torch.empty_like(from_A).index_copy_(0, from_A, in_place_A),
        send=[len(from_A)],
        receive=[len(from_A)],
        grouped_from_R=in_place_A,
        grouped_to_R=in_place_A,
        rows_S=counts_E.new_zeros(shares.num_slots).index_copy_(0, shares.slot_E, counts_E),
    )


def _overlap(begin: Tensor, end: Tensor, other_begin: Tensor, other_end: Tensor) -> Tensor:
    """Length of the intersection of two integer intervals."""
    return (torch.minimum(end, other_end) - torch.maximum(begin, other_begin)).clamp_(min=0)


def _starts(lengths: Tensor) -> Tensor:
    """Where each segment begins, in row-major order of the segments."""
    flat = lengths.reshape(-1)
    return (flat.cumsum(0) - flat).view(lengths.shape)


def _moved(lengths: Tensor, to: Tensor, total: int) -> Tensor:
    """New place of each of `total` rows, whose segments of these `lengths` now begin at `to`."""
    shift = (to - _starts(lengths)).reshape(-1)
    shifts = torch.repeat_interleave(shift, lengths.reshape(-1), output_size=total)
    return shifts.add_(torch.arange(total, device=shifts.device))
