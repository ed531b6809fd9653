"""The split of rows over replicas, for any routing and any shares: each computes its share."""

from fractions import Fraction

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from pacekeeper.core.layout.layout import ExpertReplica, ReplicaSet
from pacekeeper.trainer.parallel.dispatch_plan import (
    DispatchPlan,
    ReplicaShares,
    plan_dispatch,
    split_rows,
)

Case = tuple[int, list[ReplicaSet], Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ranks, replicas of each expert with their shares, and the routed rows [W, E]."""
    size, num_experts = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    experts = []
    for _ in range(num_experts):
        ranks = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
        weights = [draw(st.integers(0, 5)) for _ in ranks]
        total = sum(weights) or len(ranks)
        weights = weights if any(weights) else [1] * len(ranks)
        experts.append(
            tuple(ExpertReplica(r, w / total) for r, w in zip(ranks, weights, strict=True))
        )
    counts = draw(
        st.lists(
            st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts),
            min_size=size,
            max_size=size,
        )
    )
    scale = draw(st.sampled_from([1, 1, 10**8 + 7]))  # at which float32 is wrong by rows
    return size, experts, torch.tensor(counts, dtype=torch.int64) * scale


def shares_of(case: Case, rank: int) -> ReplicaShares:
    size, experts, _ = case
    held = [e for e, on in enumerate(experts) if any(r.rank == rank for r in on)]
    # Slots in another order than experts.
    return ReplicaShares.of(
        experts,
        {expert: len(held) - i for i, expert in enumerate(held)},
        ranks=range(size),
        rank=rank,
        num_slots=len(held) + 2,
        device=torch.device("cpu"),
    )


@given(cases())
def test_every_row_goes_to_one_replica_that_computes_its_share(case: Case) -> None:
    size, experts, counts_WE = case
    splits = [split_rows(counts_WE, shares_of(case, r).bounds_WE, r) for r in range(size)]
    sent_WWE = torch.stack([sent for sent, _ in splits])
    assert torch.equal(sent_WWE, torch.stack([got for _, got in splits]).transpose(0, 1))
    assert torch.equal(sent_WWE.sum(1), counts_WE)
    computed_WE = sent_WWE.sum(0)
    for expert, replicas in enumerate(experts):
        total = int(counts_WE[:, expert].sum())
        share = {replica.rank: replica.share for replica in replicas}
        wanted = Fraction(0)
        for rank in range(size):
            # Rounded to the nearest row, so that no error adds up over the ranks.
            wanted += total * Fraction(share.get(rank, 0.0)) / sum(map(Fraction, share.values()))
            computed = int(computed_WE[: rank + 1, expert].sum())
            assert abs(computed - wanted) <= Fraction(1, 2) + Fraction(total, 10**15)
            if rank not in share:
                assert computed_WE[rank, expert] == 0
            # Own rows first: nothing comes from elsewhere while own rows go away.
            own = int(sent_WWE[rank, rank, expert])
            assert own == min(int(counts_WE[rank, expert]), int(computed_WE[rank, expert]))
    event(f"replicated: {any(len(replicas) > 1 for replicas in experts)}")
    event(f"millions of rows: {int(counts_WE.sum()) > 10**6}")
    event(f"rows travel: {bool((sent_WWE.sum(2).fill_diagonal_(0)).any())}")


@given(cases())
def test_places_are_permutations_and_rows_are_grouped_by_slot(case: Case) -> None:
    size, experts, counts_WE = case
    counts_WE = counts_WE % 31
    generator = torch.Generator().manual_seed(int(counts_WE.sum()))
    routed = []
    for rank in range(size):
        expert_A = torch.repeat_interleave(torch.arange(len(experts)), counts_WE[rank])
        routed.append(expert_A[torch.randperm(len(expert_A), generator=generator)])
    plans = [plan_dispatch(routed[r], counts_WE, shares_of(case, r)) for r in range(size)]
    for rank, plan in enumerate(plans):
        assert_inverse(plan.sent_from_A, plan.sent_to_A)
        assert_inverse(plan.grouped_from_R, plan.grouped_to_R)
        assert plan.send == [plans[other].receive[rank] for other in range(size)]
        # What arrives, as the experts of the rows, computed by slot.
        sent = [routed[r][p.sent_from_A].split(p.send)[rank] for r, p in enumerate(plans)]
        grouped = torch.cat(sent)[plan.grouped_from_R]
        shares = shares_of(case, rank)
        slot_of = dict(
            zip(shares.held_Q[shares.slot_order_Q].tolist(), shares.slots_Q.tolist(), strict=True)
        )
        slots = [slot_of[e] for e in grouped.tolist()]
        assert slots == sorted(slots)
        assert torch.bincount(
            torch.tensor(slots, dtype=torch.int64), minlength=shares.num_slots
        ).equal(plan.rows_S)


def assert_inverse(places: Tensor, inverse: Tensor) -> None:
    assert torch.equal(places[inverse], torch.arange(len(places)))


def test_a_plan_of_no_rows_at_all_is_empty() -> None:
    case: Case = 2, [(ExpertReplica(0, 1.0),)], torch.zeros(2, 1, dtype=torch.int64)
    plan: DispatchPlan = plan_dispatch(
        torch.empty(0, dtype=torch.int64), case[2], shares_of(case, 1)
    )
    assert (plan.send, plan.receive, plan.rows_S.tolist()) == ([0, 0], [0, 0], [0, 0])
