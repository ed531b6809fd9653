"""The joint plan's price against a twin that tries all hosts of tiny cases."""

from itertools import combinations, product

import numpy as np

from pacekeeper.controller.planning.experts.planner import plan_experts
from pacekeeper.controller.planning.experts.problem import Cluster, Floors, Prices
from pacekeeper.controller.planning.reliability import loss_probability, minimal_cut_sets
from support.densest import least_split

NUM_CASES, NUM_RANKS = 100, 3
ALL_HOSTS = [frozenset(c) for k in range(1, 4) for c in combinations(range(NUM_RANKS), k)]

Question = tuple[list[float], Cluster, Floors, Prices]


def drawn(random: np.random.Generator) -> Question:
    """Skewed loads, slow and suspect ranks, and every weight of survival against balance."""
    while True:
        num_experts, slots, floor = random.integers((2, 1, 1), (5, 4, 3)).tolist()
        if NUM_RANKS * min(slots, num_experts) >= floor * num_experts:
            break
    cluster = Cluster(
        speeds=tuple(random.choice([1.0, 1.0, 0.5], NUM_RANKS).tolist()),
        slots=(slots,) * NUM_RANKS,
        failure_probability=tuple(random.choice([0.01, 0.01, 0.2], NUM_RANKS).tolist()),
        nodes=tuple(range(NUM_RANKS)),
        racks=tuple(range(NUM_RANKS)),
    )
    prices = Prices(
        num_steps=int(random.choice([1, 10, 100])), restart_s=float(random.choice([1, 60, 600]))
    )
    loads = random.choice([1.0, 2.0, 3.0, 5.0, 8.0, 20.0, 50.0], num_experts).tolist()
    return loads, cluster, Floors(nodes=floor), prices


def price_s(question: Question, value: float, loss: float) -> float:
    loads, cluster, _, prices = question
    fluid = sum(loads) / sum(cluster.speeds)
    above = max(0.0, value - (1.0 + prices.even) * fluid) / fluid
    return above * prices.step_s * prices.num_steps + loss * prices.restart_s


def least_s(question: Question) -> float:
    """Of all hosts that fit the slots and keep the floor."""
    loads, cluster, floors, _ = question
    allowed = [on for on in ALL_HOSTS if len(on) >= floors.nodes]
    found = []
    for hosts in product(allowed, repeat=len(loads)):
        held = [sum(rank in on for on in hosts) for rank in range(NUM_RANKS)]
        if max(held) <= cluster.slots[0]:
            loss = loss_probability(minimal_cut_sets(hosts), cluster.node_failure)
            found.append(price_s(question, least_split(loads, hosts, cluster.speeds), loss))
    return min(found)


def test_nearly_all_tiny_plans_are_the_cheapest_there_are() -> None:
    random = np.random.default_rng(1)
    num_best = 0
    for _ in range(NUM_CASES):
        question = drawn(random)
        loads, cluster, floors, prices = question
        proof = plan_experts([loads], cluster, floors=floors, prices=prices).proof
        ours_s = price_s(question, proof.layers[0].value, proof.loss_probability)
        twin_s = least_s(question)
        assert ours_s >= twin_s * (1.0 - 1e-3), "what is proven of a plan is what it is"
        assert ours_s <= 5.0 * twin_s + 1e-6, question
        num_best += ours_s <= twin_s * (1.0 + 1e-3) + 1e-6
    assert num_best >= 0.95 * NUM_CASES
