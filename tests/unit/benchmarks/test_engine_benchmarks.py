"""Parts of the benchmarks of the engine: even replicas, the bound of a median, all rows once."""

from collections import defaultdict
from math import comb

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import engine_cost, engine_equality
from benchmarks.gpu.common import upper_place

from pacekeeper.trainer.parallel.layouts import start_layout


@pytest.mark.parametrize("count", [6, 10, 30, 31])
def test_the_upper_bound_exceeds_the_median_in_975_of_1000_runs(count: int) -> None:
    place = upper_place(count)
    # The median lies above the order statistic if at most `place` of the values are below it.
    above = sum(comb(count, below) for below in range(place + 1, count + 1)) / 2**count
    assert above <= 0.025
    assert sum(comb(count, below) for below in range(place, count + 1)) / 2**count > 0.025


@pytest.mark.parametrize("shape", engine_cost.SHAPES)
def test_replicas_leave_every_rank_as_many_rows(shape: str) -> None:
    _, experts, _, layers = engine_cost.SHAPES[shape]
    ranks = range(engine_cost.RANKS)
    for every in (0, engine_cost.REPLICATED):
        layout = engine_cost.replicated(start_layout([experts] * layers, ranks), every)
        shares: dict[int, float] = defaultdict(float)
        for replicas in layout.experts[0]:
            for replica in replicas:
                shares[replica.rank] += replica.share
        assert len(set(shares.values())) == 1
        copies = sum(len(replicas) - 1 for replicas in layout.experts[0])
        assert copies == (max(experts // every, len(ranks)) if every else 0)


def test_pairs_are_judged_by_their_ratios() -> None:
    spent = {"a": [1.1, 2.2, 3.3, 4.4], "b": [1.0, 2.0, 3.0, 4.0]}
    assert engine_cost.ratio(spent, "a", "b")["median"] == pytest.approx(1.1)


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_have_all_rows_of_a_step_once_and_sometimes_none(size: int) -> None:
    idle = 0
    for step in range(12):
        own = [engine_equality.own_rows(step, rank, size) for rank in range(size)]
        idle += sum(not batches for batches in own)
        rows = torch.cat([batch["input_ids"] for batches in own for batch in batches])
        assert torch.equal(rows, engine_equality.rows_of(step)[:, :-1])
    assert bool(idle) == (size > 1)
