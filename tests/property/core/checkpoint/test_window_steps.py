"""How long windows are, on any layout: each state once, as short as fits, as long as told."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.manifest import Piece
from pacekeeper.core.checkpoint.window_steps import (
    MAX_WINDOW_STEPS,
    block_costs,
    fewest_steps,
    pieces_to_write,
    window_of_steps,
    window_within_bytes,
)
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import BlockKind, Layout
from support.examples import examples
from support.layouts import layouts

KINDS = ("", "exp_avg", "exp_avg_sq")
STAGES = even_layout(ranks=range(4), num_layers=4, num_experts=3, replicas=2, num_stages=2)


@st.composite
def sizes_of(draw: st.DrawFn, layout: Layout) -> dict[Piece, int]:
    """Moments are as large as weights."""
    sizes = {block: draw(st.integers(1, 50)) for block in layout.blocks()}
    return {Piece(block, kind): size for block, size in sizes.items() for kind in KINDS}


@settings(deadline=None, max_examples=examples(50))
@given(st.data(), st.integers(1, 9))
def test_a_window_of_so_many_steps_has_each_state_once_and_no_step_too_many(
    data: st.DataObject, num_steps: int
) -> None:
    layout = data.draw(layouts())
    sizes = data.draw(sizes_of(layout))
    window = window_of_steps(layout, block_costs(sizes), num_steps)
    saved = [block for turn in window.turns for block in turn]
    assert sorted(saved) == sorted(layout.blocks()) and len(window.turns) <= num_steps
    everything = sum(sizes.values())
    busiest = []
    for at in window.replay(0):
        now = pieces_to_write(at, sizes)
        states = {piece.block for piece in now if piece.kind}
        assert states == set(at.loads)
        waiting = set(at.frozen)
        assert {piece.block for piece in now} == states | waiting
        busiest.append(sum(now.values()))
    assert len(window.turns) > 1 or busiest == [everything]
    assert max(busiest) <= everything


@settings(deadline=None, max_examples=examples(50))
@given(st.data())
def test_more_steps_never_copy_more_after_the_busiest(data: st.DataObject) -> None:
    sizes = data.draw(sizes_of(STAGES))
    costs = block_costs(sizes)

    def busiest(num_steps: int) -> float:
        """The least bytes per rank with which so many steps suffice."""
        window = window_of_steps(STAGES, costs, num_steps)
        found = []
        for span in STAGES.spans:
            on = set(STAGES.ranks_of_layer(span.start))
            for at in window.replay(0):
                now = pieces_to_write(at, sizes)
                own = sum(n for p, n in now.items() if on & set(STAGES.holders(p.block)))
                found.append(own / len(on))
        return max(found)

    of = [busiest(n) for n in range(1, 7)]
    assert of == sorted(of, reverse=True)
    budget = data.draw(st.floats(of[-1], of[0]))
    least = next(n for n, size in enumerate(of, 1) if size <= budget)
    window = window_within_bytes(STAGES, costs, budget)
    assert len(window.turns) <= least


def test_stages_save_at_once_experts_first() -> None:
    sizes = {Piece(block, kind): 10 for block in STAGES.blocks() for kind in KINDS}
    window = window_of_steps(STAGES, block_costs(sizes), 3)
    layers = [{b.layer for b in turn if b.kind is BlockKind.EXPERT} for turn in window.turns]
    assert layers[0] & {0, 1} and layers[0] & {2, 3}, "both stages have work at each step"
    last = {block.kind for block in window.turns[-1]}
    assert {BlockKind.HEAD, BlockKind.EMBEDDING, BlockKind.ATTENTION} <= last


@pytest.mark.parametrize(
    ("rank_bytes", "expected"),
    [
        (0.0, 1),
        (1e9, 1),
        (1.0, MAX_WINDOW_STEPS),
    ],  # nothing measured yet; all fits; not even weights do
)
def test_as_few_steps_as_fit_are_taken(rank_bytes: float, expected: int) -> None:
    layout = even_layout(ranks=[0, 1], num_layers=4, num_experts=8, replicas=1)
    sizes = {Piece(block, kind): 10 for block in layout.blocks() for kind in KINDS}
    assert fewest_steps(layout, block_costs(sizes), rank_bytes) == expected


def test_what_just_fits_into_a_budget_takes_no_step_more() -> None:
    sizes = {Piece(block, kind): 10 for block in STAGES.blocks() for kind in KINDS}
    costs = block_costs(sizes)
    for num_steps in range(1, 6):
        window = window_of_steps(STAGES, costs, num_steps)
        now = [sum(pieces_to_write(at, sizes).values()) for at in window.replay(0)]
        assert fewest_steps(STAGES, costs, max(now)) <= num_steps
