"""Checkpoints of one rank: when one is saved, which ones may be gone back to, and going back.

All ranks save, skip and go back alike: what they could see differently travels in a vote first.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import isnan

import torch

from pacekeeper.core.block_writers import cut, writers
from pacekeeper.core.config import TrainConfig
from pacekeeper.core.errors import DataError
from pacekeeper.core.layout import Layout
from pacekeeper.core.manifest import CheckpointId, Identity, Manifest, Piece, PieceEntry
from pacekeeper.core.transfers import moves_layers
from pacekeeper.trainer.block_state import num_updates
from pacekeeper.trainer.candidates import Candidates
from pacekeeper.trainer.checkpoint_catalog import accept, reject
from pacekeeper.trainer.checkpoint_files import Storage, below, open_storage
from pacekeeper.trainer.checkpoint_reading import Lost, NotOursError, Reader, Restored
from pacekeeper.trainer.checkpoint_saver import News, Outcome, Saver, Snapshot
from pacekeeper.trainer.checkpoint_state import copy_of_pieces, piece_bytes, piece_rows
from pacekeeper.trainer.collectives import Collectives
from pacekeeper.trainer.lossy_restore import say_lost
from pacekeeper.trainer.model import MoETransformer
from pacekeeper.trainer.mover import lost_blocks
from pacekeeper.trainer.partial_saves import Choice, PartialSaves
from pacekeeper.trainer.replaying import Replay
from pacekeeper.trainer.save_pace import SavePace
from pacekeeper.trainer.storage_waits import answered, wait_aloud
from pacekeeper.trainer.window_saves import Save, WindowSaves

LAST_SAVE_S = 600.0  # at the end nobody waits for this rank; storage that hangs must not hold it
STILL_BUSY = "the one before is still being written"
_RESUME_REMEDY = (
    "`pacekeeper checkpoint verify` names the damage; --resume PATH takes one by name, "
    "--resume never begins at step 0"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands between two steps."""

    layout: Layout
    step: int
    ticket: int
    last_loss: float


