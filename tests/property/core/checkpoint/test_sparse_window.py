"""Windows of sparse checkpoints: they fit the budget, and a replay ends where the run was."""

import zlib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pacekeeper.core.checkpoint.sparse_window import (
    BlockCost,
    Window,
    best_interval_s,
    plan_window,
)
from pacekeeper.core.layout.layout import Block, BlockKind


@st.composite
def costs_of(draw: st.DrawFn) -> dict[Block, BlockCost]:
    found = {}
    for index in range(draw(st.integers(1, 8))):
        weights = draw(st.integers(0, 20))
        found[Block(BlockKind.EXPERT, 0, index)] = BlockCost(
            weight_bytes=weights,
            state_bytes=weights + draw(st.integers(0, 40)),
            tokens=draw(st.integers(0, 5)),
        )
    return found


class Run:
    """A run whose every block's next state follows from its own and from all weights, as training
    does; (weights, moments) by block.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self.state = {block: (block.index, 7 * block.index) for block in blocks}

    def do(self, step: int, active: set[Block]) -> None:
        weights = repr(sorted((block.index, w) for block, (w, _) in self.state.items()))
        for block in active:
            w, m = self.state[block]
            m = zlib.crc32(f"{weights} {block.index} {m} {step}".encode())
            self.state[block] = (zlib.crc32(f"{w} {m}".encode()), m)


@given(costs_of(), st.integers(0, 400))
def test_a_window_saves_every_state_once_and_never_more_than_the_budget(
    costs: dict[Block, BlockCost], budget: int
) -> None:
    try:
        window = plan_window(costs, budget)
    except ValueError:
        # A state does not fit, though it may be that all weights do.
        order = sorted(costs, key=lambda block: (costs[block].tokens, block))
        left = [sum(costs[b].weight_bytes for b in order[i:]) for i in range(len(order))]
        more = [costs[b].state_bytes - costs[b].weight_bytes for b in order]
        assert any(w + m > budget for w, m in zip(left, more, strict=True))
        return
    saved = [block for turn in window.turns for block in turn]
    assert sorted(saved) == sorted(costs) and all(window.turns)
    assert [costs[b].tokens for b in saved] == sorted(cost.tokens for cost in costs.values())
    sizes = window.saved_bytes(costs)
    assert max(sizes) <= budget
    # What is not the last turn could not have taken one more.
    for turn, after, size in zip(window.turns, window.turns[1:], sizes, strict=False):
        first = costs[after[0]]
        assert size + first.state_bytes - first.weight_bytes > budget, turn


@given(st.integers(1, 6), st.data())
def test_a_replay_ends_exactly_where_the_run_was(num_blocks: int, data: st.DataObject) -> None:
    """Whatever the turns: bit by bit, though no step's state was ever saved as a whole."""
    blocks = [Block(BlockKind.EXPERT, 0, index) for index in range(num_blocks)]
    order = data.draw(st.permutations(blocks))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_blocks))) | {num_blocks})
    turns = [tuple(order[a:b]) for a, b in zip([0, *cuts[:-1]], cuts, strict=True)]
    window, first = Window(turns=tuple(turns)), data.draw(st.integers(0, 5))
    run = Run(blocks)
    for step in range(first):
        run.do(step, set(blocks))
    states, weights = [], []
    for i, turn in enumerate(turns):
        run.do(first + i, set(blocks))
        states.append({block: run.state[block] for block in turn})
        weights.append({b: run.state[b][0] for later in turns[i + 1 :] for b in later})
    again = Run(blocks)
    again.state = {}
    for i, at in enumerate(window.replay(first)):
        assert at.step == first + i
        again.state |= {block: states[i][block] for block in at.loads}
        again.state |= {block: (weights[i][block], 0) for block in at.frozen}
        assert set(at.active) == set(again.state) - set(at.frozen)
        if at.frozen:
            again.do(at.step + 1, set(at.active))
    assert again.state == run.state


def test_the_busiest_blocks_come_last() -> None:
    costs = {
        Block(BlockKind.EXPERT, 0, e): BlockCost(state_bytes=12, weight_bytes=4, tokens=9 - e)
        for e in range(3)
    }
    turns = plan_window(costs, 20).turns
    assert [[block.index for block in turn] for turn in turns] == [[2], [1], [0]]


@given(costs_of())
def test_a_budget_for_everything_makes_a_full_checkpoint(costs: dict[Block, BlockCost]) -> None:
    window = plan_window(costs, sum(cost.state_bytes for cost in costs.values()))
    assert len(window.turns) == 1 and window.replay(3)[0].frozen == ()


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of weights"):
        BlockCost(state_bytes=1, weight_bytes=2)
    block = Block(BlockKind.HEAD)
    with pytest.raises(ValueError, match="do not hold head"):
        plan_window({block: BlockCost(state_bytes=9, weight_bytes=3)}, 8)
    with pytest.raises(ValueError, match="above 0"):
        best_interval_s(0.0, 1.0)


@given(st.floats(0.1, 100.0), st.floats(100.0, 1e5))
def test_no_other_interval_costs_less(save_s: float, mtbf_s: float) -> None:
    def cost(interval_s: float) -> float:
        return save_s / interval_s + interval_s / 2 / mtbf_s

    best = best_interval_s(save_s, mtbf_s)
    assume(best > 0)
    assert all(cost(best) <= cost(best * other) for other in (0.5, 0.9, 1.1, 2.0))
