"""What is saved after this step of a window, alike on all ranks. Pure but for its log.

As for partial checkpoints, each rank says in the vote what it knows: which window it is in, that
nothing of it failed, what it may copy. All go on with the window, or all begin another: a step that
is missing in it would make it worthless.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper.core.checkpoint.manifest import CheckpointId, Piece, WindowStart
from pacekeeper.core.checkpoint.sparse_window import Window
from pacekeeper.core.checkpoint.window_steps import (
    block_costs,
    fewest_steps,
    pieces_to_write,
    window_of_steps,
)
from pacekeeper.core.checkpoint.write_plan import assign_writers, cut_pieces
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.async_writer import WindowStep

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowVote:
    """What a rank says of its window in the vote on a step.

    Attributes:
        is_open: It is in one, and nothing of it failed.
        first_step: Committed steps when the window began.
        last_step: Those after which it ends.
        budget_bytes: What may be copied after a step; 0.0: not measured yet.
    """

    is_open: bool
    first_step: int
    last_step: int
    budget_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one rank writes after this step: `pieces`, for the checkpoint `id`. `start` and `turn`:
    of a window; None for all that is saved at once.
    """

    id: CheckpointId
    pieces: tuple[Piece, ...]
    writers: frozenset[int]
    start: WindowStart | None = None
    turn: WindowStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The window of at most `num_steps` on a layout: the pieces this rank writes after each step,
    and who writes any.
    """

    generation: int
    num_steps: int
    window: Window
    pieces: tuple[tuple[Piece, ...], ...]
    writers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A window of which the first `done` steps are saved, or are being so."""

    id: CheckpointId
    start: WindowStart
    plan: _Plan
    done: int = 0


class WindowSaves:
    """One rank's; `run_id` of the job."""

    def __init__(self, config: JobConfig, *, rank: int, run_id: int) -> None:
        self._config = config
        self._rank = rank
        self._run_id = run_id
        self._plan: _Plan | None = None
        self._open: _Open | None = None
        self._votes: Sequence[WindowVote] = ()
        self._is_said = False
        self.is_waiting = False  # a window was due after the last step

    @property
    def is_on(self) -> bool:
        """Are checkpoints spread over several steps?"""
        return self._config.checkpoint_window_steps != 1

    @property
    def steps_again(self) -> int:
        """Of a window as it was planned last, to go back to it."""
        return 0 if self._plan is None else len(self._plan.window.turns) - 1

    def own_vote(
        self, layout: Layout, step: int, *, has_failed: bool, budget_bytes: float
    ) -> WindowVote:
        """What this rank says in the vote on the step that makes `step` of them; `has_failed`: it
        could not write something of the window.
        """
        one = self._open
        own = (layout.generation, step)
        if one is None or has_failed or (one.id.generation, one.start.step + one.done) != own:
            return WindowVote(is_open=False, first_step=0, last_step=0, budget_bytes=budget_bytes)
        return WindowVote(
            is_open=True,
            first_step=one.start.step,
            last_step=one.id.step,
            budget_bytes=budget_bytes,
        )

    def receive_votes(self, votes: Sequence[WindowVote]) -> None:
        """Everybody's, the first rank's first."""
        self._votes = votes

    def next(
        self,
        layout: Layout,
        step: int,
        sizes: Mapping[Piece, int],
        num_rows: Mapping[Piece, int],
        num_updates: int,
        *,
        is_storing: bool,
    ) -> Save | None:
        """What is saved now that `step` are committed; the same decision on all ranks.

        sizes: bytes of all pieces; num_rows: into how many strips each can be cut; `is_storing`:
        some rank said in the vote that it still writes.
        """
        votes, self._votes = self._votes, ()
        before, self._open = self._open, None
        self.is_waiting = False
        windows = {(vote.is_open, vote.first_step, vote.last_step) for vote in votes}
        if before is not None and len(windows) == 1 and votes[0].is_open:
            return self._turn(before)
        if before is not None:
            _log.warning("step=%d the window from step %d is broken off", step, before.start.step)
        if step % max(1, self._config.checkpoint_period_steps) or self._waits(step, is_storing):
            return None
        budget = min((vote.budget_bytes for vote in votes), default=0.0)
        plan = self._planned(layout, sizes, num_rows, budget)
        last = step + len(plan.window.turns) - 1
        if last >= self._config.steps:
            return None  # what a run ends with is saved at once
        own = CheckpointId(run_id=self._run_id, generation=layout.generation, step=last)
        start = WindowStart(step=step, num_updates=num_updates)
        return self._turn(_Open(id=own, start=start, plan=plan))

    def _turn(self, one: _Open) -> Save:
        steps = one.plan.window.replay(one.start.step)
        if len(steps) == 1:
            return Save(id=one.id, pieces=one.plan.pieces[0], writers=one.plan.writers)
        at, is_last = steps[one.done], one.done + 1 == len(steps)
        self._open = None if is_last else replace(one, done=one.done + 1)
        return Save(
            id=one.id,
            pieces=one.plan.pieces[one.done],
            writers=one.plan.writers,
            start=one.start,
            turn=WindowStep(
                step=at.step,
                is_first=not one.done,
                is_last=is_last,
                frozen=frozenset(at.frozen),
            ),
        )

    def _waits(self, step: int, is_storing: bool) -> bool:
        """Said once: with a window at every step it may take many until storage is done."""
        if is_storing and not self._is_said:
            _log.warning("step=%d the next window waits: the one before is being written", step)
        self._is_said = self.is_waiting = is_storing
        return is_storing

    def _planned(
        self,
        layout: Layout,
        sizes: Mapping[Piece, int],
        num_rows: Mapping[Piece, int],
        budget: float,
    ) -> _Plan:
        costs, known = block_costs(sizes), self._plan
        num_steps = self._config.checkpoint_window_steps or fewest_steps(layout, costs, budget)
        wanted = layout.generation, num_steps
        if known is not None and (known.generation, known.num_steps) == wanted:
            return known
        window = window_of_steps(layout, costs, num_steps)
        mine, everybody, busiest = list[tuple[Piece, ...]](), set[int](), list[int]()
        for at in window.replay(0):
            now = cut_pieces(layout, pieces_to_write(at, sizes), num_rows)
            by = assign_writers(layout, now)
            mine.append(tuple(piece for piece in now if by[piece] == self._rank))
            everybody.update(by.values())
            load = dict.fromkeys(layout.ranks, 0)
            for piece, size in now.items():
                load[by[piece]] += size
            busiest.append(max(load.values()))
        if self._rank == layout.ranks[0]:
            _log.info(
                "checkpoints are spread over windows of %d steps: a rank copies at most %.1f MB "
                "after each; going back does up to %d steps again",
                len(window.turns),
                max(busiest) / 1e6,
                len(window.turns) - 1,
            )
        self._plan = _Plan(
            generation=layout.generation,
            num_steps=num_steps,
            window=window,
            pieces=tuple(mine),
            writers=frozenset(everybody),
        )
        return self._plan
