"""Checkpoints and snapshots of one rank: when one is made, and what is gone back to put in force.

All ranks save and skip alike: what they could see differently travels in a vote first.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan
from typing import TypeVar

from pacekeeper.core.checkpoint.interval import SaveCosts
from pacekeeper.core.checkpoint.manifest import CheckpointId, Manifest, Piece, RunFingerprint
from pacekeeper.core.checkpoint.partial_experts import select_experts
from pacekeeper.core.checkpoint.two_level import choose_num_snapshot
from pacekeeper.core.checkpoint.write_plan import assign_writers, cut_pieces
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.replica_spread import DomainOf
from pacekeeper.trainer.checkpoint.async_writer import Saver, SaveResult, SaveStatus, Snapshot
from pacekeeper.trainer.checkpoint.block_reader import Restored
from pacekeeper.trainer.checkpoint.block_states import BlockStates, blocks_on
from pacekeeper.trainer.checkpoint.policies.interval import (
    CheckpointCostMeter,
    CheckpointInterval,
    IntervalVote,
)
from pacekeeper.trainer.checkpoint.policies.partial_experts import (
    Choice,
    MemoryRestore,
    PartialRestore,
    PartialVote,
    steps_of,
)
from pacekeeper.trainer.checkpoint.policies.sparse_window import Save, WindowSaves, WindowVote
from pacekeeper.trainer.checkpoint.policies.window_replay import Replay
from pacekeeper.trainer.checkpoint.restore import RestoreManager
from pacekeeper.trainer.checkpoint.storage import SAY_AFTER_S
from pacekeeper.trainer.checkpoint.tensors import copy_pieces, piece_bytes, piece_rows
from pacekeeper.trainer.groups.group import Group

LAST_SAVE_S = 600.0  # at the end nobody waits for this rank; storage that hangs must not hold it
STILL_BUSY = "the one before is still being written"
STILL_AWAY = "the one before is still on its way, or broke and this group sends no more"
_log = logging.getLogger(__name__)
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands between two steps."""

    layout: Layout
    step: int
    ticket: int
    last_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveVote:
    """What a rank says of its saves in the vote on a step; None: nothing of it is due.

    Attributes:
        copy_budget_bytes: What it may copy, where experts of a snapshot are chosen by that.
        window: Of a checkpoint over several steps.
        interval: Of the next checkpoint, where that is chosen by measured times.
        partial: Of a checkpoint that may leave experts out.
    """

    copy_budget_bytes: float | None = None
    window: WindowVote | None = None
    interval: IntervalVote | None = None
    partial: PartialVote | None = None


def _given(votes: Iterable[V | None]) -> list[V]:
    return [vote for vote in votes if vote is not None]


