"""Which experts are worth saving more often: those whose tokens are likely to be lost.

Pure. An expert with w_e tokens per checkpoint whose live copies are all lost with probability h_e
costs w_e * h_e tokens for each checkpoint it is stale. Saved with frequency x_e it is stale for
(1 / x_e - 1) / 2 checkpoints or more (even gaps are best, by Jensen), so the least possible cost
has x_e ~ sqrt(w_e * h_e), at most 1 (research 4.8). Round-robin is x_e = K / N.
"""

from collections.abc import Collection, Mapping, Sequence
from math import inf, prod, sqrt

ALARM = 2.0**50  # above any need: tokens times checkpoints


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


def frequencies(weights: Sequence[float], num_saved: float) -> tuple[float, ...]:
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
    return expected_loss(weights, frequencies(weights, num_saved))


def round_robin_ratio(weights: Sequence[float], num_saved: float) -> float:
    """Loss of taking turns / least loss, 1.0 or more; 1.0 where neither loses anything."""
    least = least_loss(weights, num_saved)
    turns = expected_loss(weights, [num_saved / len(weights)] * len(weights))
    if turns == 0.0:
        return 1.0
    return turns / least if least > 0.0 else inf


def need(risk: float, unsaved_tokens: float, age: int) -> float:
    """How urgent it is to save an expert: the greatest are saved first.

    age: checkpoints since its last save, this one counted, so 1 or more. What it would lose if it
    were lost now, times how long that has grown: the index (Whittle's, for ages that grow
    linearly). Where w and h stay, this saves each with a frequency near sqrt(w * h).
    """
    return risk * unsaved_tokens * (age + 1)


def alarm(hosts: Collection[int], suspects: Collection[int]) -> float:
    """What comes before all needs (add it): 0.0 unless all hosts of the expert are suspect; the
    fewer there are, the greater it is (research 4.8). Raises ValueError for an expert without host.
    """
    if not hosts:
        raise ValueError("an expert without host is lost already")
    return ALARM / len(hosts) if set(hosts) <= set(suspects) else 0.0


def order_bound(weights: Sequence[Sequence[float]], num_saved: float) -> tuple[float, float]:
    """Over all layers, weights[layer][expert]: the least that any order loses, in tokens per
    checkpoint, and how many times that taking turns loses (1.0 where neither loses anything).
    """
    moe = [layer for layer in weights if layer]
    least = sum(least_loss(layer, num_saved) for layer in moe)
    turns = sum(expected_loss(layer, [num_saved / len(layer)] * len(layer)) for layer in moe)
    if turns == 0.0:
        return least, 1.0
    return least, turns / least if least > 0.0 else inf
