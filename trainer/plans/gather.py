"""How the ranks of a foreign trainer exchange votes: a few numbers, through host memory."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pacekeeper.core.errors import UnreachableError

VOTE_TIMEOUT_S = 60.0


class CpuGather:
    """Gathers a few whole numbers from all ranks through host memory, with a time limit.

    It has a gloo group of its own: collectives of the trainer are neither delayed nor reordered.
    Create it on all ranks together, after `init_process_group`.
    """

    def __init__(self, timeout_s: float = VOTE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        # Kept, so that gloo's threads never drop the last reference: they would need the
        # interpreter's lock for it, and at its end there is none.
        self._buffers: dict[int, list[torch.Tensor]] = {}

    def __call__(self, own: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the numbers of all ranks, in order of rank; all call it together.

        Raises:
            UnreachableError: A rank died, or did not answer within the limit. What the others know
                is unknown then, so this rank must not go on.
        """
        if len(own) not in self._buffers:
            count = self._group.size() + 1
            self._buffers[len(own)] = [
                torch.zeros(len(own), dtype=torch.int64) for _ in range(count)
            ]
        sent, *rows = self._buffers[len(own)]
        sent.copy_(torch.tensor(own, dtype=torch.int64))
        try:
            dist.all_gather(rows, sent, group=self._group)
        except RuntimeError as error:
            raise UnreachableError(
                f"a rank is dead, or did not vote within {self._timeout_s:g} s: {error}",
                remedy="restart the job, as after any lost rank",
            ) from error
        return [tuple(row.tolist()) for row in rows]
