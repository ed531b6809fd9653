"""torchtitan's real training loop and MoE layer on CPU and gloo, watched: what its ranks tell.

Not in CI, where torchtitan is not installed: docs/trainer-torchtitan.md says how to run it.
"""

from pathlib import Path

import pytest

from support.foreign_ranks import Ranks, needs
from support.foreign_watch import SLOW_FROM, SLOWNESS, incidents_of_a_slow_rank

pytestmark = [needs("torchtitan", "docs/trainer-torchtitan.md"), pytest.mark.timeout(600)]
RANK = "support.torchtitan_rank"
FIRST = 101  # torchtitan counts from 1; this job was resumed after 100


def test_each_pass_is_told_once_with_the_rows_of_its_experts(tmp_path: Path) -> None:
    ranks = Ranks(RANK, tmp_path, evaluates_after=[2])
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
        assert all(r.wait_s is not None and r.wait_s > 0.0 for r in micro_batches)
        steps = told[rank].steps
        assert [r.step for r in steps] == [FIRST + step for step in range(5)]
        assert [r.loss is not None for r in steps] == [False, True, False, True, False]
        assert all(r.input_wait_s is not None for r in steps)
        assert [(r.step, r.layer, sum(r.counts)) for r in told[rank].loads] == [
            (FIRST + step, 1, 2 * sum(n * k for n, k in shapes[step % 2])) for step in range(5)
        ]
    for i in range(10):
        one, other = (told[rank].micro_batches[i] for rank in range(2))
        assert one.expert_rows + other.expert_rows == 2 * (one.tokens + other.tokens)
    for step in range(5):
        for rank in range(2):
            rows = sum(r.expert_rows for r in told[rank].micro_batches if r.step == FIRST + step)
            loads = [r.counts for one in told for r in one.loads if r.step == FIRST + step]
            assert rows == sum(sum(counts[2 * rank : 2 * rank + 2]) for counts in loads)


def test_a_slow_rank_is_found_and_long_sequences_and_hot_experts_accuse_nobody(
    tmp_path: Path,
) -> None:
    (found,) = incidents_of_a_slow_rank(RANK, tmp_path, paces=[1.0, SLOWNESS])
    assert (found.kind, found.rank) == ("device", 1)
    assert found.onset_step >= FIRST + SLOW_FROM - 1
    assert found.slowdown == pytest.approx(SLOWNESS, rel=0.3)
