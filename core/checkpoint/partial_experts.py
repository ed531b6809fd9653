"""Which experts are worth saving more often: those whose tokens are likely to be lost.

Pure. An expert with w_e tokens per checkpoint whose live copies are all lost with probability h_e
costs w_e * h_e tokens for each checkpoint it is stale. Saved with frequency x_e it is stale for
(1 / x_e - 1) / 2 checkpoints or more (even gaps are best, by Jensen), so the least possible cost
has x_e ~ sqrt(w_e * h_e), at most 1 (research 4.8). Round-robin is x_e = K / N.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from math import ceil, inf, prod, sqrt

from pacekeeper.core.layout.layout import Block, BlockKind

MAX_PRIORITY = 2.0**50  # above any need: tokens times checkpoints


def loss_probability(
    hosts: Collection[int], probability: Mapping[int, float], *, everybody: float = 0.0
) -> float:
    """How likely all copies of an expert are lost before its next save.

    hosts: the ranks, or the nodes, that hold it, which fail independently with these
    probabilities; with probability `everybody` all fail at once (power, an operator). Raises
    ValueError for an expert without host, KeyError for a host of no known probability.
    """
    if not hosts:
        raise ValueError("an expert without host is lost already")
    alone = prod(probability[host] for host in hosts)
    return everybody + (1.0 - everybody) * alone


def save_frequencies(weights: Sequence[float], num_saved: float) -> tuple[float, ...]:
    """How often each is to be saved, in saves per checkpoint: sum `num_saved`, each at most 1.

    weights: w_e * h_e. min(1, theta * sqrt(weight)) with the theta that gives the sum. What weighs
    nothing gets its even part of what is left when all others are always saved. Raises ValueError
    for weights below 0 or more to save than there are.
    """
    if not all(0.0 <= weight < inf for weight in weights):
        raise ValueError("weights must be finite and not negative")
    if not 0.0 <= num_saved <= len(weights):
        raise ValueError(f"{num_saved} of {len(weights)} can not be saved")
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
    """Tokens lost per checkpoint, in the mean, at these frequencies with even gaps:
    sum weight * (1 / x - 1) / 2; infinite where something that weighs is never saved.
    """
    return sum(
        weight * (1.0 / x - 1.0) / 2.0 if x > 0.0 else inf
        for weight, x in zip(weights, saves, strict=True)
        if weight > 0.0
    )


def least_loss(weights: Sequence[float], num_saved: float) -> float:
    """No order of saves loses less in the long run: the loss at the best frequencies."""
    return expected_loss(weights, save_frequencies(weights, num_saved))


def round_robin_ratio(weights: Sequence[float], num_saved: float) -> float:
    """Loss of taking turns / least loss, 1.0 or more; 1.0 where neither loses anything."""
    least = least_loss(weights, num_saved)
    turns = expected_loss(weights, [num_saved / len(weights)] * len(weights))
    if turns == 0.0:
        return 1.0
    return turns / least if least > 0.0 else inf


def save_priority(risk: float, unsaved_tokens: float, age: int) -> float:
    """How urgent it is to save an expert: the greatest are saved first.

    age: checkpoints since its last save, this one counted, so 1 or more. What it would lose if it
    were lost now, times how long that has grown: the index (Whittle's, for ages that grow
    linearly). Where w and h stay, this saves each with a frequency near sqrt(w * h).
    """
    return risk * unsaved_tokens * (age + 1)


def suspect_priority(hosts: Collection[int], suspects: Collection[int]) -> float:
    """What comes before all needs (add it): 0.0 unless all hosts of the expert are suspect; the
    fewer there are, the greater it is (research 4.8). Raises ValueError for an expert without host.
    """
    if not hosts:
        raise ValueError("an expert without host is lost already")
    return MAX_PRIORITY / len(hosts) if set(hosts) <= set(suspects) else 0.0


def loss_bound(weights: Sequence[Sequence[float]], num_saved: float) -> tuple[float, float]:
    """Over all layers, weights[layer][expert]: the least that any order loses, in tokens per
    checkpoint, and how many times that taking turns loses (1.0 where neither loses anything).
    """
    moe = [layer for layer in weights if layer]
    least = sum(least_loss(layer, num_saved) for layer in moe)
    turns = sum(expected_loss(layer, [num_saved / len(layer)] * len(layer)) for layer in moe)
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
    """Of each layer the `num_saved` experts with the greatest need, need[layer][expert].

    Where needs are equal, those whose turn is next at checkpoint `number` (0, 1, ..) come first, so
    equal experts take turns: of N in a layer, each stands in at least one of any ceil(N / K)
    checkpoints in a row. The turn is shifted by one checkpoint from one MoE layer to the next, so
    that ranks which hold different experts share the work. Raises ValueError for a `num_saved`
    below 1.
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


def expected_lost_token_ratio(
    *, num_faults: float, period_steps: float, total_steps: float, num_experts: int, num_saved: int
) -> float:
    """PLT of `num_faults` restores in `total_steps`, a checkpoint every `period_steps`, experts in
    turn, under uniform routing: faults * (period / total) * (N / K - 1) / 2 (research 2.3).
    """
    if total_steps <= 0 or period_steps <= 0:
        raise ValueError(f"expected steps above 0, got {period_steps} of {total_steps}")
    return num_faults * period_steps / total_steps * mean_age(num_experts, num_saved)


def lost_tokens_by_layer(now: Tokens, saved: Tokens) -> tuple[int, ...]:
    """By layer: tokens that were routed to its experts after these were saved.

    now: routed to each expert from the run's first step to the state that goes on; saved: to where
    its copy was made. Raises ValueError where a copy knows more than was routed.
    """
    if any(s > n for ns, ss in zip(now, saved, strict=True) for n, s in zip(ns, ss, strict=True)):
        raise ValueError("a copy has seen more tokens than the run")
    return tuple(sum(ns) - sum(ss) for ns, ss in zip(now, saved, strict=True))


def lost_token_ratio(lost_tokens: Sequence[int], routed: Sequence[float]) -> float:
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
        more = expected_lost_token_ratio(
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


def longest_save_gap(num_experts: int, num_saved: int) -> int:
    """After how many checkpoints in turn each expert was saved at least once."""
    return ceil(num_experts / num_saved)
