"""The number of a launch: later ones have higher numbers, for checkpoints are ordered by them."""

import contextlib
import time
from functools import partial

from pacekeeper.core.config.controller import TrainConfig
from pacekeeper.trainer.checkpoint.reader import ids
from pacekeeper.trainer.checkpoint.storage import below, open_storage
from pacekeeper.trainer.checkpoint.storage_waits import answered

MOST_AHEAD_MS = 10 * 365 * 86_400_000  # of our clock: nothing was launched then


def next_life(after_life: int) -> int:
    """Of a launch that begins now: Unix milliseconds, but above that one, whatever the clock."""
    return max(_now_ms(), after_life + 1)


def newest_life(config: TrainConfig) -> int:
    """Of a checkpoint of the job; 0 where there is none.

    With a clock that was set back, what this launch saves would be taken for older, and swept.
    """
    if not config.checkpoint_dir:
        return 0
    with contextlib.suppress(OSError):  # the ranks say so
        storage = open_storage(below(config.checkpoint_dir, config.job))
        found = answered(partial(ids, storage), f"a list of {storage.root}", config.peer_timeout_s)
        most = _now_ms() + MOST_AHEAD_MS
        return max((one.life for one in found if one.life <= most), default=0)
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
