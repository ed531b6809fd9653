"""The size benchmark counts what it should: files, the busiest rank, and a baseline by hand."""

from pathlib import Path

import pytest
from benchmarks.checkpoint_size import (
    FIRST_PAPER,
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    Shape,
    baseline_bytes,
    measure,
    window_bytes,
)

TINY = Shape(name="tiny", layers=2, hidden=256, experts=4, vocabulary=16, positions=16)
DENSE = 2 * 4 + 8  # in squares of the hidden size: attention of two layers, one dense MLP
EXPERT = 8


def test_a_partial_checkpoint_is_the_dense_part_and_one_expert(tmp_path: Path) -> None:
    sizes = measure(TINY, TINY.layout(4, 2), tmp_path)
    assert len(sizes.partial_bytes) == TINY.experts
    wanted = (DENSE + EXPERT) / (DENSE + TINY.experts * EXPERT)
    assert sizes.fraction == pytest.approx(wanted, rel=0.02)  # norms, words, headers, manifest
    mean = max(sizes.partial_bytes) / 4
    largest = 4 * EXPERT * TINY.hidden**2
    assert mean * 0.9 < max(sizes.busiest_bytes) <= mean + largest


def test_the_baseline_is_rank_0_with_all_dense_weights_and_its_experts() -> None:
    layout, square = TINY.layout(4, 2), TINY.hidden**2
    small = TINY.values(next(layout.blocks())) + TINY.hidden * (1 + 2 + 2 + TINY.experts)
    dense, own = DENSE * square + small, 2 * EXPERT * square  # two of four experts
    alone = (dense + own) * (WEIGHT_BYTES + OPTIMIZER_BYTES)
    assert baseline_bytes(TINY, layout, is_replicated=True) == alone
    shared = (dense + own) * WEIGHT_BYTES + OPTIMIZER_BYTES * (dense / 4 + own / 2)
    assert baseline_bytes(TINY, layout, is_replicated=False) == shared


def test_a_window_of_one_step_is_all_at_once_and_longer_ones_copy_less_after_each() -> None:
    layout = TINY.layout(4, 2)
    everything = sum(TINY.values(block) for block in layout.blocks())
    (full,) = window_bytes(TINY, layout, 1, are_cut=True)
    share = everything * (WEIGHT_BYTES + OPTIMIZER_BYTES) / 4
    assert share <= full <= share * 1.25
    of = [max(window_bytes(TINY, layout, steps, are_cut=True)) for steps in (2, 8)]
    assert full > of[0] > of[1]


def test_an_embedding_in_strips_burdens_nobody_alone() -> None:
    shape = FIRST_PAPER.scaled(8)
    layout = shape.layout(16, 8)
    cut_up, whole = (window_bytes(shape, layout, 4, are_cut=are) for are in (True, False))
    assert max(cut_up) < 0.7 * max(whole)
