"""Plans that nobody would make, by a seed: each kind of move, and several at once. Pure."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pacekeeper.core.layout.layout import ExpertReplica, Layout, ShardRun
from support.layouts import groups_of, pipelines_of

Members = tuple[int, ...]
ExpertHosts = tuple[tuple[ExpertReplica, ...], ...]  # of a layer


class Move(StrEnum):
    """What a plan changes."""

    EXPERTS = "other hosts of experts"
    ROWS = "other batch shares"
    SHARDS = "other runs of shards"
    LAYERS = "other layers in stages"
    STANDING_BY = "a rank stands by, or who did comes back"


@dataclass(kw_only=True)
class _Draft:
    """A layout while it is changed: members of each group, [stage][pipeline]."""

    draw: random.Random
    before: Layout
    cuts: list[int]
    groups: list[list[Members]]
    runs: dict[Members, tuple[ShardRun, ...]]
    rows: list[float]
    standing_by: list[int]
    has_other_experts: bool = False

    @classmethod
    def of(cls, layout: Layout, draw: random.Random) -> "_Draft":
        runs = groups_of(layout)
        groups = [[tuple(r.rank for r in g) for g in stage] for stage in runs]
        every = [group for stage in runs for group in stage]
        return cls(
            draw=draw,
            before=layout,
            cuts=[span.start for span in layout.spans[1:]],
            groups=groups,
            runs={tuple(run.rank for run in group): group for group in every},
            rows=[share for _, share in layout.batch_shares],
            standing_by=list(layout.standing_by),
        )

    def other_experts(self) -> None:
        self.has_other_experts = True

    def other_rows(self) -> None:
        self.rows = [self.draw.uniform(0.5, 1.5) for _ in self.rows]

    def other_shards(self) -> None:
        """Runs cut anew in every group; nobody's is empty."""
        for members in (m for stage in self.groups for m in stage):
            self.runs[members] = self._cut(members)

    def other_layers(self) -> None:
        """Every stage keeps one at least."""
        others = range(1, self.before.num_layers)
        self.cuts = sorted(self.draw.sample(others, len(self.groups) - 1))

    def other_ranks(self) -> None:
        """One that may go: its group has others. Else one that comes back to where it can."""
        able = [
            (s, p, rank)
            for s, stage in enumerate(self.groups)
            for p, members in enumerate(stage)
            for rank in members
            if len(members) > 1
        ]
        if self.standing_by and (not able or self.draw.random() < 0.6):
            rank = self.standing_by.pop(self.draw.randrange(len(self.standing_by)))
            s = self.draw.randrange(len(self.groups))
            p = self.draw.randrange(len(self.groups[s]))
            self.groups[s][p] += (rank,)
        elif able:
            s, p, rank = self.draw.choice(able)
            self.groups[s][p] = tuple(r for r in self.groups[s][p] if r != rank)
            self.standing_by.append(rank)

    def layout(self, replicas: int, generation: int) -> Layout:
        """Hosts that no longer run a layer are drawn anew; pipelines go by their first ranks."""
        order = sorted(range(len(self.rows)), key=lambda p: self.groups[0][p][0])
        firsts, ends = [0, *self.cuts], [*self.cuts, self.before.num_layers]
        stages = [
            (first, end, [self._runs_of(stage[p]) for p in order])
            for stage, first, end in zip(self.groups, firsts, ends, strict=True)
        ]
        whole = sum(self.rows)
        return replace(
            self.before,
            generation=generation,
            pipelines=pipelines_of(stages, [self.rows[p] / whole for p in order]),
            experts=tuple(
                self._hosts(layer, sorted(run.rank for group in groups for run in group), replicas)
                for first, end, groups in stages
                for layer in range(first, end)
            ),
            speeds=(),
            standing_by=tuple(sorted(self.standing_by)),
        )

    def _runs_of(self, members: Members) -> tuple[ShardRun, ...]:
        return self.runs.get(members) or self._cut(members)

    def _cut(self, members: Members) -> tuple[ShardRun, ...]:
        most = self.before.num_attention_shards
        cuts = sorted(self.draw.sample(range(1, most), len(members) - 1))
        return tuple(map(ShardRun, members, [0, *cuts], [*cuts, most]))

    def _hosts(self, layer: int, ranks: Sequence[int], replicas: int) -> ExpertHosts:
        number = min(replicas, len(ranks))

        def drawn() -> tuple[ExpertReplica, ...]:
            on = sorted(self.draw.sample(ranks, number))
            return tuple(ExpertReplica(rank, 1.0 / number) for rank in on)

        return tuple(
            drawn() if self.has_other_experts or {h.rank for h in on} - set(ranks) else on
            for on in self.before.experts[layer]
        )


def random_plan(
    layout: Layout, replicas: int, seed: str, moves: Collection[Move] = (Move.EXPERTS, Move.ROWS)
) -> Layout:
    """The next generation with these moves, on the same ranks."""
    draft = _Draft.of(layout, random.Random(seed))
    steps: Mapping[Move, Callable[[], None]] = {
        Move.STANDING_BY: draft.other_ranks,  # first: it makes the groups
        Move.EXPERTS: draft.other_experts,
        Move.ROWS: draft.other_rows,
        Move.SHARDS: draft.other_shards,
        Move.LAYERS: draft.other_layers,
    }
    for move, change in steps.items():
        if move in moves:
            change()
    return draft.layout(replicas, layout.generation + 1)
