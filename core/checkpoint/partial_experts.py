"""Which experts a partial checkpoint saves: those whose tokens are most likely to be lost.

An expert with w_e tokens per checkpoint whose live copies are all lost with probability h_e costs
w_e * h_e tokens for each checkpoint that its saved copy is old. Saved with frequency x_e, it is old
for (1 / x_e - 1) / 2 checkpoints or more (even gaps are best, by Jensen), so the least possible
cost has x_e ~ sqrt(w_e * h_e), at most 1 (research 4.8). Round-robin is x_e = K / N.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from math import ceil, inf, prod, sqrt

from pacekeeper.core.layout.layout import Block, BlockKind

MAX_PRIORITY = 2.0**50  # above any need: tokens times checkpoints


def loss_probability(
    ranks: Collection[int], probability: Mapping[int, float], *, all_at_once: float = 0.0
) -> float:
    """The probability that all copies of an expert are lost before its next save.

    Args:
        ranks: the ranks, or nodes, that hold it; they fail independently.
        probability: the failure probability of each of them.
        all_at_once: the probability that all fail at once (power, an operator).

    Raises:
        ValueError: no rank holds the expert.
        KeyError: the probability of one is unknown.
    """
    if not ranks:
        raise ValueError("no rank holds the expert")
    alone = prod(probability[rank] for rank in ranks)
    return all_at_once + (1.0 - all_at_once) * alone


def save_frequencies(weights: Sequence[float], num_saved: float) -> tuple[float, ...]:
    """The best saves per checkpoint of each expert: they add up to `num_saved`, each at most 1.

    min(1, theta * sqrt(weight)) with the theta that gives the sum. Experts of weight 0 get an even
    part of what is left when all others are always saved.

    Args:
        weights: w_e * h_e of each expert.
        num_saved: experts per checkpoint.

    Raises:
        ValueError: a weight is negative, or `num_saved` exceeds the number of experts.
    """
    if not all(0.0 <= weight < inf for weight in weights):
        raise ValueError("weights must be finite and not negative")
    if not 0.0 <= num_saved <= len(weights):
        raise ValueError(f"{num_saved} of {len(weights)} experts cannot be saved")
    found = [0.0] * len(weights)
    open_ = [i for i, weight in enumerate(weights) if weight > 0.0]
    left = float(num_saved)
    while open_:
        total = sum(sqrt(weights[i]) for i in open_)
        full = [i for i in open_ if sqrt(weights[i]) * left >= total]
        if not full:
            for i in open_:
                found[i] = sqrt(weights[i]) * left / total
            return tuple(found)
        for i in full:
            found[i] = 1.0
        left -= len(full)
        open_ = [i for i in open_ if i not in set(full)]
    idle = [i for i, weight in enumerate(weights) if weight == 0.0]
    for i in idle:
        found[i] = left / len(idle)
    return tuple(found)


def expected_loss(weights: Sequence[float], saves: Sequence[float]) -> float:
    """The mean number of tokens lost per checkpoint at these save frequencies with even gaps.

    sum weight * (1 / x - 1) / 2; infinite where an expert of weight above 0 is never saved.
    """
    return sum(
        weight * (1.0 / x - 1.0) / 2.0 if x > 0.0 else inf
        for weight, x in zip(weights, saves, strict=True)
        if weight > 0.0
    )


def least_loss(weights: Sequence[float], num_saved: float) -> float:
    """The loss at the best frequencies: a lower bound for every order of saves."""
    return expected_loss(weights, save_frequencies(weights, num_saved))


def save_priority(risk: float, unsaved_tokens: float, age: int) -> float:
    """The priority of saving an expert: the highest are saved first.

    The tokens lost if it were lost now, times how long that has grown: Whittle's index for ages
    that grow linearly. For constant w and h each is saved with a frequency near sqrt(w * h).

    Args:
        risk: the probability that all its copies are lost before the next save.
        unsaved_tokens: tokens routed to it since its last save.
        age: checkpoints since its last save, this one counted, so 1 or more.
    """
    return risk * unsaved_tokens * (age + 1)


def suspect_priority(ranks: Collection[int], suspects: Collection[int]) -> float:
    """An addend that exceeds all priorities if all replica ranks of the expert are suspect, else
    0.0.

    The fewer replica ranks, the higher (research 4.8). Raises ValueError if no rank holds the
    expert.
    """
    if not ranks:
        raise ValueError("no rank holds the expert")
    return MAX_PRIORITY / len(ranks) if set(ranks) <= set(suspects) else 0.0


def loss_bound(weights: Sequence[Sequence[float]], num_saved: float) -> tuple[float, float]:
    """The least loss of any order over all layers, and the ratio of round-robin to it.

    Args:
        weights: weights[layer][expert].
        num_saved: experts per layer and checkpoint.

    Returns:
        (least loss in tokens per checkpoint, ratio); the ratio is 1.0 where neither loses anything.
    """
    moe = [layer for layer in weights if layer]
    least = sum(least_loss(layer, min(num_saved, len(layer))) for layer in moe)
    turns = sum(
        expected_loss(layer, [min(1.0, num_saved / len(layer))] * len(layer)) for layer in moe
    )
    if turns == 0.0:
        return least, 1.0
    return least, turns / least if least > 0.0 else inf


class ExpertOrder(StrEnum):
    """How the experts of a partial checkpoint are chosen."""

    TURN = "turn"  # one after the other
    LOAD = "load"  # most tokens since they were saved last
    RISK = "risk"  # most tokens likely to be lost: core/checkpoint/partial_experts.py


def select_experts(
    need: Sequence[Sequence[float]], num_saved: int, number: int
) -> frozenset[Block]:
    """The `num_saved` experts of each layer with the highest priority.

    Experts of equal priority take turns by checkpoint `number` (0, 1, ..): of N in a layer, each is
    in at least one of any ceil(N / K) consecutive checkpoints. The turn shifts by one checkpoint
    from one MoE layer to the next, so that ranks with different experts share the work.

    Args:
        need: need[layer][expert], the priorities.
        num_saved: experts per layer, at least 1.
        number: the number of the checkpoint.

    Raises:
        ValueError: `num_saved` is below 1.
    """
    if num_saved < 1:
        raise ValueError(f"of each layer at least one expert is saved, got {num_saved}")
    moe = [(layer, needs) for layer, needs in enumerate(need) if needs]
    return frozenset(
        Block(BlockKind.EXPERT, layer, expert)
        for place, (layer, needs) in enumerate(moe)
        for expert in _greatest(needs, num_saved, (number + place) * num_saved)
    )


def _greatest(needs: Sequence[float], num_saved: int, first: int) -> Iterable[int]:
    return sorted(range(len(needs)), key=lambda e: (-needs[e], (e - first) % len(needs)))[
        :num_saved
    ]


Tokens = Sequence[Sequence[int]]  # [layer][expert]; no experts: a dense layer


LOST_TOKENS_LIMIT = 0.0375  # up to here MoC-System saw no loss of quality (section 3.1)


def mean_age(num_experts: int, num_saved: int) -> float:
    """Mean checkpoints since an expert's last save when `num_saved` of `num_experts` take turns.

    (N / K - 1) / 2 where K divides N. Otherwise gaps are q = floor(N / K) or q + 1, the longer ones
    N mod K times in K. Raises ValueError for `num_saved` below 1.
    """
    if not num_saved >= 1:
        raise ValueError(f"expected at least one expert to save, got {num_saved}")
    if num_saved >= num_experts:
        return 0.0
    short, num_long = divmod(num_experts, num_saved)
    ages = (num_saved - num_long) * short * (short - 1) + num_long * (short + 1) * short
    return ages / (2 * num_experts)


def expected_lost_token_ratio(
    *, num_faults: float, period_steps: float, total_steps: float, num_experts: int, num_saved: int
) -> float:
    """PLT after `num_faults` restores, with experts saved in turn and uniform routing.

    faults * (period / total) * (N / K - 1) / 2 (research 2.3).
    """
    if total_steps <= 0 or period_steps <= 0:
        raise ValueError(f"expected steps above 0, got {period_steps} of {total_steps}")
    return num_faults * period_steps / total_steps * mean_age(num_experts, num_saved)


def lost_tokens_by_layer(now: Tokens, saved: Tokens) -> tuple[int, ...]:
    """By layer: tokens that were routed to its experts after these were saved.

    Args:
        now: tokens routed to each expert from the first step to the state that continues.
        saved: the same up to the save of its copy.

    Raises:
        ValueError: a saved count exceeds the current one.
    """
    if any(s > n for ns, ss in zip(now, saved, strict=True) for n, s in zip(ns, ss, strict=True)):
        raise ValueError("a copy has seen more tokens than the run")
    return tuple(sum(ns) - sum(ss) for ns, ss in zip(now, saved, strict=True))


def lost_token_ratio(lost_tokens: Sequence[int], routed: Sequence[float]) -> float:
    """The proportion of lost tokens (PLT of MoC-System): lost / routed, a mean over MoE layers.

    `routed`: by layer, over the same run; 0 for dense layers. 0.0 where no token was routed.
    """
    parts = [one / whole for one, whole in zip(lost_tokens, routed, strict=True) if whole > 0]
    return sum(parts) / len(parts) if parts else 0.0


def expected_faults(num_faults: int, step: int, total_steps: int) -> float:
    """The number of faults of the rest of a run, by the rate of its first `step` steps; at least 1.

    At least one, so that under uniform routing a limit holds after every fault but the first.
    """
    rate = num_faults / step if step > 0 else 0.0
    return max(1.0, rate * max(0, total_steps - step))


def next_num_saved(
    *,
    num_saved: int,
    num_experts: int,
    plt_so_far: float,
    limit: float,
    num_faults: float,
    total_steps: int,
    period_steps: int,
) -> int:
    """The number of experts of each layer that are saved from now on (Dynamic-K).

    K doubles, as in MoC-System (section 5.3), until the PLT so far and that of the expected
    `num_faults` fit in `limit`. Never fewer than `num_saved`.
    """
    while num_saved < num_experts:
        more = expected_lost_token_ratio(
            num_faults=num_faults,
            period_steps=period_steps,
            total_steps=total_steps,
            num_experts=num_experts,
            num_saved=num_saved,
        )
        if plt_so_far + more <= limit * (1.0 + 1e-9):
            break
        num_saved *= 2
    return min(num_saved, num_experts)


def longest_save_gap(num_experts: int, num_saved: int) -> int:
    """The number of consecutive checkpoints that save every expert at least once."""
    return ceil(num_experts / num_saved)
