"""Rows dealt over pipelines by stage: each is computed once at every stage, and messages match."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from benchmarks.random_meshes import random_mesh, random_stage_shares

from pacekeeper.core.layout.apportion import num_micro_batches
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.parallel.mesh.row_deal import (
    dealt_rows,
    micro_batches_of,
    rows_of_rank,
)
from pacekeeper.trainer.parallel.mesh.token_slices import token_slices


def dealt_layout(chosen: Random) -> Layout:
    while True:
        layout = random_mesh(range(9), [2, 2, 2], 6, 1, chosen)
        if len(layout.pipelines) > 1 and len(layout.mesh[0]) > 1:
            shared = random_stage_shares(layout.pipelines, chosen)
            return replace(layout, pipelines=tuple(shared))


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_computed_once_at_each_stage_and_what_is_sent_is_received(seed: int) -> None:
    chosen = Random(seed)
    layout = dealt_layout(chosen)
    num_rows, row_tokens = chosen.randint(1, 40), chosen.randint(1, 5)
    count = num_micro_batches(layout.most_rows(num_rows), chosen.randint(1, 6))
    rows = {rank: dealt_rows(layout, rank, num_rows, count) for rank in layout.working}
    for stage in range(len(layout.stage_shares)):
        groups = [pipeline.stages[stage].group for pipeline in layout.pipelines]
        owns = [rows_of_rank(layout, group[0], num_rows) for group in groups]
        batches = [micro_batches_of(own, count) for own in owns]
        places = Counter(p for one in batches for batch in one.values() for p in batch)
        assert places == Counter(range(num_rows))
        for group in groups:
            for rank in group:
                own = rows_of_rank(layout, rank, num_rows)
                assert own == rows_of_rank(layout, group[0], num_rows)
                held = {k: len(rows[rank][k].own) for k in range(count) if rows[rank][k].own}
                assert held == {k: len(one) for k, one in micro_batches_of(own, count).items()}
    for micro in range(count):
        sent, received = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
        for rank, (stage, at) in layout.places.items():
            of = rows[rank][micro]
            own = token_slices(layout.mesh[at][stage], len(of.own) * row_tokens)[rank]
            first = of.own.start * row_tokens + own.start
            after = of.crossing(own, of.after, row_tokens)
            before = of.crossing(own, of.before, row_tokens)
            assert stage == len(layout.stage_shares) - 1 or sum(map(len, after.values())) == len(
                own
            )
            assert stage == 0 or sum(map(len, before.values())) == len(own)
            sent.update((rank, to, first + t) for to, cut in after.items() for t in cut)
            received.update((by, rank, first + t) for by, cut in before.items() for t in cut)
        assert sent == received


def test_micro_batches_have_equal_rows_and_pipelines_as_many(seed: int = 3) -> None:
    layout = dealt_layout(Random(seed))
    count = num_micro_batches(layout.most_rows(37), 4)
    for rank in layout.working:
        sizes = [len(one.own) for one in dealt_rows(layout, rank, 37, count)]
        assert len(sizes) == count and max(sizes) - min(sizes) <= 1
    busiest = max(len(rows_of_rank(layout, rank, 37)) for rank in layout.working)
    assert busiest == layout.most_rows(37) and 4 * (count - 1) < busiest <= 4 * count
