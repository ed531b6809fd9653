"""What the next checkpoint holds: all of it, or all but some experts, alike on all ranks. Pure.

Ranks may know different things: one came late, one's disk refused. So each says a few numbers in
the vote before a checkpoint, and what all heard decides: a partial one is written only on top of
one that all know to be complete. How many experts are saved, and the need of each, are the greatest
that any rank says: who came late, or does not run a layer, knows of less. Before all needs come
experts that only suspect ranks hold.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pacekeeper.core.checkpoint.manifest import (
    CheckpointId,
    Manifest,
    Piece,
    PieceEntry,
    TokenLedgerState,
    checkpoint_of_file,
)
from pacekeeper.core.checkpoint.partial_experts import (
    ExpertOrder,
    expected_faults,
    loss_bound,
    loss_probability,
    lost_token_ratio,
    next_num_saved,
    save_priority,
    select_experts,
    suspect_priority,
)
from pacekeeper.core.config.job import JobConfig
from pacekeeper.core.layout.layout import Block, BlockKind, Layout
from pacekeeper.trainer.checkpoint.block_reader import Lost
from pacekeeper.trainer.checkpoint.block_states import BlockState


class ExpertTokenLedger:
    """One rank's. `routed`, `saved`: tokens of each expert, [layer][expert], up to now and when it
    was saved last; `lost`: by layer, in `num_faults` restores.

    Args:
        num_experts: Of each layer.
        num_steps: Of the whole run.
    """

    def __init__(self, num_experts: Sequence[int], num_steps: int) -> None:
        self._num_steps = num_steps
        self.routed = [[0] * count for count in num_experts]
        self.saved = [list(counts) for counts in self.routed]
        self.lost = [0] * len(self.routed)
        self.num_faults = 0

    @property
    def account(self) -> TokenLedgerState:
        """Of all tokens so far."""
        routed = tuple(map(tuple, self.routed))
        return TokenLedgerState(routed=routed, lost=tuple(self.lost), num_faults=self.num_faults)

    def count(self, routed: Mapping[int, Sequence[int]]) -> None:
        """A step was committed; its tokens routed to each expert, by layer."""
        for layer, counts in routed.items():
            for expert, tokens in enumerate(counts):
                self.routed[layer][expert] += tokens

    def encode(self) -> list[float]:
        """All of it, in as many numbers on every rank."""
        tables = (counts for table in (self.routed, self.saved) for counts in table)
        return [*(n for counts in tables for n in counts), *self.lost, self.num_faults]

    def merge(self, all_told: Sequence[Sequence[float]]) -> None:
        """What all ranks said, this one among them."""
        most = iter([int(max(column)) for column in zip(*all_told, strict=True)])
        for table in (self.routed, self.saved):
            for counts in table:
                counts[:] = [next(most) for _ in counts]
        self.lost = [next(most) for _ in self.lost]
        self.num_faults = next(most)

    def begin_anew(
        self, account: TokenLedgerState, losses: Sequence[int], *, is_fault: bool
    ) -> None:
        """The state is now what a checkpoint holds: its account, and by layer what going back to it
        lost.
        """
        blank = [[0] * len(counts) for counts in self.routed]
        self.routed = [list(counts) for counts in account.routed] or blank
        before = account.lost or (0,) * len(self.routed)
        more = losses or (0,) * len(self.routed)
        self.lost = [a + b for a, b in zip(before, more, strict=True)]
        self.num_faults = account.num_faults + is_fault
        self.forget_saves()

    def fall_back(self, tokens: Mapping[Block, int]) -> int:
        """These experts alone are as they were when they had seen so many tokens; what they lost.

        What a copy had seen in another course of the run was seen again in this one.
        """
        before = sum(self.lost)
        for block, seen in tokens.items():
            self.lost[block.layer] += max(0, self.routed[block.layer][block.index] - seen)
        self.num_faults += 1
        self.forget_saves()
        return sum(self.lost) - before

    def forget_saves(self) -> None:
        """As if everything had just been saved: nothing is known to be older."""
        self.saved = [list(counts) for counts in self.routed]

    def unsaved(self) -> list[list[int]]:
        """Of each expert, [layer][expert]: tokens since it was saved."""
        return [
            [now - then for now, then in zip(counts, saved, strict=True)]
            for counts, saved in zip(self.routed, self.saved, strict=True)
        ]

    def plt_of_run(self, step: int) -> float:
        """The share of lost tokens in all that the whole run will have routed, as far as it went
        on as before `step`.
        """
        whole = max(1.0, self._num_steps / max(1, step))
        return lost_token_ratio(self.lost, [whole * sum(counts) for counts in self.routed])


def account_numbers(account: TokenLedgerState, layout: Layout) -> list[float]:
    """An account as numbers, as many for all accounts of one model; see `account_of`."""
    routed = account.routed or [[0] * len(on) for on in layout.experts]
    lost = account.lost or [0] * layout.num_layers
    return [*(float(n) for counts in routed for n in counts), *lost, account.num_faults]


def account_of(numbers: Sequence[float], layout: Layout) -> TokenLedgerState:
    """The account that these numbers say."""
    rest = iter(map(int, numbers))
    return TokenLedgerState(
        routed=tuple(tuple(next(rest) for _ in on) for on in layout.experts),
        lost=tuple(next(rest) for _ in layout.experts),
        num_faults=next(rest),
    )


# How likely a rank is lost until the next save: only the ratios matter. One that the layout takes
# for slow was found so, as one that is suspect: half of what fails is slow before.
HEALTHY, SUSPECT, EVERYBODY = 0.01, 0.5, 0.001
_NOBODY = CheckpointId(run_id=0, generation=0, step=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialVote:
    """What a rank says before a checkpoint that may leave experts out.

    Attributes:
        is_sure: All of the one before it was written.
        run_id: Of the one before it, with generation and step.
        generation: See `run_id`.
        step: See `run_id`.
        num_saved: Experts of a layer that a checkpoint has.
        needs: How much each expert needs to be saved, layer by layer.
    """

    is_sure: bool
    run_id: int
    generation: int
    step: int
    num_saved: int
    needs: tuple[float, ...]

    @property
    def base(self) -> CheckpointId | None:
        """The checkpoint before it, if that is whole."""
        if not self.is_sure:
            return None
        return CheckpointId(run_id=self.run_id, generation=self.generation, step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a checkpoint writes: these pieces on top of `base`; all pieces where that is None."""

    base: CheckpointId | None
    pieces: frozenset[Piece]


