"""Two levels of partial saves: what fits behind a step, which experts, and what is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.partial_experts import longest_save_gap, mean_age
from pacekeeper.core.checkpoint.two_level import (
    SaveTimes,
    busiest_rank_bytes,
    choose_num_snapshot,
    expected_lost_token_ratio,
    select_two_levels,
)
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from support.examples import examples

NUM_EXPERTS = 8


def layout_of(ranks: int, replicas: int = 1) -> Layout:
    return even_layout(ranks=range(ranks), num_layers=2, num_experts=NUM_EXPERTS, replicas=replicas)


def sizes_of(layout: Layout) -> dict[Piece, int]:
    """As MoC-System's GPT-350M-16E: experts are most of it, moments three fourths."""
    return {
        Piece(block, kind): (3 if kind else 1) * (96 if block.kind is BlockKind.EXPERT else 32)
        for block in layout.blocks()
        for kind in ("", "moments")
    }


@given(ranks=st.sampled_from([1, 2, 4]), budget=st.floats(0.0, 10_000.0), least=st.integers(1, 8))
def test_the_most_experts_that_fit_behind_a_step_are_copied(
    ranks: int, budget: float, least: int
) -> None:
    layout = layout_of(ranks)
    sizes = sizes_of(layout)
    rows = dict.fromkeys(sizes, 1)

    def copied(num_saved: int) -> int:
        return busiest_rank_bytes(layout, sizes, rows, num_saved)

    found = choose_num_snapshot(layout, sizes, rows, budget_bytes=budget, num_persisted=least)
    if budget <= 0.0:
        assert found == NUM_EXPERTS
        return
    assert least <= found <= NUM_EXPERTS
    assert found == least or copied(found) <= budget
    assert found == NUM_EXPERTS or copied(found + 1) > budget


def test_a_rank_copies_its_part_of_dense_state_and_of_the_experts() -> None:
    layout = layout_of(1)
    sizes = sizes_of(layout)
    dense = sum(s for p, s in sizes.items() if p.block.kind is not BlockKind.EXPERT)
    for num_saved in (1, 3, 8):
        bytes_of_all = dense + 2 * num_saved * 4 * 96
        assert busiest_rank_bytes(layout, sizes, dict.fromkeys(sizes, 1), num_saved) == bytes_of_all


@settings(max_examples=examples(40))
@given(st.data())
def test_what_is_written_was_copied_and_all_take_turns_on_both_levels(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 12))
    num_snapshot = data.draw(st.integers(1, num_experts))
    num_persisted = data.draw(st.integers(1, num_snapshot))
    equal = [[0.0] * num_experts, [], [0.0] * num_experts]
    age = [[0.0] * len(layer) for layer in equal]
    unseen = [[0] * len(layer) for layer in equal]
    # A round of snapshots shows all experts; of each snapshot the oldest are written.
    most = longest_save_gap(num_experts, num_snapshot) * (
        longest_save_gap(num_snapshot, num_persisted) + 1
    )
    for number in range(4 * num_experts):
        copied, written = select_two_levels(
            equal, age, num_snapshot=num_snapshot, num_persisted=num_persisted, number=number
        )
        assert written <= copied
        for layer, ages in enumerate(age):
            of_layer = [block for block in copied if block.layer == layer]
            assert len(of_layer) == min(num_snapshot, len(ages))
            for expert in range(len(ages)):
                ages[expert] += 1.0
                unseen[layer][expert] += 1
            for block in of_layer:
                unseen[layer][block.index] = 0
            for block in written:
                if block.layer == layer:
                    ages[block.index] = 0.0
            assert max(unseen[layer], default=0) < longest_save_gap(num_experts, num_snapshot)
            assert max(ages, default=0.0) <= most


def test_the_most_urgent_of_the_copied_are_written() -> None:
    copied, written = select_two_levels(
        [[1.0, 5.0, 2.0, 4.0]], [[9.0, 1.0, 2.0, 3.0]], num_snapshot=3, num_persisted=1, number=0
    )
    assert {block.index for block in copied} == {1, 2, 3}
    assert {block.index for block in written} == {3}
    with pytest.raises(ValueError):
        select_two_levels([[1.0]], [[1.0]], num_snapshot=1, num_persisted=2, number=0)


def test_more_experts_in_memory_lose_fewer_tokens() -> None:
    def lost(num_snapshot: int, from_storage: float) -> float:
        return expected_lost_token_ratio(
            num_faults=2,
            period_steps=32,
            total_steps=1280,
            num_experts=8,
            num_snapshot=num_snapshot,
            num_persisted=1,
            from_storage=from_storage,
        )

    assert lost(1, 0.0) == lost(8, 1.0) == pytest.approx(2 * 32 / 1280 * mean_age(8, 1))
    by_number = [lost(number, 0.25) for number in (1, 2, 4, 8)]
    assert by_number == sorted(by_number, reverse=True)
    assert by_number[-1] == pytest.approx(0.25 * by_number[0]), "what memory has is not lost"
    with pytest.raises(ValueError):
        lost(1, 1.5)


def test_a_copy_that_hides_behind_a_step_costs_restores_only() -> None:
    full = SaveTimes(snapshot_s=3.0, persist_s=40.0, overlap_s=1.0, step_s=2.0)
    partial = SaveTimes(snapshot_s=0.8, persist_s=10.0, overlap_s=1.0, step_s=2.0)
    assert (full.held_s, partial.held_s) == (2.0, 0.0)
    assert (full.least_period_steps, partial.least_period_steps) == (20, 5)
    assert partial.overhead(5, 0.01) == pytest.approx(0.01 * 5 / 2)
    assert full.overhead(20, 0.01) == pytest.approx(1.0 / 20 + 0.01 * 20 / 2)
    with pytest.raises(ValueError):
        full.overhead(19, 0.01)