class Checkpoints:
    """One rank's; use from the training thread. `first_life`: of the job's first launch; `note` is
    told what became of each checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        rank: int,
        life: int,
        first_life: int,
        identity: Identity,
        model: MoETransformer,
        optimizer: torch.optim.Optimizer,
        note: Callable[[dict[str, object]], None] = lambda _: None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.life = life
        self.identity = identity
        self.model = model
        self.optimizer = optimizer
        self.note = note
        self.counts = dict.fromkeys(Outcome, 0)
        self.partial = PartialSaves(config)
        self.windows = WindowSaves(config, rank=rank, life=life)
        self.pace = SavePace()
        self.staged: Restored | None = None  # a commit would put it in force
        self.replay: Replay | None = None  # steps of a window that are being done again
        self._saver: Saver | None = None
        self._num_skipped, self._skipped_step = 0, -1  # in a row, and the last of them
        self._storage: Storage | None = None
        self._last: tuple[int, int] | None = None  # generation and step of the last one begun
        self._sizes: dict[Piece, int] = {}  # of all pieces, whatever the layout
        self._rows: dict[Piece, int] = {}
        self._num_read = 0  # pieces, in all restores
        self._full_of: dict[int, tuple[list[Piece], frozenset[int]]] = {}  # by generation
        if config.checkpoint_dir:
            self._storage = open_storage(below(config.checkpoint_dir, config.job))
            self._saver = Saver(self._storage, rank=rank, keep=config.checkpoints_kept)
        self._candidates = Candidates(
            resume=config.resume,
            storage=self._storage,
            life=life,
            first_life=first_life,
            patience_s=self._patience_s,
        )

    @property
    def is_storing(self) -> bool:
        """Is a checkpoint of this rank still being written?"""
        return self._saver is not None and self._saver.is_storing

    def word(self, step: int, layout: Layout) -> list[float]:
        """What this rank adds to its vote on the step that makes `step` of them; see `hear`."""
        if self._saver is None:
            return []
        failed = self._saver.has_failed
        if self.windows.is_on:
            budget_bytes = self.pace.budget_bytes
            return self.windows.word(layout, step, has_failed=failed, budget_bytes=budget_bytes)
        is_due = step % self.config.checkpoint_period_steps == 0
        return self.partial.word(layout, has_failed=failed) if is_due else []

    def hear(self, words: Sequence[Sequence[float]]) -> None:
        """The words of all, the lowest rank's first; empty where nothing is due."""
        if any(words) and self.windows.is_on:
            self.windows.hear(words)
        elif any(words):
            self.partial.hear(words)

    def save_if_due(self, at: Position, *, is_storing: bool, is_last: bool = False) -> list[News]:
        """Begin to save where it is time to; what became of earlier ones.

        `is_storing`: some rank said in the last vote that it still writes; then all skip this one.
        The last one of a run waits for the one before instead.
        """
        if self._saver is None:
            return []
        if self.replay is not None:  # some blocks are frozen; the window itself is still there
            return self._counted(self._saver.take_news())
        news: list[News] = []
        is_time = at.step % self.config.checkpoint_period_steps == 0
        if self.windows.is_on and not is_last:
            self.pace.step_is_over(at.step, time.monotonic())
            updates, sizes = num_updates(self.optimizer), self._all_sizes(at.layout)
            save = self.windows.next(at.layout, at.step, sizes, updates, is_storing=is_storing)
            if save is not None:
                self._saver.save(self._copied(at, save, is_last=False))
        elif (is_time or is_last) and self._last != (at.layout.generation, at.step):
            if is_storing and not is_last:
                news.append(self._skipped(at.step, self._saver))
            elif self._is_free(LAST_SAVE_S if is_last else 0.0):
                self._last = (at.layout.generation, at.step)
                if is_last:  # what a run ends with is whole
                    self.partial.hear(())
                self._saver.save(self._snapshot(at, is_last))
            elif is_last:
                _log.warning("step=%d the last checkpoint is not begun: %s", at.step, STILL_BUSY)
                news.append(self._skipped(at.step, self._saver))
        return self._counted(self._saver.take_news() + news)

    def close(self) -> list[News]:
        """Wait for what is being written; say so where it does not come to an end."""
        if self._saver is None:
            return []
        if not self._is_free(LAST_SAVE_S):
            _log.warning("a checkpoint is given up: not written after %.0f s", LAST_SAVE_S)
        return self._counted(self._saver.take_news())

    def _is_free(self, timeout_s: float) -> bool:
        """Is nothing being written any more, after this long at the latest?"""
        return self._saver is None or wait_aloud(
            self._saver.wait, f"a checkpoint to be written to {self._saver.root}", timeout_s
        )

    def _skipped(self, step: int, saver: Saver) -> News:
        """Said when it begins: a disk that is stuck would have it said for ever."""
        if not self._num_skipped:
            _log.warning("step=%d checkpoint skipped: %s", step, STILL_BUSY)
        self._num_skipped, self._skipped_step = self._num_skipped + 1, step
        by = "" if saver.is_storing else " by another rank"
        return News(
            step=step,
            outcome=Outcome.SKIPPED,
            took_s=saver.storing_s,
            why=f"{STILL_BUSY}{by}",
        )

    @property
    def _patience_s(self) -> float:
        """Where the others wait for this rank's storage: they do not for ever."""
        return self.config.peer_timeout_s / 2

    def _counted(self, news: list[News]) -> list[News]:
        for one in news:
            self.counts[one.outcome] += 1
            is_over = one.outcome in (Outcome.COMPLETE, Outcome.WRITTEN)
            if self._num_skipped and is_over and one.step > self._skipped_step:
                _log.info("step=%d written, %d were skipped before", one.step, self._num_skipped)
                self._num_skipped = 0
            self.note({"event": "checkpoint", **asdict(one)})
        return news

    def candidates(self) -> tuple[str, ...]:
        """Paths of what may be gone back to, newest first. Raises HostError."""
        return self._candidates.paths()

    def agree_on_start(self, fabric: Collectives) -> tuple[str, ...]:
        """What the lowest rank would resume from; empty: nothing. Raises PeerLost, HostError."""
        return self._candidates.agreed(fabric)

    def stage(
        self,
        paths: Sequence[str],
        layout: Layout,
        fabric: Collectives,
        lost: Lost | None = None,
    ) -> Restored:
        """What this rank needs of the first of `paths` that all ranks can read. Raises PeerLost.

        Raises DataError where there is none.
        """
        if not self._is_free(self._patience_s):
            _log.warning("goes back while a checkpoint is still being written")
        reader = Reader(
            rank=self.rank,
            storage=self._storage,
            identity=self.identity,
            model=self.model,
            on_piece=self._count_piece,
        )
        why = ""
        for path in paths:
            found: Restored | None = None
            began_s = time.monotonic()
            why, is_damaged = "another rank could not read it", True
            try:
                found = answered(
                    partial(reader.read, path, layout, lost),
                    f"{path} to be read",
                    self._patience_s,
                    progress=lambda: self._num_read,
                )
            except TimeoutError as error:
                why, is_damaged = f"{path}: {error.strerror}", False
                _log.warning("checkpoint=%s is not used: %s", path, why)
            except DataError as error:
                why, is_damaged = error.what, not isinstance(error, NotOursError)
                _log.warning("checkpoint=%s is not used: %s", path, why)
            votes = fabric.exchange([float(found is not None)])
            is_read = found is not None and bool((votes > 0.0).all())
            is_proven = is_read and lost is None  # of whole ones only
            if self.rank == fabric.ranks[0] and (is_proven or (is_damaged and not is_read)):
                self._say_of(path, "" if is_read else why)
            if found is not None and is_read:
                self.staged = found if lost is None else None
                _log.info(
                    "step=%d restored from %s in %.3f s",
                    found.manifest.id.step,
                    path if lost is None else f"{path} ({len(lost.blocks)} lost experts)",
                    time.monotonic() - began_s,
                )
                return found
        raise DataError(
            f"no checkpoint of {list(paths)} can be read by all ranks: {why}",
            remedy=_RESUME_REMEDY,
        )

    def stage_lost(
        self, paths: Sequence[str], old: Layout, new: Layout, fabric: Collectives, step: int
    ) -> Restored | None:
        """Before a move: what `new` wants here of the blocks that nobody holds any more, of the
        first of `paths` that all can read; None without `paths`. Books are brought up to date.

        Raises PeerLost, DataError.
        """
        if paths or moves_layers(old, new):
            self.partial.books.learn(fabric.exchange(self.partial.books.told()).tolist())
        if not paths:
            return None
        lost = Lost(blocks=frozenset(lost_blocks(old, fabric.ranks)), step=step)
        return self.stage(paths, new, fabric, lost)

    def _say_of(self, path: str, why: str) -> None:
        """Later lives must know whether it counts; `why` it does not, empty: it does."""
        one = CheckpointId.of_name(path.rpartition("/")[2])
        if self._storage is None or one is None or path != below(self._storage.root, one.name):
            return  # not of this job: its own will judge it
        try:
            if why:
                reject(self._storage, one, why)
            else:
                accept(self._storage, one)
        except OSError as error:
            _log.warning("checkpoint=%s can not be marked: %s", path, error.strerror)

    def put_in_force(self, found: Restored) -> None:
        """Model and optimizer become what was saved; of a window, once its steps are done again."""
        self.staged, self._last = None, None
        self.replay = Replay(found.manifest, found.states, self.model, self.optimizer)
        self.replay.begin(found.layout, self.rank)
        self._look_for_end(found.step)
        if found.manifest.older:
            num_lost = sum(found.manifest.lost_tokens)
            self._say_lost(found, found.manifest.older, found.manifest.id.step, num_lost)

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

    def count_lost(self, found: Restored) -> None:
        """What was found of lost blocks is in force, the others are as they were."""
        assert found.lost is not None, "else all went back"
        num_lost = self.partial.refilled(found.seen_tokens, found.lost.step)
        older = [e for e in found.manifest.pieces if e.piece.block in found.lost.blocks]
        self._say_lost(found, older, found.lost.step, num_lost)

    def _say_lost(
        self, found: Restored, older: Sequence[PieceEntry], step: int, num_lost: int
    ) -> None:
        is_speaker = self.rank == found.layout.ranks[0]
        say_lost(older, step, num_lost, self.partial, self.note, is_speaker=is_speaker)

    def _count_piece(self) -> None:
        self._num_read += 1

    def _own_of(self, layout: Layout, choice: Choice) -> tuple[list[Piece], frozenset[int]]:
        """The pieces that this rank writes, and the ranks that write any."""
        known = self._full_of.get(layout.generation) if choice.base is None else None
        if known is not None:
            return known
        chosen = {piece: size for piece, size in self._sizes.items() if piece in choice.pieces}
        sizes = cut(layout, chosen, self._rows)
        writer_of = writers(layout, sizes)
        mine = [piece for piece in sizes if writer_of[piece] == self.rank]
        found = mine, frozenset(writer_of.values())
        if choice.base is None:  # what a rank writes of all pieces is a function of the layout
            self._full_of = {layout.generation: found}
        return found

    def _all_sizes(self, layout: Layout) -> dict[Piece, int]:
        self._sizes = self._sizes or piece_bytes(self.model, layout)
        self._rows = self._rows or piece_rows(self.model, self._sizes)
        return self._sizes

    def _snapshot(self, at: Position, is_last: bool) -> Snapshot:
        own = CheckpointId(life=self.life, generation=at.layout.generation, step=at.step)
        number = at.step // self.config.checkpoint_period_steps
        choice = self.partial.choose(at.layout, number, self._all_sizes(at.layout))
        mine, everybody = self._own_of(at.layout, choice)
        self.partial.begun(own, everybody, choice.pieces)
        save = Save(id=own, pieces=tuple(mine), writers=everybody)
        copied = self._copied(at, save, is_last=is_last)
        return replace(copied, base=choice.base, is_split=self.partial.is_on)

    def _copied(self, at: Position, save: Save, *, is_last: bool) -> Snapshot:
        """Training waits for this."""
        began_s = time.monotonic()
        pieces = copy_of_pieces(self.model, self.optimizer, save.pieces)
        size_bytes = sum(t.nbytes for tensors in pieces.values() for t in tensors.values())
        self.pace.copied(size_bytes, time.monotonic() - began_s)
        is_first = save.turn is None or save.turn.is_first
        return Snapshot(
            id=save.id,
            layout=at.layout,
            pieces=pieces,
            writers=save.writers,
            # At the end others may still be writing what would be swept.
            is_sweeper=is_first and not is_last and self.rank == min(save.writers),
            manifest=partial(
                Manifest,
                job=self.config.job,
                id=save.id,
                ticket=at.ticket,
                num_updates=num_updates(self.optimizer),
                last_loss=None if isnan(at.last_loss) else at.last_loss,
                identity=self.identity,
                layout=at.layout,
                window=save.start,
            ),
            account=self.partial.account,
            turn=save.turn,
        )