class PartialSaves:
    """One rank's. Counts tokens with full checkpoints, too: those of a later run may be partial."""

    def __init__(self, config: JobConfig, num_experts: Sequence[int]) -> None:
        self._config = config
        self._num_experts = max(num_experts, default=0)
        self.num_saved = config.experts_per_checkpoint
        self.books = ExpertTokenLedger(num_experts, config.steps)
        self._begun: CheckpointId | None = None
        self._writers: frozenset[int] = frozenset()
        self._votes: Sequence[PartialVote] = ()
        self._suspects: frozenset[int] = frozenset()
        self._forget_saves()

    @property
    def is_on(self) -> bool:
        """May a checkpoint leave experts out?"""
        return 0 < self._config.experts_per_checkpoint < self._num_experts

    @property
    def account(self) -> TokenLedgerState:
        """Of all tokens so far, as far as this rank knows."""
        return self.books.account

    def count(self, routed: Mapping[int, Sequence[int]]) -> None:
        """A step was committed; its tokens routed to each expert, by layer."""
        self.books.count(routed)

    def plt_of_run(self, step: int) -> float:
        """The share of the whole run's tokens that is lost; see `ExpertTokenLedger`."""
        return self.books.plt_of_run(step)

    def own_vote(
        self, layout: Layout, *, has_failed: bool, suspects: Collection[int] = frozenset()
    ) -> PartialVote:
        """What this rank says before a checkpoint; `has_failed`: its part of the one before was not
        written; `suspects`: ranks on nodes with a finding.
        """
        self._suspects = frozenset(suspects)
        begun = self._begun or _NOBODY
        is_sure = self._begun is not None and not has_failed and self._writers <= set(layout.ranks)
        return PartialVote(
            is_sure=is_sure,
            run_id=begun.run_id,
            generation=begun.generation,
            step=begun.step,
            num_saved=self.num_saved,
            needs=tuple(x for layer in self._needs(layout) for x in layer),
        )

    def receive_votes(self, votes: Sequence[PartialVote]) -> None:
        """Everybody's, the first rank's first; they hold for the next checkpoint only."""
        self._votes = votes

    def choose(self, layout: Layout, number: int, pieces: Collection[Piece]) -> Choice:
        """What checkpoint `number` writes of all these pieces. The same on all ranks."""
        votes, self._votes = self._votes, ()
        bases = {vote.base for vote in votes}
        if len(bases) != 1 or (base := bases.pop()) is None:
            return Choice(base=None, pieces=frozenset(pieces))
        self.num_saved = max(vote.num_saved for vote in votes)  # who came late knows of no loss
        greatest = map(max, zip(*(vote.needs for vote in votes), strict=True))
        needs = [[next(greatest) for _ in on] for on in layout.experts]
        chosen = select_experts(needs, self.num_saved, number)
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

    def on_memory_restore(self, found: "MemoryRestore") -> None:
        """The state is now that of a snapshot: what its older experts lack is lost."""
        self.books.begin_anew(found.account, found.lost_tokens, is_fault=bool(found.older))
        self._forget_saves()
        self._adapt(found.step)

    def on_partial_restore(self, tokens: Mapping[Block, int], step: int) -> int:
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
                num_experts=self._num_experts,
                plt_so_far=self.plt_of_run(step),
                limit=config.lost_tokens_limit,
                num_faults=expected_faults(self.books.num_faults, step, config.steps),
                total_steps=config.steps,
                period_steps=config.checkpoint_period_steps,
            )

    def _forget_saves(self) -> None:
        """Nothing is known to be saved as it is: the next checkpoint holds everything."""
        self._begun, self._writers, self._votes = None, frozenset(), ()
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
        num_saved = self.num_saved if self.is_on else self._num_experts
        saves = max(1.0, step / max(1, self._config.checkpoint_period_steps))
        weights = [
            [risk * routed / saves for risk, routed in zip(risks, counts, strict=True)]
            for risks, counts in zip(self._risks(layout), self.books.routed, strict=True)
        ]
        return loss_bound(weights, num_saved)

    def _needs(self, layout: Layout) -> list[list[float]]:
        """By layer and expert: how urgent it is to save it."""
        return [
            [
                suspect_priority([host.rank for host in on], self._suspects)
                + self._need(risk, unsaved, age)
                for on, risk, unsaved, age in zip(hosts, risks, tokens, ages, strict=True)
            ]
            for hosts, risks, tokens, ages in zip(
                layout.experts, self._risks(layout), self.books.unsaved(), self._age, strict=True
            )
        ]

    def _need(self, risk: float, unsaved: int, age: int) -> float:
        match self._config.expert_order:
            case ExpertOrder.TURN:
                return 0.0
            case ExpertOrder.LOAD:
                return float(unsaved)
            case _:
                return save_priority(risk, unsaved, age)

    def _risks(self, layout: Layout) -> list[list[float]]:
        """By layer and expert: how likely all its copies are lost before the next checkpoint."""
        chance = {
            rank: SUSPECT if speed < 1.0 or rank in self._suspects else HEALTHY
            for rank, speed in layout.speed_by_rank.items()
        }
        return [
            [loss_probability([h.rank for h in on], chance, all_at_once=EVERYBODY) for on in hosts]
            for hosts in layout.experts
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRestore:
    """What this rank needs of snapshot `id` for `layout`, not in force.

    `older`: experts that are of the snapshots of earlier steps; `lost_tokens`: by layer, of these.
    """

    id: CheckpointId
    num_updates: int
    last_loss: float | None
    account: TokenLedgerState
    layout: Layout
    state: Mapping[Block, BlockState]
    older: Mapping[Block, int]
    lost_tokens: tuple[int, ...]

    @property
    def step(self) -> int:
        """Steps committed when it comes in force."""
        return self.id.step

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.state.values() for t in tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRestore:
    """What this rank is to hold of blocks that nobody holds any more, not in force.

    `steps`: of which step each of these blocks is, wherever it goes; `seen`: tokens it had then.
    """

    layout: Layout
    lost: Lost
    state: Mapping[Block, BlockState]
    steps: Mapping[Block, int]
    seen: Mapping[Block, int]

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for tensors in self.state.values() for t in tensors.values())

    def with_newer(
        self,
        *,
        state: Mapping[Block, BlockState],
        steps: Mapping[Block, int],
        seen: Mapping[Block, int],
    ) -> "PartialRestore":
        """What was found of these blocks elsewhere takes the place of what was here."""
        return replace(
            self,
            state={**self.state, **state},
            steps={**self.steps, **steps},
            seen={**self.seen, **seen},
        )


def steps_of(entries: Iterable[PieceEntry]) -> dict[Block, int]:
    """The step at which the oldest of these pieces of each block was saved."""
    steps: dict[Block, int] = {}
    for entry in entries:
        of = checkpoint_of_file(entry.file)
        assert of is not None, "a manifest names files of checkpoints only"
        block = entry.piece.block
        steps[block] = min(steps.get(block, of.step), of.step)
    return steps
