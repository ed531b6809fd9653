"""Unevenly loaded experts are told from slow devices by what groups of different devices share."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.imbalance.analyze import imbalances
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, ExpertLoadTable, Trace, Worker

EXPERT = AnomalyKind.EXPERT_IMBALANCE


def expert_trace(layer_effect: Callable[[int, int, int, int], float], noise: float = 0.01) -> Trace:
    """2 stages x 8 ranks in groups of 4, 3 expert layers a stage, 40 steps: half of the compute."""
    random = np.random.default_rng(5)
    cells = [(s, r, layer) for s in range(40) for r in range(16) for layer in range(3)]
    step, rank, layer = np.array(cells, dtype=np.intp).T
    effect = np.array([layer_effect(s, r // 8, r % 8 // 4, at) for s, r, at in cells])
    whole = {"micro_batch": step * 0, "chunk": step * 0 + Chunk.FORWARD}
    unknown = np.full(len(step), np.nan)
    experts = ComputeTable(
        step=step, rank=rank, model_chunk=layer, **whole,
        compute_s=0.1 * effect * random.normal(1.0, noise, len(step)),
        tokens=unknown, sum_len_squared=unknown, expert_rows=unknown,
    )  # fmt: skip
    first = layer == 0
    compute = ComputeTable(
        **{name: getattr(experts, name)[first] for name in ComputeTable.__slots__}
        | {"compute_s": 0.3 * random.normal(1.0, 0.01, int(first.sum()))}
    )
    return Trace(
        name="experts",
        source="synthetic",
        workers=tuple(Worker(rank=r, stage=r // 8, dp=r % 8) for r in range(16)),
        compute=compute,
        expert_compute=experts,
        groups=tuple(tuple(range(first, first + 4)) for first in range(0, 16, 4)),
    )


def routing(step: int, stage: int, group: int, layer: int) -> float:
    return 1.0 + float(np.random.default_rng([step, stage, layer]).gamma(1.0, 0.3))


def test_what_groups_of_different_devices_share_by_layer_is_routing() -> None:
    (anomaly,) = imbalances(expert_trace(routing), None)
    assert (anomaly.kind, anomaly.tier, anomaly.rank) == (EXPERT, Tier.PROBABLE, None)
    # 0.3 s of experts with a mean excess of 30 % over even ones, beside 0.3 s of other compute.
    assert 1.10 < anomaly.slowdown < 1.20


def test_a_slow_group_or_a_slow_network_is_not_routing() -> None:
    def own(step: int, stage: int, group: int, layer: int) -> float:
        return 1.0 + float(np.random.default_rng([step, stage, layer, group]).gamma(1.0, 0.3))

    def network(step: int, stage: int, group: int, layer: int) -> float:
        return 1.0 + float(np.random.default_rng(step).gamma(1.0, 0.3))

    def slow(step: int, stage: int, group: int, layer: int) -> float:
        return 1.5 if (stage, group) == (1, 0) and step > 10 else 1.0

    for effect in (own, network, slow):
        assert imbalances(expert_trace(effect), None) == ()


def test_groups_that_drift_each_by_itself_do_not_agree() -> None:
    """Random walks look alike by chance; their changes do not."""
    for seed in range(40):
        walks = np.random.default_rng(seed).normal(0.0, 0.1, (40, 2, 2, 3)).cumsum(axis=0)

        def drift(step: int, stage: int, group: int, layer: int, walks: Array = walks) -> float:
            return float(np.exp(walks[step, stage, group, layer]))

        assert imbalances(expert_trace(drift), None) == ()


def test_the_part_of_routing_is_priced_and_noise_is_not() -> None:
    def little(step: int, stage: int, group: int, layer: int) -> float:
        return 1.0 + float(np.random.default_rng([step, stage, layer]).gamma(1.0, 0.1))

    (anomaly,) = imbalances(expert_trace(little, noise=0.25), None)
    assert anomaly.kind is EXPERT
    assert anomaly.slowdown < 1.09  # 1.05 for the routing; noise and all, 1.12


def test_noise_alone_is_not_priced_as_routing() -> None:
    assert imbalances(expert_trace(lambda *place: 1.0, noise=0.1), None) == ()


def test_loads_without_times_say_how_far_the_busiest_expert_is_ahead() -> None:
    step, layer, expert = (index.ravel() for index in np.indices((5, 2, 4)))
    rows = np.where(expert == 1, 70.0, 10.0)
    trace = Trace(
        name="loads",
        source="synthetic",
        workers=(Worker(rank=0),),
        expert_loads=ExpertLoadTable(step=step, layer=layer, expert=expert, rows=rows),
    )
    (anomaly,) = imbalances(trace, None)
    assert (anomaly.kind, anomaly.tier) == (EXPERT, Tier.SUSPECTED)
    assert anomaly.slowdown == pytest.approx(2.8)
    assert trace.expert_loads is not None
    even_loads = replace(trace.expert_loads, rows=rows * 0.0 + 25.0)
    assert imbalances(replace(trace, expert_loads=even_loads), None) == ()