class Checkpoints(RestoreManager):
    """One rank's; `note` is told what became of each checkpoint and snapshot."""

    def __init__(
        self,
        config: JobConfig,
        *,
        rank: int,
        run_id: int,
        first_run_id: int,
        identity: RunFingerprint,
        states: BlockStates,
        note: Callable[[dict[str, object]], None] = lambda _: None,
    ) -> None:
        super().__init__(
            config,
            rank=rank,
            run_id=run_id,
            first_run_id=first_run_id,
            identity=identity,
            states=states,
        )
        self.note = note
        self.snapshots.note = self._on_snapshot
        self._unreported = list[SaveResult]()  # of snapshots, what was not told yet
        self.counts = dict.fromkeys(SaveStatus, 0)
        self.windows = WindowSaves(config, rank=rank, run_id=run_id)
        self.pace = CheckpointCostMeter(time.monotonic())
        self.period = CheckpointInterval(config.checkpoint_period_steps)
        self.replay: Replay | None = None  # steps of a window that are being done again
        self._budget_bytes = 0.0  # that the last vote said
        self._num_copied: tuple[int, int] | None = None  # generation, experts of a snapshot
        self._num_skipped, self._skipped_step = 0, -1  # in a row, and the last of them
        self._last: tuple[int, int] | None = None  # generation and step of the last one begun
        self._copied_bytes = 0  # by the last checkpoint, or step of a window
        self._sizes: dict[Piece, int] = {}  # of all pieces, whatever the layout
        self._rows: dict[Piece, int] = {}
        self._full_of: dict[int, tuple[tuple[Piece, ...], frozenset[int]]] = {}  # by generation

    @property
    def is_storing(self) -> bool:
        """Is a checkpoint of this rank still being written?"""
        return self._saver is not None and self._saver.is_storing

    def steps_again(self) -> int:
        """As its windows are now."""
        return self.windows.steps_again

    def own_vote(
        self, step: int, layout: Layout, suspects: Collection[int] = frozenset()
    ) -> SaveVote:
        """What this rank adds to its vote on the step that makes `step` of them.

        `suspects`: ranks on nodes with a finding, as far as it was told.
        """
        period = self.config.snapshot_period_steps
        is_due = self.config.experts_per_snapshot < 0 and period > 0 and step % period == 0
        vote = SaveVote(copy_budget_bytes=self.pace.budget_bytes if is_due else None)
        if self._saver is None:
            return vote
        failed, budget_bytes = self._saver.has_failed, self.pace.budget_bytes
        if self.windows.is_on:
            window = self.windows.own_vote(
                layout, step, has_failed=failed, budget_bytes=budget_bytes
            )
            return replace(vote, window=window)
        if self.period.is_chosen:
            return replace(vote, interval=self.period.own_vote(self.pace.costs(time.monotonic())))
        if not self.period.is_due(step) or not self.partial.is_on:
            return vote
        own = self.partial.own_vote(layout, has_failed=failed, suspects=suspects)
        return replace(vote, partial=own)

    def receive_votes(self, votes: Sequence[SaveVote]) -> None:
        """Those of all ranks, the lowest one's first; what is None is so on all."""
        if budgets := _given(vote.copy_budget_bytes for vote in votes):
            self._budget_bytes = min(budgets)
        if windows := _given(vote.window for vote in votes):
            self.windows.receive_votes(windows)
        if intervals := _given(vote.interval for vote in votes):
            self.period.receive_votes(intervals)
        if partials := _given(vote.partial for vote in votes):
            self.partial.receive_votes(partials)

    def save_if_due(
        self, at: Position, *, is_storing: bool, is_last: bool = False
    ) -> list[SaveResult]:
        """Begin to save where it is time to; what became of earlier ones.

        `is_storing`: some rank said in the last vote that it still writes; then all skip this one.
        The last one of a run waits for the one before instead.
        """
        if self._saver is None:
            return []
        if self.replay is not None:  # some blocks are frozen; the window itself is still there
            return self._counted(self._saver.take_news())
        news, own = list[SaveResult](), (at.layout.generation, at.step)
        self.pace.step_is_over(at.step, time.monotonic())
        if self.windows.is_on and not is_last:
            save = self.windows.next(
                at.layout,
                at.step,
                self._all_sizes(at.layout),
                self._rows,
                self.states.num_updates,
                is_storing=is_storing,
            )
            if save is not None:
                self._saver.save(self._copied(at, save, is_last=False))
            elif self.windows.is_waiting and self._is_late(self._saver):
                news.append(self._skipped(at.step, self._saver))
        elif (self.period.is_due(at.step) or is_last) and self._last != own:
            if is_storing and not is_last:
                news.append(self._skipped(at.step, self._saver))
                self.period.begun(at.step)
            elif self._is_free(LAST_SAVE_S if is_last else 0.0):
                self._last = own
                if is_last:  # what a run ends with is whole
                    self.partial.receive_votes(())
                self._saver.save(self._snapshot(at, is_last))
            elif is_last:
                _log.warning("step=%d the last checkpoint is not begun: %s", at.step, STILL_BUSY)
                news.append(self._skipped(at.step, self._saver))
        return self._counted(self._saver.take_news() + news)

    def snapshot_if_due(
        self,
        at: Position,
        new_group: Callable[[], Group],
        domain_of: DomainOf,
        *,
        is_copying: bool,
    ) -> list[SaveResult]:
        """Begin a snapshot where it is time to.

        Args:
            at: Where this rank stands.
            new_group: Returns a group of all ranks that nothing else uses: copies are sent in it
                while training goes on. Called where there are several ranks.
            domain_of: The failure domain of each rank.
            is_copying: Some rank still copies, by the last vote: all skip this one.

        Returns:
            What became of earlier snapshots.

        Raises:
            Exception: Of `new_group`.
        """
        period = self.config.snapshot_period_steps
        is_due = bool(period) and at.step % period == 0
        if is_due and self.replay is None:  # in a replay some blocks are frozen
            if is_copying:
                _log.warning("step=%d snapshot skipped: %s", at.step, STILL_AWAY)
                self._on_snapshot(
                    SaveResult(
                        step=at.step, outcome=SaveStatus.SKIPPED, why=STILL_AWAY, in_memory=True
                    )
                )
            else:
                self.snapshots.begin(
                    at.layout,
                    at.step,
                    last_loss=at.last_loss,
                    account=self.partial.account,
                    new_group=new_group,
                    domain_of=domain_of,
                    experts=self._experts_copied(at),
                )
        return self._of_snapshots()

    def _experts_copied(self, at: Position) -> frozenset[Block] | None:
        """The experts of a snapshot, alike on all ranks; None: all, as in the first of a layout."""
        wanted = self.config.experts_per_snapshot
        if not wanted or self.snapshots.is_first(at.layout):
            return None
        if wanted < 0:
            wanted = self._measured_experts(at.layout)
        equal = [[0.0] * len(experts) for experts in at.layout.experts]
        return select_experts(equal, wanted, at.step // self.config.snapshot_period_steps)

    def _measured_experts(self, layout: Layout) -> int:
        """As many as all ranks can copy; looked for once in a layout."""
        if self._num_copied is None or self._num_copied[0] != layout.generation:
            sizes = self._all_sizes(layout)
            number = choose_num_snapshot(
                layout,
                sizes,
                self._rows,
                budget_bytes=self._budget_bytes,
                num_persisted=self.config.experts_per_checkpoint,
            )
            if not self._budget_bytes:
                return number
            self._num_copied = layout.generation, number
            if self.rank == layout.ranks[0]:
                _log.info("snapshots copy %d experts of each layer", number)
        return self._num_copied[1]

    def _on_snapshot(self, one: SaveResult) -> None:
        told = {"event": "snapshot", **asdict(one)}
        self.note(told | {"kept_bytes": told.pop("size_bytes")})
        self._unreported.append(one)

    def _of_snapshots(self) -> list[SaveResult]:
        told, self._unreported = self._unreported, []
        return told

    def settle(self) -> None:
        """Before the state changes: until the copies of it are there, where some are made beside
        the training.
        """
        waited_s, took_s = self.copies.settle()
        if took_s:
            self.pace.settled(self._copied_bytes, took_s, waited_s)

    def close(self) -> list[SaveResult]:
        """Wait for what is being written; say so where it does not come to an end."""
        self.settle()
        self.snapshots.wait()
        if self._saver is None:
            return self._of_snapshots()
        if not self._is_free(LAST_SAVE_S):
            _log.warning("a checkpoint is given up: not written after %.0f s", LAST_SAVE_S)
        return self._of_snapshots() + self._counted(self._saver.take_news())

    def _is_late(self, saver: Saver) -> bool:
        """Of a window that waits: without a pause between them all do, for a while."""
        return self.config.checkpoint_period_steps > 1 or saver.storing_s >= SAY_AFTER_S

    def _skipped(self, step: int, saver: Saver) -> SaveResult:
        """Said when it begins: a disk that is stuck would have it said for ever."""
        if not self._num_skipped:
            _log.warning("step=%d checkpoint skipped: %s", step, STILL_BUSY)
        self._num_skipped, self._skipped_step = self._num_skipped + 1, step
        by = "" if saver.is_storing else " by another rank"
        why, took_s = f"{STILL_BUSY}{by}", saver.storing_s
        return SaveResult(step=step, outcome=SaveStatus.SKIPPED, took_s=took_s, why=why)

    def _counted(self, news: list[SaveResult]) -> list[SaveResult]:
        for one in news:
            self.counts[one.outcome] += 1
            is_over = one.outcome in (SaveStatus.COMPLETE, SaveStatus.WRITTEN)
            if self._num_skipped and is_over and one.step > self._skipped_step:
                _log.info("step=%d written, %d were skipped before", one.step, self._num_skipped)
                self._num_skipped = 0
            self.note({"event": "checkpoint", **asdict(one)})
        return news

    def apply(self, found: Restored | MemoryRestore) -> None:
        """Model and optimizer become what was saved; of a window, once its steps are done again."""
        self.staged, self.replay, self._last = None, None, None
        match found:
            case MemoryRestore():
                self._went_back(found.step, None)
                wanted = blocks_on(found.layout, self.rank)
                self.states.load(wanted, found.state, found.num_updates)
                self.partial.on_memory_restore(found)
                self.snapshots.forget(up_to=found.id)
                if found.older:
                    self._log_lost(found.layout, found.step, found.older, sum(found.lost_tokens))
            case Restored(manifest=manifest):
                self.snapshots.forget()
                self._went_back(found.step, manifest.costs)
                self.replay = Replay(manifest, found.states, self.states)
                self.replay.begin(found.layout, self.rank)
                self._look_for_end(found.step)
                if manifest.older:
                    older, num_lost = steps_of(manifest.older), sum(manifest.lost_tokens)
                    self._log_lost(found.layout, manifest.id.step, older, num_lost)

    def _went_back(self, step: int, costs: SaveCosts | None) -> None:
        self.pace.went_back(costs, time.monotonic())
        self.period.begun(step)

    def step_is_over(self, step: int) -> None:
        """`step` are committed: of a window that is replayed, more blocks are as they were."""
        if self.replay is not None:
            self.replay.go_on(step)
            self._look_for_end(step)

    def is_replaying(self, *, commits: bool = False) -> bool:
        """Are some blocks frozen here, or would they be if this rank `commits` what is open?"""
        will_be = commits and self.staged is not None and self.staged.manifest.steps_again > 0
        return self.replay is not None or will_be

    def _look_for_end(self, step: int) -> None:
        if self.replay is not None and step >= self.replay.last_step:
            self.partial.restored(self.replay.manifest)
            self.replay = None

    def count_lost(self, found: PartialRestore) -> None:
        """What was found of lost blocks is in force, the others are as they were."""
        num_lost = self.partial.on_partial_restore(found.seen, found.lost.step)
        self._log_lost(found.layout, found.lost.step, found.steps, num_lost)

    def _log_lost(
        self, layout: Layout, step: int, older: Mapping[Block, int], num_lost: int
    ) -> None:
        """Note that at `step` blocks are of `older` steps, and what tokens are lost by that: at
        least so many in any order of saves, and how many times that by taking turns.
        """
        least, turns_ratio = self.partial.order_bound(layout, step)
        oldest, plt = min(older.values()), self.partial.plt_of_run(step)
        self.note(
            {
                "event": "lossy",
                "step": step,
                "older_experts": len(older),
                "oldest_step": oldest,
                "lost_tokens": num_lost,
                "plt": plt,
                "least_loss_tokens": least,
                "turns_ratio": turns_ratio,
            }
        )
        if self.rank == layout.ranks[0]:
            _log.warning(
                "step=%d is restored with loss: %d experts are as at earlier steps, back to %d; "
                "%d of their tokens are lost; with %d restores %.3f %% of the run's (PLT); "
                "in turn %.2f times as many are likely to be lost as in the best order",
                step,
                len(older),
                oldest,
                num_lost,
                self.partial.account.num_faults,
                100.0 * plt,
                turns_ratio,
            )

    def _own_of(self, layout: Layout, choice: Choice) -> tuple[tuple[Piece, ...], frozenset[int]]:
        """The pieces that this rank writes, and the ranks that write any."""
        known = self._full_of.get(layout.generation) if choice.base is None else None
        if known is not None:
            return known
        chosen = {piece: size for piece, size in self._sizes.items() if piece in choice.pieces}
        sizes = cut_pieces(layout, chosen, self._rows)
        writer_of = assign_writers(layout, sizes)
        mine = tuple(piece for piece in sizes if writer_of[piece] == self.rank)
        found = mine, frozenset(writer_of.values())
        if choice.base is None:  # what a rank writes of all pieces is a function of the layout
            self._full_of = {layout.generation: found}
        return found

    def _all_sizes(self, layout: Layout) -> dict[Piece, int]:
        self._sizes = self._sizes or piece_bytes(self.states, layout)
        self._rows = self._rows or piece_rows(self.states, self._sizes)
        return self._sizes

    def _snapshot(self, at: Position, is_last: bool) -> Snapshot:
        own = CheckpointId(run_id=self.run_id, generation=at.layout.generation, step=at.step)
        number = at.step // max(1, self.config.checkpoint_period_steps)
        choice = self.partial.choose(at.layout, number, self._all_sizes(at.layout))
        mine, everybody = self._own_of(at.layout, choice)
        self.partial.begun(own, everybody, choice.pieces)
        save = Save(id=own, pieces=mine, writers=everybody)
        copied = self._copied(at, save, is_last=is_last)
        return replace(copied, base=choice.base, is_split=self.partial.is_on)

    def _copied(self, at: Position, save: Save, *, is_last: bool) -> Snapshot:
        """Training waits for this."""
        began_s = time.monotonic()
        pieces, arrival = self.copies.make(partial(copy_pieces, self.states, save.pieces))
        size_bytes = sum(t.nbytes for tensors in pieces.values() for t in tensors.values())
        is_first, now_s = save.turn is None or save.turn.is_first, time.monotonic()
        self._copied_bytes = size_bytes
        at_once = 0 if self.copies.is_beside else size_bytes
        self.pace.copied(at_once, now_s - began_s, is_first=is_first)
        self.period.begun(at.step)
        return Snapshot(
            id=save.id,
            layout=at.layout,
            pieces=pieces,
            arrival=arrival,
            writers=save.writers,
            # At the end others may still be writing what would be swept.
            is_sweeper=is_first and not is_last and self.rank == min(save.writers),
            manifest=partial(
                Manifest,
                job=self.config.job,
                id=save.id,
                ticket=at.ticket,
                num_updates=self.states.num_updates,
                last_loss=None if isnan(at.last_loss) else at.last_loss,
                identity=self.identity,
                layout=at.layout,
                window=save.start,
            ),
            account=self.partial.account,
            turn=save.turn,
            costs=self.pace.costs(now_s),
        )
