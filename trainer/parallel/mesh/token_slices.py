"""Slices of a micro-batch's tokens: one for each rank of a tensor group, re-cut between stages.

Between layers a rank has the rows of its slice only (sequence parallelism), so that nothing is
computed twice and the gradient of any parameter is a partial sum on each of its holders.
"""

from dataclasses import dataclass
from itertools import pairwise

from pacekeeper.core.layout.apportion import apportion
from pacekeeper.core.layout.layout import BlockKind, Layout, Stage
from pacekeeper.trainer.groups.group import Group
from pacekeeper.trainer.parallel.mesh.subgroup import subgroup


def token_slices(stage: Stage, num_tokens: int) -> dict[int, range]:
    """Return the tokens of each rank of a stage, in proportion to its runs of shards."""
    num_attention, num_mlp = stage.attention[-1].end, stage.mlp[-1].end
    weights = [
        (a.end - a.first) / num_attention + (m.end - m.first) / num_mlp
        for a, m in zip(stage.attention, stage.mlp, strict=True)
    ]
    ends = [0]
    for count in apportion(num_tokens, weights):
        ends.append(ends[-1] + count)
    slices = (range(first, end) for first, end in pairwise(ends))
    return dict(zip(stage.group, slices, strict=True))


def crossing(own: range, there: dict[int, range]) -> dict[int, range]:
    """Return which of a rank's tokens each rank of a neighbouring stage has, too, from its first.

    Args:
        own: Tokens of the rank.
        there: Tokens of each rank of the other stage.
    """
    shared = {
        rank: range(max(own.start, cut.start), min(own.stop, cut.stop))
        for rank, cut in there.items()
    }
    return {r: range(s.start - own.start, s.stop - own.start) for r, s in shared.items() if s}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeshPlace:
    """Where a rank stands in a layout: its stage, its neighbours, its tensor group.

    Attributes:
        rank: The rank.
        stage: Its stage.
        number: Of the stage, in its pipeline.
        num_stages: Of the pipeline.
        before: The stage before; None for the first.
        after: The stage after; None for the last.
        tensor: Ranks that compute attention and dense MLPs of the same tokens.
        experts: Ranks that share the experts of the stage's layers.
        largest_group: Ranks of the largest tensor group of the pipeline.
    """

    rank: int
    stage: Stage
    number: int
    num_stages: int
    before: Stage | None
    after: Stage | None
    tensor: Group
    experts: Group
    largest_group: int

    @classmethod
    def of(cls, layout: Layout, exchange: Group) -> "MeshPlace | None":
        """Return the place of `exchange.rank`; None where it stands by.

        Args:
            layout: Stages of equal cuts where it has experts.
            exchange: All ranks of the layout.
        """
        rank = exchange.rank
        if rank not in layout.places:
            return None
        number, at = layout.places[rank]
        stages = layout.pipelines[at].stages
        stage = stages[number]
        return cls(
            rank=rank,
            stage=stage,
            number=number,
            num_stages=len(stages),
            before=stages[number - 1] if number else None,
            after=stages[number + 1] if number + 1 < len(stages) else None,
            tensor=subgroup(exchange, stage.group),
            experts=subgroup(exchange, layout.ranks_of_layer(stage.first_layer)),
            largest_group=max(len(one.group) for one in stages),
        )

    @property
    def is_first(self) -> bool:
        """Whether its stage begins with the embedding."""
        return self.before is None

    @property
    def is_last(self) -> bool:
        """Whether its stage ends with the head."""
        return self.after is None

    @property
    def is_cut(self) -> bool:
        """Whether several ranks share the tokens of the pipeline's micro-batches."""
        return len(self.stage.group) > 1

    @property
    def idle(self) -> frozenset[BlockKind]:
        """Kinds of shards of which this rank has none."""
        kinds = (BlockKind.ATTENTION, BlockKind.DENSE_MLP)
        return frozenset(kind for kind in kinds if not self.share(kind))

    def share(self, kind: BlockKind) -> float:
        """Return the part of a kind of shards that this rank has."""
        runs = self.stage.runs(kind)
        (own,) = (run for run in runs if run.rank == self.rank)
        return (own.end - own.first) / runs[-1].end

    def tokens(self, num_tokens: int) -> range:
        """Return the slice of this rank of a micro-batch with so many tokens."""
        return token_slices(self.stage, num_tokens)[self.rank]
