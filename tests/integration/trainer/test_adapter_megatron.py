"""The real Megatron-Core on CPU and gloo, with CUDA's names stood in for: what its ranks tell.

Not in CI, where Megatron-Core is not installed: docs/trainer-megatron.md says how to run them.
"""

from pathlib import Path

import pytest

from support.foreign_ranks import Ranks, needs
from support.foreign_watch import SLOW_FROM, SLOWNESS, incidents_of_a_slow_rank

pytestmark = [needs("megatron", "docs/trainer-megatron.md"), pytest.mark.timeout(600)]
RANK = "support.megatron_rank"
FIRST = 3  # the number of the first step


def test_each_micro_batch_is_told_once_with_the_rows_of_its_experts(tmp_path: Path) -> None:
    ranks = Ranks(RANK, tmp_path, evaluates_after=[1])
    ranks.end()
    told = [ranks.told(rank) for rank in range(2)]
    for rank in range(2):
        shapes = ranks.case["batches"][rank]
        batches = [shape for step in range(5) for shape in shapes[step % 2]]
        micro_batches = told[rank].micro_batches
        assert [(r.step, r.micro_batch) for r in micro_batches] == [
            (FIRST + step, number) for step in range(5) for number in range(2)
        ]
        assert [r.tokens for r in micro_batches] == [n * long for n, long in batches]
        assert [r.sum_len_squared for r in micro_batches] == [n * k * k for n, k in batches]
        assert all(r.wait_s is not None and r.wait_s > 0.0 for r in micro_batches)
        assert [r.step for r in told[rank].steps] == [FIRST + step for step in range(5)]
        assert all(r.input_wait_s is not None for r in told[rank].steps)
        # Two layers, two of four experts for each token.
        assert [(r.step, r.layer, sum(r.counts)) for r in told[rank].loads] == [
            (FIRST + step, layer, 2 * sum(n * k for n, k in shapes[step % 2]))
            for step in range(5)
            for layer in range(2)
        ]
    # Who computes them is another matter: ranks 0 and 1 have two experts each of every layer.
    for i in range(10):
        one, other = (told[rank].micro_batches[i] for rank in range(2))
        assert one.expert_rows + other.expert_rows == 2 * 2 * (one.tokens + other.tokens)
    for step in range(5):
        for rank in range(2):
            rows = sum(r.expert_rows for r in told[rank].micro_batches if r.step == FIRST + step)
            loads = [r.counts for one in told for r in one.loads if r.step == FIRST + step]
            assert rows == sum(sum(counts[2 * rank : 2 * rank + 2]) for counts in loads)


def test_timers_that_were_there_are_called_as_ever(tmp_path: Path) -> None:
    ranks = Ranks(RANK, tmp_path, kind="timers", steps=2)
    ranks.end()
    assert [r.step for r in ranks.told(0).steps] == [FIRST, FIRST + 1]


def test_stages_tell_passes_that_take_turns(tmp_path: Path) -> None:
    batches = [[[2, 64]] * 4]
    ranks = Ranks(RANK, tmp_path, kind="pipeline", batches=[batches] * 2, evaluates_after=[2])
    ranks.end()
    for stage in range(2):
        told = ranks.told(stage)
        assert [(r.step, r.micro_batch) for r in told.micro_batches] == [
            (FIRST + step, number) for step in range(5) for number in range(4)
        ]
        assert {(r.tokens, r.tensor_share) for r in told.micro_batches} == {(128, 0.5)}
        assert {r.layer for r in told.loads} == {stage}
        for step in told.steps:
            spent_s = sum(r.compute_s for r in told.micro_batches if r.step == step.step)
            assert spent_s < step.duration_s


def test_a_slow_rank_is_found_and_long_sequences_and_hot_experts_accuse_nobody(
    tmp_path: Path,
) -> None:
    (found,) = incidents_of_a_slow_rank(RANK, tmp_path, paces=[1.0, SLOWNESS])
    assert (found.kind, found.rank) == ("device", 1)
    assert found.onset_step >= FIRST + SLOW_FROM - 1
    assert found.slowdown == pytest.approx(SLOWNESS, rel=0.3)
