"""What going back to partial checkpoints costs: tokens whose updates some expert no longer has.

Pure. The share of them is PLT, the proportion of lost tokens of MoC-System (arXiv 2408.04307,
section 3.1), a mean over the MoE layers. A token counts for an expert as often as it is routed to
it. Tokens are not all: an expert that gets none still decays and follows its momentum.
"""

from collections.abc import Sequence
from math import ceil

Tokens = Sequence[Sequence[int]]  # [layer][expert]; no experts: a dense layer
PLT_LIMIT = 0.0375  # up to here MoC-System saw no loss of quality (section 3.1)


def mean_age(num_experts: int, num_saved: int) -> float:
    """Checkpoints since an expert was saved, a mean over experts (or over time), when `num_saved`
    of `num_experts` are saved in turn; 0.0 just after its save.

    (N / K - 1) / 2 where K divides N. Else gaps are q = floor(N / K) or q + 1, the longer ones
    N mod K times in K. Raises ValueError where there is nothing to take turns.
    """
    if not num_saved >= 1:
        raise ValueError(f"expected at least one expert to save, got {num_saved}")
    if num_saved >= num_experts:
        return 0.0
    short, num_long = divmod(num_experts, num_saved)
    ages = (num_saved - num_long) * short * (short - 1) + num_long * (short + 1) * short
    return ages / (2 * num_experts)


def planned_plt(
    *, num_faults: float, period_steps: float, total_steps: float, num_experts: int, num_saved: int
) -> float:
    """PLT of `num_faults` restores in `total_steps`, a checkpoint every `period_steps`, experts in
    turn, under uniform routing: faults * (period / total) * (N / K - 1) / 2 (research 2.3).
    """
    if total_steps <= 0 or period_steps <= 0:
        raise ValueError(f"expected steps above 0, got {period_steps} of {total_steps}")
    return num_faults * period_steps / total_steps * mean_age(num_experts, num_saved)


def lost(now: Tokens, saved: Tokens) -> tuple[int, ...]:
    """By layer: tokens that were routed to its experts after these were saved.

    now: routed to each expert from the run's first step to the state that goes on; saved: to where
    its copy was made. Raises ValueError where a copy knows more than was routed.
    """
    if any(s > n for ns, ss in zip(now, saved, strict=True) for n, s in zip(ns, ss, strict=True)):
        raise ValueError("a copy has seen more tokens than the run")
    return tuple(sum(ns) - sum(ss) for ns, ss in zip(now, saved, strict=True))


def plt(lost_tokens: Sequence[int], routed: Sequence[float]) -> float:
    """The share of lost tokens: of each MoE layer lost / routed, a mean over these layers.

    routed: by layer, over the run that the share is of; 0 for dense layers. 0.0 where nothing was.
    """
    parts = [one / whole for one, whole in zip(lost_tokens, routed, strict=True) if whole > 0]
    return sum(parts) / len(parts) if parts else 0.0


def next_num_saved(
    *,
    num_saved: int,
    num_experts: int,
    plt_so_far: float,
    limit: float,
    num_faults: int,
    step: int,
    total_steps: int,
    period_steps: int,
) -> int:
    """Dynamic-K: how many experts of each layer are saved from now on.

    K doubles, as in MoC-System (section 5.3), until the PLT so far and what is still to be expected
    fit in `limit`: as many faults as the rate so far foretells, and one at the least, so that under
    uniform routing the limit holds after every fault but the first. Never fewer than `num_saved`.
    """
    rate = num_faults / step if step > 0 else 0.0
    coming = max(1.0, rate * max(0, total_steps - step))
    while num_saved < num_experts:
        more = planned_plt(
            num_faults=coming,
            period_steps=period_steps,
            total_steps=total_steps,
            num_experts=num_experts,
            num_saved=num_saved,
        )
        if plt_so_far + more <= limit * (1.0 + 1e-9):
            break
        num_saved *= 2
    return min(num_saved, num_experts)


def longest_gap(num_experts: int, num_saved: int) -> int:
    """After how many checkpoints in turn each expert was saved at least once."""
    return ceil(num_experts / num_saved)
