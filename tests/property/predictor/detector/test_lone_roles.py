"""Pipelines whose stages have one rank each: the slow ones are named, what all share is not."""

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.cost.features import FEATURES, StepSample
from pacekeeper.predictor.detector.roles import update_roles
from pacekeeper.predictor.detector.state import Evidence
from support.examples import examples

CONFIG = DetectorConfig(canary_period_steps=0)
HEALTHY, SLOW = 24, 6  # steps


def sample(step: int, rank: int, tokens: float, seconds: float) -> StepSample:
    features = np.zeros((1, len(FEATURES)))
    features[0, FEATURES.index("one")], features[0, FEATURES.index("tokens")] = 1.0, tokens
    return StepSample(
        step=step, generation=1, ranks=(rank,), features=features, observed_s=np.array([seconds])
    )


def named(
    num_stages: int, slow: set[int], factor: float, common: float, noise: float, seed: int
) -> set[int]:
    """The ranks with a finding; rank i is alone in stage i, and its work differs from step to step.

    common: of all ranks, from the same step on.
    """
    rng = np.random.default_rng(seed)
    evidence, found = dict[str, Evidence](), set[int]()
    for step in range(HEALTHY + SLOW):
        tokens = 1000.0 + 200.0 * rng.random()  # the same micro-batches run through all stages
        samples = {}
        for rank in range(num_stages):
            seconds = 1e-4 * tokens * (1.0 + 0.1 * rank) * np.exp(noise * rng.standard_normal())
            if step >= HEALTHY:
                seconds *= common * (factor if rank in slow else 1.0)
            samples[f"stage {rank}"] = sample(step, rank, tokens, seconds)
        evidence, judged = update_roles(CONFIG, evidence, samples)
        named = (finding.rank for own in judged.values() for finding in own.findings)
        found |= {rank for rank in named if rank is not None}
    return found


@settings(max_examples=examples(25))
@given(
    data=st.data(),
    num_stages=st.integers(2, 12),
    factor=st.sampled_from([1.15, 1.5, 3.0]),
    common=st.sampled_from([1.0, 1.02, 1.3]),
    noise=st.sampled_from([0.001, 0.005]),
    seed=st.integers(0, 1000),
)
def test_the_slow_stages_are_named_as_long_as_one_is_healthy(
    data: st.DataObject, num_stages: int, factor: float, common: float, noise: float, seed: int
) -> None:
    slow = data.draw(st.sets(st.integers(0, num_stages - 1), max_size=num_stages))
    event(f"most of the stages: {2 * len(slow) > num_stages}, all: {len(slow) == num_stages}")
    event(f"all slower together: {common > 1.0}")
    found = named(num_stages, slow, factor, common, noise, seed)
    assert found == (slow if len(slow) < num_stages else set())
