"""What the next checkpoint holds: all of it, or all but some experts, alike on all ranks. Pure.

Ranks may know different things: one came late, one's disk refused. So each says a few numbers in
the vote before a checkpoint, and what all heard decides: a partial one is written only on top of
one that all know to be complete. How many experts are saved, and the need of each, are the greatest
that any rank says: who came late, or does not run a layer, knows of less. Before all needs come
experts that only suspect ranks hold.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pacekeeper.core.checkpoint.expert_turns import Order, by_need
from pacekeeper.core.checkpoint.lost_tokens import next_num_saved
from pacekeeper.core.checkpoint.manifest import Account, CheckpointId, Manifest, Piece
from pacekeeper.core.checkpoint.partial_experts import alarm, loss_probability, need, order_bound
from pacekeeper.core.config.controller import TrainConfig
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.policies.token_books import TokenBooks

# How likely a rank is lost until the next save: only the ratios matter. One that the layout takes
# for slow was found so, as one that is suspect: half of what fails is slow before.
HEALTHY, SUSPECT, EVERYBODY = 0.01, 0.5, 0.001
_NOBODY = CheckpointId(life=0, generation=0, step=0)
Words = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a checkpoint writes: these pieces on top of `base`; all pieces where that is None."""

    base: CheckpointId | None
    pieces: frozenset[Piece]


