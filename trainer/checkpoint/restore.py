"""Which checkpoints and snapshots may be gone back to, and what a rank needs of them.

Of each block the freshest that is left: a living replica, then memory, then storage. All ranks go
back alike: what they could see differently travels in a vote first.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from math import isnan

from pacekeeper.core.checkpoint.manifest import CheckpointId, RunFingerprint
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.errors import DataError, HostError, LostStateError
from pacekeeper.core.layout.diff import lost_blocks, moves_layers
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.async_writer import Saver
from pacekeeper.trainer.checkpoint.block_reader import Lost, Reader, Restored
from pacekeeper.trainer.checkpoint.block_states import BlockStates
from pacekeeper.trainer.checkpoint.in_memory import Memory, Snapshots
from pacekeeper.trainer.checkpoint.policies.partial_experts import (
    MemoryRestore,
    PartialRestore,
    PartialSaves,
    steps_of,
)
from pacekeeper.trainer.checkpoint.reader import (
    NotOursError,
    accept,
    complete_ids,
    is_sound,
    reject,
)
from pacekeeper.trainer.checkpoint.staging import host_copies
from pacekeeper.trainer.checkpoint.storage import Storage, answered, below, open_storage, wait_aloud
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.group import Group

MAX_CANDIDATES = 8  # of which the first that all ranks can read is taken


MEMORY = "memory"  # among paths: the newest snapshot of which all is left
_RESUME_REMEDY = (
    "`pacekeeper checkpoint verify` names the damage; --resume PATH takes one by name, "
    "--resume never begins at step 0"
)
_RESTART = "restart from a checkpoint, with more replicas per expert"
_FORGOTTEN = "of no snapshot in memory is all of it left"
_log = logging.getLogger(__name__)


class RestoreManager:
    """One rank's; use from the training thread. `first_run_id`: of the job's first launch."""

    def __init__(
        self,
        config: JobConfig,
        *,
        rank: int,
        run_id: int,
        first_run_id: int,
        identity: RunFingerprint,
        states: BlockStates,
    ) -> None:
        self.config = config
        self.rank = rank
        self.run_id = run_id
        self.identity = identity
        self.states = states
        self.partial = PartialSaves(config, states.num_experts)
        self.staged: Restored | None = None  # a commit would put it in force
        self.copies = host_copies(states.device)
        self.snapshots = Snapshots(rank=rank, run_id=run_id, states=states, copies=self.copies)
        self._saver: Saver | None = None
        self._storage: Storage | None = None
        if config.checkpoint_dir:
            self._storage = open_storage(below(config.checkpoint_dir, config.job))
            self._saver = Saver(self._storage, rank=rank, keep=config.checkpoints_kept)
        self._num_read = 0  # pieces, in all restores
        self._reader = Reader(
            rank=rank,
            storage=self._storage,
            identity=identity,
            states=states,
            on_piece=self._count_piece,
        )
        self._first_run_id = first_run_id
        # Where training went back from: no later state of such a course, or of one before, is used.
        self._left = list[CheckpointId]()

    def candidates(self) -> tuple[str, ...]:
        """Paths of what may be gone back to, newest first.

        Those of older launches only if this one was to resume from the newest of all. Raises
        HostError where the storage does not say what it has: nothing is no answer then.
        """
        found: list[str] = []
        if self._storage is not None:
            try:
                there = answered(
                    partial(self._there, self._storage),
                    f"a list of {self._storage.root}",
                    self._patience_s,
                )
            except OSError as error:
                raise HostError(
                    f"can not look for checkpoints in {self._storage.root}: {error.strerror}",
                    remedy="--resume never begins at step 0",
                ) from None
            found = [below(self._storage.root, one.name) for one in there]
            if len(found) > MAX_CANDIDATES:  # the oldest shares fewest files with the newest
                found[MAX_CANDIDATES - 1 :] = found[-1:]
        named = self.config.resume
        return tuple(found) if named in ("auto", "never") else (*found, named)

    def _there(self, storage: Storage) -> list[CheckpointId]:
        """Where there are many, what is damaged to the eye takes no place of one that is whole."""
        found = [
            one
            for one in complete_ids(storage)
            if (self.config.resume == "auto" or one.run_id >= self._first_run_id)
            and not self._is_left(one)
        ]
        if len(found) <= MAX_CANDIDATES:
            return found
        sound = [one for one in found if is_sound(storage, one)]
        if len(sound) < len(found):
            _log.warning(
                "%d of %d checkpoints in %s are damaged, or could not be read before",
                len(found) - len(sound),
                len(found),
                storage.root,
            )
        return sound or found

    def _is_left(self, one: CheckpointId) -> bool:
        """Is it of a course that was left, and later than where that was sound?"""
        return any(
            one.step > at.step and (one.run_id, one.generation) <= (at.run_id, at.generation)
            for at in self._left
        )

    def agree_on_start(self, group: Group) -> tuple[str, ...]:
        """What the lowest rank would resume from; empty: nothing. Raises HostError."""
        if self._storage is None and self.config.resume in ("auto", "never"):
            return ()
        if self.config.resume == "never" and self.run_id == self._first_run_id:
            return ()  # nothing can be there yet, and storage that refuses stops no training
        return self._shared(group)

    def _shared(self, group: Group) -> tuple[str, ...]:
        """The paths of the lowest rank, on all ranks, which call this together.

        A message is numbers: the ids stand for the paths.
        """
        mine = [_id_of(path) for path in self.candidates()]
        ids = [one for one in mine if one is not None][:MAX_CANDIDATES]
        values = [x for one in ids for x in (one.run_id, one.generation, one.step)]
        padding = [0] * (3 * MAX_CANDIDATES - len(values))
        told = [int(x) for x in exchange_values([len(ids), *values, *padding], group)[0].tolist()]
        chosen = [
            CheckpointId(run_id=told[i], generation=told[i + 1], step=told[i + 2])
            for i in range(1, 1 + 3 * told[0], 3)
        ]
        return tuple(self._path_of(one) for one in chosen)

    def _path_of(self, one: CheckpointId) -> str:
        if self._storage is None or self.config.resume.rpartition("/")[2] == one.name:
            return self.config.resume
        return below(self._storage.root, one.name)

    def agree_on_earlier(self, generation: int, step: int, group: Group) -> tuple[str, ...]:
        """Paths with no later state than that of `step`, newest first; the same on all ranks.

        No later checkpoint up to this generation is gone back to in this run from now on, those
        that are still being written among them.
        """
        self._left.append(CheckpointId(run_id=self.run_id, generation=generation, step=step))
        ids = {path: _id_of(path) for path in self._shared(group)}
        return tuple(path for path, of in ids.items() if of is None or not self._is_left(of))

    def sources(self) -> tuple[str, ...]:
        """As `candidates`, with MEMORY where the newest snapshot has its place, once there is one.

        Raises HostError as well where there is none and the storage does not answer.
        """
        kept = self.snapshots.kept
        try:
            stored = self.candidates()
        except HostError as error:
            if not kept:
                raise
            _log.warning("%s", error)
            stored = ()
        if not kept:
            return stored
        newer = [path for path in stored if self._is_newer(path, kept[0].id)]
        return (*newer, MEMORY, *stored[len(newer) :])

    def steps_again(self) -> int:
        """Steps that are done again after going back to a checkpoint of this run, up to its own."""
        return 0

    def _is_newer(self, path: str, kept: CheckpointId) -> bool:
        """Is less done again from this checkpoint than from a snapshot?"""
        of = _id_of(path)
        return of is not None and of > kept and of.step - self.steps_again() > kept.step

    def stage(self, paths: Sequence[str], layout: Layout, group: Group) -> Restored | MemoryRestore:
        """What this rank needs of the first of `paths` that all ranks can read; MEMORY among them
        is the newest snapshot of which all is left. Raises what the group does.

        Raises DataError where there is none, LostStateError where only memory was left to try.
        """
        if MEMORY in paths:
            place = paths.index(MEMORY)
            newer, older = paths[:place], paths[place + 1 :]
            if newer:
                with contextlib.suppress(DataError):
                    return self.stage(newer, layout, group)
            kept = self._remembered(layout, group)
            if kept is None and not older:
                raise LostStateError(_FORGOTTEN, remedy=_RESTART)
            return self.stage(older, layout, group) if kept is None else kept
        began_s = time.monotonic()
        path, found = self._first(paths, layout, group)
        self.staged = found
        if self.rank == group.ranks[0]:
            self._say_of(path, "")
        took_s = time.monotonic() - began_s
        _log.info("step=%d restored from %s in %.3f s", found.manifest.id.step, path, took_s)
        return found

    def stage_lost(
        self, paths: Sequence[str], old: Layout, new: Layout, group: Group, step: int
    ) -> PartialRestore | None:
        """Before a move: what `new` wants here of the blocks that nobody holds any more, of each
        the freshest that is left; None without `paths`. Books are brought up to date.

        Raises what the group does, and DataError or LostStateError where some block is nowhere.
        """
        self.staged = None
        if paths or moves_layers(old, new):
            self.partial.books.merge(exchange_values(self.partial.books.encode(), group).tolist())
        if not paths:
            return None
        lost = Lost(blocks=frozenset(lost_blocks(old, group.ranks)), step=step)
        stored = [path for path in paths if path != MEMORY]
        memory = self._memory(group)
        stock_of = memory.newest_of(lost.blocks) if MEMORY in paths else {}
        newest = _id_of(stored[0]) if stored else None
        found = PartialRestore(layout=new, lost=lost, state={}, steps={}, seen={})
        is_all_there = len(stock_of) == len(lost.blocks)
        is_older = newest is not None and any(one.id < newest for one in stock_of.values())
        if is_older or not is_all_there:
            if not stored:
                raise LostStateError(_FORGOTTEN, remedy=_RESTART)
            try:
                _, read = self._first(stored, new, group, lost)
                entries = [e for e in read.manifest.pieces if e.piece.block in lost.blocks]
                found = found.with_newer(
                    state=read.state, steps=steps_of(entries), seen=read.seen_tokens
                )
            except DataError:
                if not is_all_there:
                    raise
        fresh = {
            block: one
            for block, one in stock_of.items()
            if one.id.step >= found.steps.get(block, 0)
        }
        if not fresh:
            return found
        _log.info(
            "step=%d %d lost experts come from memory, %d from storage",
            step,
            len(fresh),
            len(lost.blocks) - len(fresh),
        )
        return found.with_newer(
            state=memory.fetch(fresh, new),
            steps={block: one.id.step for block, one in fresh.items()},
            seen=memory.seen(fresh, new),
        )

    def _remembered(self, layout: Layout, group: Group) -> MemoryRestore | None:
        memory = self._memory(group)
        found = memory.whole(layout, may_mix=self.config.experts_per_snapshot != 0)
        if found is None:
            _log.warning("%s", _FORGOTTEN)
            return None
        stock, stock_of = found
        facts = memory.facts_of(stock, layout)
        older = {block: one for block, one in stock_of.items() if one.id != stock.id}
        seen = memory.seen(older, layout)
        lost = [0] * layout.num_layers
        for block, tokens in seen.items():
            lost[block.layer] += facts.account.routed[block.layer][block.index] - tokens
        state = memory.fetch(stock_of, layout)
        _log.info("step=%d restored from memory", stock.id.step)
        self.staged = None
        return MemoryRestore(
            id=stock.id,
            num_updates=facts.num_updates,
            last_loss=None if isnan(facts.last_loss) else facts.last_loss,
            account=facts.account,
            layout=layout,
            state=state,
            older={block: one.id.step for block, one in older.items()},
            lost_tokens=tuple(lost),
        )

    def _memory(self, group: Group) -> Memory:
        kept = self.snapshots.kept
        return Memory(run_id=self.run_id, states=self.states, kept=kept, group=group)

    def _first(
        self, paths: Sequence[str], layout: Layout, group: Group, lost: Lost | None = None
    ) -> tuple[str, Restored]:
        """The first of `paths` in which each rank finds what it needs, and what that is.

        Raises DataError where there is none, and what the group does.
        """
        if not self._is_free(self._patience_s):
            _log.warning("goes back while a checkpoint is still being written")
        why = "there is none"
        for path in paths:
            found: Restored | None = None
            why, is_damaged = "another rank could not read it", True
            try:
                found = answered(
                    partial(self._reader.read, path, layout, lost),
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
            votes = exchange_values([float(found is not None)], group)
            if found is not None and bool((votes > 0.0).all()):
                return path, found
            if self.rank == group.ranks[0] and is_damaged:
                self._say_of(path, why)
        raise DataError(
            f"no checkpoint of {list(paths)} can be read by all ranks: {why}",
            remedy=_RESUME_REMEDY,
        )

    def _is_free(self, timeout_s: float) -> bool:
        """Is nothing being written any more, after this long at the latest?"""
        return self._saver is None or wait_aloud(
            self._saver.wait, f"a checkpoint to be written to {self._saver.root}", timeout_s
        )

    @property
    def _patience_s(self) -> float:
        """Where the others wait for this rank's storage: they do not for ever."""
        return self.config.peer_timeout_s / 2

    def _count_piece(self) -> None:
        self._num_read += 1

    def _say_of(self, path: str, why: str) -> None:
        """Later runs must know whether it counts; `why` it does not, empty: it does."""
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


def _id_of(path: str) -> CheckpointId | None:
    return CheckpointId.of_name(path.rpartition("/")[2])
