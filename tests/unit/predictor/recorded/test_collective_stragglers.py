"""Who comes late is named, whether its device or its host is slow; who waits is not."""

import numpy as np
import pytest

from pacekeeper.core.incidents.findings import Tier
from pacekeeper.predictor.recorded.anomalies import AnomalyKind
from pacekeeper.predictor.recorded.collective_stragglers import collective_stragglers
from pacekeeper.predictor.recorded.trace import Chunk, ComputeTable, Trace, WaitTable, Worker
from support.examples import seeds


def job(
    num_steps: int, *, late_s: float, is_compute: bool, num_ranks: int = 8, seed: int = 0
) -> Trace:
    """Equal transfers of 5 ms; each rank is ready at its own moment; rank 3 is late."""
    random = np.random.default_rng(seed)
    compute_s = 0.04 * (1.0 + 0.005 * random.standard_normal((num_steps, num_ranks)))
    ready_s = compute_s + 0.0005 * random.random((num_steps, num_ranks))
    ready_s[:, 3] += late_s
    if is_compute:
        compute_s[:, 3] += late_s
    wait_s = ready_s.max(axis=1, keepdims=True) - ready_s + 0.005
    steps = np.repeat(np.arange(num_steps), num_ranks)
    ranks = np.tile(np.arange(num_ranks), num_steps)
    zeros, unknown = np.zeros(len(steps), dtype=np.intp), np.full(len(steps), np.nan)
    return Trace(
        name="job",
        source="test",
        workers=tuple(Worker(rank=rank) for rank in range(num_ranks)),
        compute=ComputeTable(
            step=steps, rank=ranks, micro_batch=zeros, chunk=zeros + int(Chunk.WHOLE),
            model_chunk=zeros, compute_s=compute_s.ravel(), tokens=unknown,
            sum_len_squared=unknown, expert_rows=unknown,
        ),
        waits=WaitTable(step=steps, rank=ranks, wait_s=wait_s.ravel()),
    )  # fmt: skip


@pytest.mark.parametrize("is_compute", [True, False])
@pytest.mark.parametrize("num_steps", [2, 30])
def test_who_comes_late_is_named_with_its_kind(num_steps: int, is_compute: bool) -> None:
    (anomaly,) = collective_stragglers(job(num_steps, late_s=0.02, is_compute=is_compute))
    assert anomaly.rank == 3
    assert anomaly.kind is (AnomalyKind.COMPUTE if is_compute else AnomalyKind.HOST)
    assert anomaly.slowdown == pytest.approx(1.44, rel=0.05)
    assert anomaly.low <= anomaly.slowdown <= anomaly.high
    assert anomaly.tier is (Tier.PROBABLE if num_steps == 30 else Tier.SUSPECTED)
    assert "late" in anomaly.reason


@pytest.mark.parametrize("seed", seeds(20))
def test_nobody_is_named_where_all_come_together(seed: int) -> None:
    assert collective_stragglers(job(20, late_s=0.0, is_compute=False, seed=seed)) == ()


def test_a_little_late_is_not_worth_naming() -> None:
    assert collective_stragglers(job(20, late_s=0.001, is_compute=False)) == ()


def test_two_ranks_can_not_tell_who_is_late() -> None:
    trace = job(20, late_s=0.02, is_compute=False, num_ranks=4)
    assert trace.waits is not None
    pair = np.isin(trace.waits.rank, [2, 3])
    waits = WaitTable(
        step=trace.waits.step[pair], rank=trace.waits.rank[pair], wait_s=trace.waits.wait_s[pair]
    )
    assert (
        collective_stragglers(Trace(name="j", source="t", workers=trace.workers, waits=waits)) == ()
    )
