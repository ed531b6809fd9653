"""The way of a micro-batch's token rows from one stage to the next or the one before.

A data-parallel coordinate has a tensor group in each stage; their sizes and runs may differ. Token
ranges are re-cut on the way: a slice goes to whoever's slices overlap it (ADR 37).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pacekeeper.core.layout.layout import Layout, ShardRun
from pacekeeper.trainer.distributed.collectives import Collectives, Posted
from pacekeeper.trainer.toy.parallel.tensor_parallel import token_slices

Runs = Sequence[ShardRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExchange:
    """One direction between the groups `givers` and `takers`; a fabric of its own for all of them.

    Both sides post micro-batches in the same order.
    """

    fabric: Collectives
    givers: Runs
    takers: Runs

    @classmethod
    def between(cls, givers: Runs, takers: Runs, fabric: Collectives, name: str) -> "StageExchange":
        """All ranks of both groups ask alike. Raises PeerLost."""
        ranks = tuple(sorted(run.rank for run in (*givers, *takers)))
        return cls(fabric=fabric.group(ranks, name), givers=givers, takers=takers)

    def give(self, rows_SD: Tensor, num_tokens: int) -> Posted:
        """Begin to send this rank's slice of `num_tokens`. Raises PeerLost."""
        sent = self._shared(self.givers, self.takers, num_tokens)
        nothing = rows_SD.new_empty((0, *rows_SD.shape[1:]))
        return self.fabric.post(nothing, rows_SD.contiguous(), [0] * len(sent), sent)

    def take(self, rows_SD: Tensor, num_tokens: int) -> Posted:
        """Begin to fill `rows_SD` with this rank's slice of `num_tokens`. Raises PeerLost."""
        expected = self._shared(self.takers, self.givers, num_tokens)
        nothing = rows_SD.new_empty((0, *rows_SD.shape[1:]))
        return self.fabric.post(rows_SD, nothing, expected, [0] * len(expected))

    def _shared(self, own: Runs, other: Runs, num_tokens: int) -> list[int]:
        """Tokens of this rank's slice that are each member's, too, on the other side."""
        first, end = token_slices(own, num_tokens)[self.fabric.rank]
        there = token_slices(other, num_tokens)
        cuts = [there.get(rank, (0, 0)) for rank in self.fabric.ranks]
        return [max(0, min(end, its_end) - max(first, its_first)) for its_first, its_end in cuts]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageP2P:
    """What this rank's stage gives to and takes from its neighbours; None at the ends."""

    forward_in: StageExchange | None = None
    backward_out: StageExchange | None = None
    forward_out: StageExchange | None = None
    backward_in: StageExchange | None = None

    @classmethod
    def of(cls, layout: Layout, fabric: Collectives) -> "StageP2P":
        """Those of `fabric.rank`; all ranks of the job ask alike, and for stages in order, so that
        none waits for one that waits for it. Raises PeerLost.
        """
        number, pipeline = layout.place_of(fabric.rank)
        groups = [stage.attention for stage in layout.pipelines[pipeline].stages]
        ways: dict[str, StageExchange] = {}
        for lower in (number - 1, number):
            if 0 <= lower < len(groups) - 1:
                below, above = groups[lower], groups[lower + 1]
                side = "in" if lower < number else "out"
                back = "out" if lower < number else "in"
                ways[f"forward_{side}"] = StageExchange.between(below, above, fabric, "forward")
                ways[f"backward_{back}"] = StageExchange.between(above, below, fabric, "backward")
        return cls(**ways)
