"""What a job is before its first step: its learning rates, its data."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.trainer.engine.job import learning_rate, open_data
from support.engine_jobs import small_job


def test_the_learning_rate_rises_and_falls() -> None:
    config = EngineConfig(steps=100, warmup_steps=10, learning_rate=1.0, final_ratio=0.2)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[99] == pytest.approx(0.2)
    assert rates[54] == pytest.approx(0.6)  # the middle of the decay
    assert all(a >= b for a, b in pairwise(rates[9:]))
    linear = replace(config, decay="linear")
    assert learning_rate(linear, 32) == pytest.approx(1.0 - 0.8 * 23 / 90)
    assert learning_rate(replace(config, decay="constant"), 99) == 1.0
    assert learning_rate(replace(config, warmup_steps=100), 99) == 1.0


def test_held_out_tokens_are_not_trained_on(tmp_path: Path) -> None:
    config = small_job(tmp_path, evaluation_fraction=0.25)
    sampler, evaluation = open_data(config, 96)
    assert evaluation is not None
    assert sampler.stream.end == evaluation.stream.first
    assert evaluation.stream.num_tokens == round(0.25 * (sampler.stream.num_tokens * 4 / 3))
