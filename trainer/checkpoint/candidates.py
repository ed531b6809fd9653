"""Which checkpoints a rank may go back to, and the same answer for all ranks at the start."""

import logging
from dataclasses import dataclass
from functools import partial

from pacekeeper.core.checkpoint.manifest import CheckpointId
from pacekeeper.core.errors import HostError
from pacekeeper.trainer.checkpoint.reader import complete_ids, is_sound
from pacekeeper.trainer.checkpoint.storage import Storage, below
from pacekeeper.trainer.checkpoint.storage_waits import answered
from pacekeeper.trainer.distributed.collectives import Collectives

MAX_CANDIDATES = 8  # of which the first that all ranks can read is taken
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """One rank's view. `resume`: as in the settings; `storage`: of its job, where it saves any;
    `first_life`: of the job's first launch; `patience_s` until storage is given up.
    """

    resume: str
    storage: Storage | None
    life: int
    first_life: int
    patience_s: float

    def paths(self) -> tuple[str, ...]:
        """Of what may be gone back to, newest first.

        Those of older launches only if this one was to resume from the newest of all. Raises
        HostError where the storage does not say what it has: nothing is no answer then.
        """
        found: list[str] = []
        if self.storage is not None:
            try:
                there = answered(
                    partial(self._there, self.storage),
                    f"a list of {self.storage.root}",
                    self.patience_s,
                )
            except OSError as error:
                raise HostError(
                    f"can not look for checkpoints in {self.storage.root}: {error.strerror}",
                    remedy="--resume never begins at step 0",
                ) from None
            found = [below(self.storage.root, one.name) for one in there]
            if len(found) > MAX_CANDIDATES:  # the oldest shares fewest files with the newest
                found[MAX_CANDIDATES - 1 :] = found[-1:]
        return tuple(found) + ((self.resume,) if self.resume not in ("auto", "never") else ())

    def _there(self, storage: Storage) -> list[CheckpointId]:
        """Where there are many, what is damaged to the eye takes no place of one that is whole."""
        found = [
            one
            for one in complete_ids(storage)
            if self.resume == "auto" or one.life >= self.first_life
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

    def agreed(self, fabric: Collectives) -> tuple[str, ...]:
        """What the lowest rank would resume from; empty: nothing. Raises PeerLost.

        A message is numbers: the ids stand for the paths.
        """
        if self.storage is None and self.resume in ("auto", "never"):
            return ()
        if self.resume == "never" and self.life == self.first_life:
            return ()  # nothing can be there yet, and storage that refuses stops no training
        mine = [CheckpointId.of_name(path.rpartition("/")[2]) for path in self.paths()]
        ids = [one for one in mine if one is not None][:MAX_CANDIDATES]
        values = [x for one in ids for x in (one.life, one.generation, one.step)]
        padding = [0] * (3 * MAX_CANDIDATES - len(values))
        told = [int(x) for x in fabric.exchange([len(ids), *values, *padding])[0].tolist()]
        chosen = [
            CheckpointId(life=told[i], generation=told[i + 1], step=told[i + 2])
            for i in range(1, 1 + 3 * told[0], 3)
        ]
        return tuple(self._path_of(one) for one in chosen)

    def _path_of(self, one: CheckpointId) -> str:
        if self.storage is None or self.resume.rpartition("/")[2] == one.name:
            return self.resume
        return below(self.storage.root, one.name)
