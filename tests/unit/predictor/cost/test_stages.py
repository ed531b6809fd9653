"""Stages do unlike work: the last has a head. One cost model serves all, wherever layers move."""

from dataclasses import replace

import numpy as np
import pytest

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import FEATURES, StepSample, sample_of
from pacekeeper.predictor.detector.state import Evidence, begin
from pacekeeper.predictor.detector.update import update_evidence
from support.examples import seeds

RANKS = 8  # two stages of two pipelines, groups of two; those from 4 on have the head
FIXED_S, TOKEN_S, HEAD_S, NOISE = 0.05, 2e-4, 1e-4, 0.003
EVEN, UNEVEN = (8, 8), (3, 13)  # rows of the pipelines
WARM, STEPS = 30, 60
ROW_TOKENS = 128


def sample(step: int, rows: tuple[int, int], draw: np.random.Generator) -> StepSample:
    records = []
    for rank in range(RANKS):
        tokens = int(rows[rank // 2 % 2] * ROW_TOKENS * draw.uniform(0.96, 1.0))
        head = tokens // 2 if rank >= 4 else 0
        took_s = FIXED_S + TOKEN_S * tokens * 0.25 + HEAD_S * head
        records.append(
            MicroBatchRecord(
                rank=rank,
                step=step,
                micro_batch=0,
                generation=1 if rows == EVEN else 2,
                compute_s=took_s * draw.lognormal(0.0, NOISE),
                tokens=tokens,
                tensor_share=0.25,
                head_tokens=head,
            )
        )
    return sample_of(records)


def untold(told: StepSample) -> StepSample:
    """The same by a trainer that says nothing of heads."""
    features = told.features.copy()
    features[:, FEATURES.index("head_tokens")] = 0.0
    return replace(told, features=features)


def accused(*, tells_head: bool, seed: int) -> tuple[Evidence, set[int]]:
    draw, evidence, found = np.random.default_rng(seed), begin(), set[int]()
    for step in range(WARM + STEPS):
        told = sample(step, EVEN if step < WARM else UNEVEN, draw)
        evidence, judgement = update_evidence(
            DetectorConfig(warmup_steps=12), evidence, told if tells_head else untold(told)
        )
        found |= {finding.rank for finding in judgement.findings if finding.rank is not None}
    return evidence, found


@pytest.mark.parametrize("seed", seeds(5))
def test_nobody_is_accused_when_rows_move_between_pipelines(seed: int) -> None:
    evidence, found = accused(tells_head=True, seed=seed)
    assert not found
    assert evidence.model is not None
    assert all(abs(np.log(own)) < 0.02 for own in evidence.model.multipliers.values())


def test_a_head_that_nobody_tells_of_looks_like_slow_ranks() -> None:
    assert any(accused(tells_head=False, seed=seed)[1] for seed in range(5))
