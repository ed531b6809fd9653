"""How the ranks of a foreign trainer exchange votes: a few numbers, through host memory."""

import contextlib
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pacekeeper.core.errors import UnreachableError

VOTE_TIMEOUT_S = 60.0


class CpuGather:
    """Gathers a few whole numbers from all ranks through host memory, with a time limit.

    It has a gloo group of its own: collectives of the trainer are neither delayed nor reordered.
    Create it on all ranks together, after `init_process_group`.

    Attributes:
        close: Leaves the group and joins its threads; called at the interpreter's exit at the
            latest.
    """

    def __init__(self, timeout_s: float = VOTE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        # A thread of gloo refers to the buffers for a moment after a collective has returned. One
        # that drops the last reference needs the interpreter's lock, and without one, at the
        # interpreter's exit, aborts the process: so buffers are kept until the threads are joined.
        self._buffers: dict[int, list[torch.Tensor]] = {}
        self._groups = [group]
        self.close = weakref.finalize(self, _leave, self._groups, self._buffers)

    def __call__(self, own: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of all ranks, in order of rank; all call it together.

        Raises:
            UnreachableError: A rank died, or did not answer within the limit. What the others know
                is unknown then, so this rank must not go on.
        """
        if len(own) not in self._buffers:
            count = self._groups[0].size() + 1
            self._buffers[len(own)] = [
                torch.zeros(len(own), dtype=torch.int64) for _ in range(count)
            ]
        sent, *rows = self._buffers[len(own)]
        sent.copy_(torch.tensor(own, dtype=torch.int64))
        try:
            dist.all_gather(rows, sent, group=self._groups[0])
        except RuntimeError as error:
            raise UnreachableError(
                f"a rank is dead, or did not vote within {self._timeout_s:g} s: {error}",
                remedy="restart the job, as after any lost rank",
            ) from error
        return [tuple(row.tolist()) for row in rows]


def _leave(groups: list[Any], buffers: dict[int, list[torch.Tensor]]) -> None:
    """Drop the last reference to the group, which joins its threads, and then the buffers."""
    with contextlib.suppress(ValueError, AssertionError):  # the trainer has destroyed all groups
        dist.destroy_process_group(groups[0])
    groups.clear()
    buffers.clear()
