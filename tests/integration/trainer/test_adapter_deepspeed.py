"""The real DeepSpeed on CPU and gloo, watched: what its ranks tell, and who is found slow.

Not in CI, where DeepSpeed is not installed: docs/trainer-deepspeed.md says how to run them.
"""

from pathlib import Path

import pytest

from support.foreign_ranks import Ranks, needs
from support.foreign_watch import SLOW_FROM, incidents_of_a_slow_rank

pytestmark = [needs("deepspeed", "docs/trainer-deepspeed.md"), pytest.mark.timeout(600)]
RANK = "support.deepspeed_rank"


@pytest.mark.parametrize("zero", [0, 2])
def test_each_micro_batch_is_told_once_and_evaluations_are_not(tmp_path: Path, zero: int) -> None:
    ranks = Ranks(RANK, tmp_path, zero=zero, evaluates_after=[1, 3])
    ranks.end()
    for rank in range(2):
        told, shapes = ranks.told(rank), ranks.case["batches"][rank]
        assert [(r.step, r.micro_batch) for r in told.micro_batches] == [
            (step, number) for step in range(5) for number in range(2)
        ]
        batches = [shape for step in range(5) for shape in shapes[step % 2]]
        assert [r.tokens for r in told.micro_batches] == [n * long for n, long in batches]
        assert [r.sum_len_squared for r in told.micro_batches] == [n * k * k for n, k in batches]
        assert all(r.wait_s is not None and r.wait_s > 0.0 for r in told.micro_batches)
        assert [r.step for r in told.steps] == list(range(5))
        assert [(r.step, r.layer, sum(r.counts)) for r in told.loads] == [
            (step, 0, sum(n * k for n, k in shapes[step % 2])) for step in range(5)
        ]
    # Capacity is padded to the fullest expert of any rank: all experts compute alike.
    rows = [[r.expert_rows for r in ranks.told(rank).micro_batches] for rank in range(2)]
    assert rows[0] == rows[1]
    assert all(r.num_active_experts == 2 for r in ranks.told(0).micro_batches)


def test_stages_of_a_pipeline_tell_each_micro_batch_of_theirs(tmp_path: Path) -> None:
    batches = [[[1, 96]] * 4]  # all alike: its buffers are made once
    ranks = Ranks(
        RANK,
        tmp_path,
        kind="pipeline",
        accumulates=4,
        batches=[batches],
        evaluates_after=[2],
    )
    ranks.end()
    for stage in range(2):
        told = ranks.told(stage)
        assert [(r.step, r.micro_batch) for r in told.micro_batches] == [
            (step, number) for step in range(5) for number in range(4)
        ]
        assert {r.tokens for r in told.micro_batches} == {96}
        assert {r.tensor_share for r in told.micro_batches} == {0.5}
        assert [r.step for r in told.steps] == list(range(5))
        assert all(r.loss is not None for r in told.steps)
        assert all(r.input_wait_s is not None for r in told.steps)
        for step in told.steps:
            spent_s = sum(r.compute_s for r in told.micro_batches if r.step == step.step)
            assert spent_s < step.duration_s


def test_a_slow_rank_is_found_and_long_sequences_and_hot_experts_accuse_nobody(
    tmp_path: Path,
) -> None:
    (found,) = incidents_of_a_slow_rank(RANK, tmp_path, burns=[20, 240])
    assert (found.kind, found.rank) == ("device", 1)
    assert found.onset_step >= SLOW_FROM - 1