class PartialSaves:
    """One rank's. Counts tokens whether or not checkpoints are partial: a later life's may be."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.num_saved = config.experts_per_checkpoint
        self.books = TokenBooks(config)
        self._begun: CheckpointId | None = None
        self._writers: frozenset[int] = frozenset()
        self._heard: Words = ()
        self._suspects: frozenset[int] = frozenset()
        self._forget_saves()

    @property
    def is_on(self) -> bool:
        """May a checkpoint leave experts out?"""
        return 0 < self._config.experts_per_checkpoint < self._config.num_experts

    @property
    def account(self) -> Account:
        """Of all tokens so far, as far as this rank knows."""
        return self.books.account

    def count(self, routed: Mapping[int, Sequence[int]]) -> None:
        """A step was committed; its tokens routed to each expert, by layer."""
        self.books.count(routed)

    def plt_of_run(self, step: int) -> float:
        """The share of the whole run's tokens that is lost; see `TokenBooks`."""
        return self.books.plt_of_run(step)

    def word(
        self, layout: Layout, *, has_failed: bool, suspects: Collection[int] = frozenset()
    ) -> list[float]:
        """What this rank says before a checkpoint, as long as everybody's; `has_failed`: its part
        of the one before was not written; `suspects`: ranks on nodes with a finding.
        """
        self._suspects = frozenset(suspects)
        if not self.is_on:
            return []
        begun = self._begun or _NOBODY
        is_sure = self._begun is not None and not has_failed and self._writers <= set(layout.ranks)
        flat = [x for layer in self._needs(layout) for x in layer]
        return [is_sure, begun.life, begun.generation, begun.step, self.num_saved, *flat]

    def hear(self, words: Words) -> None:
        """Everybody's, the first rank's first; they hold for the next checkpoint only."""
        self._heard = words

    def choose(self, layout: Layout, number: int, pieces: Collection[Piece]) -> Choice:
        """What checkpoint `number` writes of all these pieces. The same on all ranks."""
        words, self._heard = self._heard, ()
        same = {tuple(word[:4]) for word in words}
        if len(same) != 1 or not (first := words[0])[0]:
            return Choice(base=None, pieces=frozenset(pieces))
        base = CheckpointId(life=int(first[1]), generation=int(first[2]), step=int(first[3]))
        self.num_saved = max(int(word[4]) for word in words)  # who came late knows of no loss
        greatest = iter([max(column) for column in zip(*words, strict=True)][5:])
        needs = [[next(greatest) for _ in on] for on in layout.experts]
        chosen = by_need(needs, self.num_saved, number)
        return Choice(base=base, pieces=frozenset(p for p in pieces if self._is_written(p, chosen)))

    def begun(self, one: CheckpointId, writers: frozenset[int], pieces: Collection[Piece]) -> None:
        """A checkpoint that writes these pieces was begun."""
        self._begun, self._writers = one, writers
        written = {piece.block for piece in pieces if self._is_left_out(piece)}
        for layer, counts in enumerate(self.books.routed):
            for expert, tokens in enumerate(counts):
                if Block(BlockKind.EXPERT, layer, expert) in written:
                    self.books.saved[layer][expert], self._age[layer][expert] = tokens, 1
                else:
                    self._age[layer][expert] += 1

    def restored(self, manifest: Manifest) -> None:
        """The state is now what this checkpoint holds: what its older experts lack is lost."""
        is_fault = bool(manifest.older)
        self.books.begin_anew(manifest.account, manifest.lost_tokens, is_fault=is_fault)
        self._forget_saves()
        self._adapt(manifest.id.step)

    def remembered(self, account: Account, step: int) -> None:
        """The state is now that of a snapshot at `step`, which lacks nothing."""
        self.books.begin_anew(account, (), is_fault=False)
        self._forget_saves()
        self._adapt(step)

    def refilled(self, tokens: Mapping[Block, int], step: int) -> int:
        """At `step` these experts alone went back to copies that had seen so many tokens; how many
        are lost.
        """
        num_lost = self.books.fall_back(tokens)
        self._forget_saves()
        self._adapt(step)
        return num_lost

    def _adapt(self, step: int) -> None:
        """Dynamic-K, after a loss."""
        config = self._config
        if self.is_on and config.lost_tokens_limit and step:
            self.num_saved = next_num_saved(
                num_saved=config.experts_per_checkpoint,
                num_experts=config.num_experts,
                plt_so_far=self.plt_of_run(step),
                limit=config.lost_tokens_limit,
                num_faults=self.books.num_faults,
                step=step,
                total_steps=config.steps,
                period_steps=config.checkpoint_period_steps,
            )

    def _forget_saves(self) -> None:
        """Nothing is known to be saved as it is: the next checkpoint holds everything."""
        self._begun, self._writers, self._heard = None, frozenset(), ()
        self.books.forget_saves()
        self._age = [[1] * len(counts) for counts in self.books.routed]

    def _is_left_out(self, piece: Piece) -> bool:
        """Is it of those that need not be in every checkpoint?"""
        if piece.block.kind is not BlockKind.EXPERT:
            return False
        match self._config.partial_state:
            case "weights":
                return not piece.kind
            case "moments":
                return bool(piece.kind)
            case _:
                return True

    def _is_written(self, piece: Piece, chosen: Collection[Block]) -> bool:
        return piece.block in chosen or not self._is_left_out(piece)

    def order_bound(self, layout: Layout, step: int) -> tuple[float, float]:
        """Of the tokens that each expert had per checkpoint up to `step`: the least that any order
        is likely to lose per checkpoint, and how many times that taking turns does. Where nothing
        is left out: nothing, and once.
        """
        num_saved = self.num_saved if self.is_on else self._config.num_experts
        saves = max(1.0, step / max(1, self._config.checkpoint_period_steps))
        weights = [
            [risk * routed / saves for risk, routed in zip(risks, counts, strict=True)]
            for risks, counts in zip(self._risks(layout), self.books.routed, strict=True)
        ]
        return order_bound(weights, num_saved)

    def _needs(self, layout: Layout) -> list[list[float]]:
        """By layer and expert: how urgent it is to save it."""
        return [
            [
                alarm([host.rank for host in on], self._suspects) + self._need(risk, unsaved, age)
                for on, risk, unsaved, age in zip(hosts, risks, tokens, ages, strict=True)
            ]
            for hosts, risks, tokens, ages in zip(
                layout.experts, self._risks(layout), self.books.unsaved(), self._age, strict=True
            )
        ]

    def _need(self, risk: float, unsaved: int, age: int) -> float:
        match self._config.expert_order:
            case Order.TURN:
                return 0.0
            case Order.LOAD:
                return float(unsaved)
            case _:
                return need(risk, unsaved, age)

    def _risks(self, layout: Layout) -> list[list[float]]:
        """By layer and expert: how likely all its copies are lost before the next checkpoint."""
        chance = {
            rank: SUSPECT if speed < 1.0 or rank in self._suspects else HEALTHY
            for rank, speed in layout.speed_by_rank.items()
        }
        return [
            [loss_probability([h.rank for h in on], chance, everybody=EVERYBODY) for on in hosts]
            for hosts in layout.experts
        ]
