"""Exact checkpoints that are spread over a window of steps, and the replay that restores them.

Sparse checkpoints of MoEvement (arXiv 2412.15411): after each step of a window the whole state of
some blocks is saved, and of the blocks of later steps only the weights, which is all that other
blocks need. A restore starts at the window's first step and does its steps again: a block with
state is *active* and is updated; a block with weights only is *frozen*: it computes, and gets its
weights anew before each step. After the last step all blocks are active.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from pacekeeper.core.layout.layout import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The cost of saving one block: all bytes that a step changes, and the weights among them.

    `tokens`: that it computes in a step; while frozen it skips the gradients of its weights for
    them.
    """

    state_bytes: int
    weight_bytes: int
    tokens: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight_bytes <= self.state_bytes:
            raise ValueError(f"{self.weight_bytes} bytes of weights in {self.state_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayStep:
    """One step of a window that is done again.

    In this order: load the whole state of `loads` as after `step`, load the weights of `frozen` as
    then, and do the next step, updating `active` only. In the last step all blocks are active.
    """

    step: int
    loads: tuple[Block, ...]
    active: tuple[Block, ...]
    frozen: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`turns[i]`: the blocks whose whole state is saved after the window's step i."""

    turns: tuple[tuple[Block, ...], ...]

    def saved_bytes(self, costs: Mapping[Block, BlockCost]) -> tuple[int, ...]:
        """The bytes saved after each step: states of its turn, weights of all later ones."""
        found, waiting = [], {block for turn in self.turns for block in turn}
        for turn in self.turns:
            waiting -= set(turn)
            weights = sum(costs[block].weight_bytes for block in waiting)
            found.append(sum(costs[block].state_bytes for block in turn) + weights)
        return tuple(found)

    def replay(self, first_step: int) -> tuple[ReplayStep, ...]:
        """The steps of a window that started with `first_step`, done again."""
        return tuple(
            ReplayStep(
                step=first_step + i,
                loads=turn,
                active=tuple(block for done in self.turns[: i + 1] for block in done),
                frozen=tuple(block for later in self.turns[i + 1 :] for block in later),
            )
            for i, turn in enumerate(self.turns)
        )


def plan_window(costs: Mapping[Block, BlockCost], budget_bytes: float) -> Window:
    """The shortest window, in ascending order of tokens, that saves at most `budget_bytes` per
    step.

    Blocks with most tokens are frozen longest, so that a replay computes least. In a fixed order it
    is optimal that each turn takes as many blocks as fit: fewer are left for all later ones.

    Args:
        costs: the cost of each block.
        budget_bytes: what can be copied while a step computes.

    Raises:
        ValueError: not even one block's state fits in addition to the weights of all.
    """
    order = sorted(costs, key=lambda block: (costs[block].tokens, block))
    weights = sum(cost.weight_bytes for cost in costs.values())
    turns: list[tuple[Block, ...]] = []
    at = 0
    while at < len(order):
        turn, size = [], weights
        for block in order[at:]:
            more = costs[block].state_bytes - costs[block].weight_bytes
            if size + more > budget_bytes:
                break
            turn.append(block)
            size += more
        if not turn:
            raise ValueError(f"{budget_bytes:.0f} bytes after a step do not hold {order[at]}")
        turns.append(tuple(turn))
        at += len(turn)
        weights -= sum(costs[block].weight_bytes for block in turn)
    return Window(turns=tuple(turns))


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """The best time between two full checkpoints: sqrt(2 * C * M) (Young 1974; Daly 2006, first
    order).

    Args:
        save_s: the time that a checkpoint stops training, above 0.
        mtbf_s: the mean time between failures, above 0.
    """
    if save_s <= 0.0 or mtbf_s <= 0.0:
        raise ValueError(f"expected times above 0, got {save_s} and {mtbf_s}")
    return sqrt(2.0 * save_s * mtbf_s)
