"""Which experts each order saves, over many checkpoints: those that the order promises."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import CheckpointId, Piece
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from pacekeeper.trainer.checkpoint.policies.partial_experts import PartialSaves
from support.trainees import TINY

NUM_EXPERTS = 4
LAYOUT = even_layout(ranks=range(4), num_layers=1, num_experts=NUM_EXPERTS, replicas=1)
PIECES = [Piece(block) for block in LAYOUT.blocks()]
tokens = st.lists(st.integers(0, 999), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)


def saved(partial: PartialSaves, number: int, layout: Layout = LAYOUT) -> set[int]:
    """The experts of checkpoint `number`, on top of one that all know to be complete."""
    partial.receive_votes([partial.own_vote(layout, has_failed=False)])
    choice = partial.choose(layout, number, PIECES)
    own = CheckpointId(run_id=1, generation=1, step=number)
    partial.begun(own, frozenset(layout.ranks), choice.pieces)
    return {p.block.index for p in choice.pieces if p.block.kind is BlockKind.EXPERT}


def begun(order: str, num_saved: int) -> PartialSaves:
    config = replace(TINY, experts_per_checkpoint=num_saved, expert_order=order)
    partial = PartialSaves(config, [NUM_EXPERTS])
    assert saved(partial, 0) == set(range(NUM_EXPERTS)), "the first one holds all"
    return partial


@given(st.lists(tokens, min_size=1, max_size=12), st.integers(1, NUM_EXPERTS - 1))
def test_by_load_those_with_most_tokens_since_their_own_last_save(
    steps: list[list[int]], num_saved: int
) -> None:
    partial, unsaved = begun("load", num_saved), [0] * NUM_EXPERTS
    for number, routed in enumerate(steps, 1):
        partial.count({0: routed})
        unsaved = [one + more for one, more in zip(unsaved, routed, strict=True)]
        found = saved(partial, number)
        assert len(found) == num_saved
        left = set(range(NUM_EXPERTS)) - found
        assert min(unsaved[e] for e in found) >= max(unsaved[e] for e in left)
        unsaved = [0 if e in found else count for e, count in enumerate(unsaved)]


@pytest.mark.parametrize("num_saved", [1, 2, 3])
def test_by_risk_alike_experts_take_turns(num_saved: int) -> None:
    """Age alone tells them apart: none is left out longer than turns need."""
    partial, seen = begun("risk", num_saved), [0] * NUM_EXPERTS
    for number in range(1, 13):
        partial.count({0: [100] * NUM_EXPERTS})
        for expert in saved(partial, number):
            seen[expert] += 1
    assert sum(seen) == 12 * num_saved and max(seen) - min(seen) <= 1


def test_by_risk_a_slow_ranks_expert_is_saved_more_often_than_others_but_not_alone() -> None:
    """As the square root of the ratio of the risks, not as the ratio: the others age, too."""
    layout = replace(LAYOUT, speeds=((3, 0.5),))
    partial, seen = begun("risk", 1), [0] * NUM_EXPERTS
    (sole,) = layout.experts_on(3, 0)
    for number in range(1, 201):
        partial.count({0: [100] * NUM_EXPERTS})
        for expert in saved(partial, number, layout):
            seen[expert] += 1
    others = [count for expert, count in enumerate(seen) if expert != sole]
    assert min(others) > 0
    assert 5.0 < seen[sole] / (sum(others) / len(others)) < 9.0, "sqrt(0.501 / 0.011) is 6.7"
