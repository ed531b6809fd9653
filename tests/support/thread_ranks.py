"""Real ranks as threads of this process: their steps, moves, checkpoints and restores are the
trainer's own. Only what connects and what kills is made up: a rank dies between two steps.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.shrink import RecoveryPlan, ReplicationFloor
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.distributed.process_group import InterruptibleProcessGroup
from pacekeeper.trainer.elastic.agreement.recovery_decision import RecoverySources, plan_recovery
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.toy.engine.worker import Rank
from pacekeeper.trainer.toy.model.block_state_dict import read_block
from pacekeeper.trainer.toy.model.dataset import Corpus
from support.worlds import ThreadFabric, run_world

T = TypeVar("T")
State = Mapping[str, Tensor]


@dataclass(kw_only=True)
class ThreadRanks:
    """Ranks on `layout`, of generation 2 at least, each on a node of its own or as `node_of` says.
    Checkpoints are written to their end before the next step.
    """

    config: TrainConfig
    layout: Layout
    directory: Path
    node_of: Mapping[int, int] = field(default_factory=dict)
    corpus: Corpus | None = None  # None: as the settings say
    run_id: int = 1
    saved_bytes: int = 0  # by all ranks
    ranks: dict[int, Rank] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = {number: self._born(number) for number in self.layout.ranks}
        self.move(self.layout)

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.ranks[self.layout.ranks[0]].step

    def train(self, steps: int) -> None:
        """So many, with the checkpoints that are due on the way."""

        def go_on(rank: Rank) -> int:
            rank.take_place()
            written = 0
            for _ in range(steps):
                ballot = rank.do_step()
                rank.save(is_storing=ballot.is_storing, is_copying=ballot.is_copying)
                written += sum(news.size_bytes for news in rank.checkpoints.close())
                rank.fabric.exchange([1.0])
            return written

        self.saved_bytes += sum(self.together(go_on).values())

    def move(self, new: Layout) -> None:
        """Go over to `new`, whose ranks are all there."""
        self._settle(RecoveryPlan(layout=new))

    def die(self, victims: Collection[int], *, hosts: int = 1) -> RecoveryPlan:
        """The `victims` are gone; the others go on as the leader decides."""
        for number in victims:
            self.ranks.pop(number).hooks.detach()
        for rank in self.ranks.values():
            rank.leave()
        leader = self.ranks[min(self.ranks)]
        chosen = plan_recovery(
            self.layout,
            self.ranks,
            generation=self.layout.generation + 1,
            floor=ReplicationFloor(replicas=hosts),
            has_begun=True,
            has_frozen=leader.checkpoints.is_replaying(),
            means=RecoverySources(
                sources=leader.checkpoints.sources,
                is_partial=leader.checkpoints.partial.is_on,
            ),
        )
        self._settle(chosen)
        return chosen

    def join(self, newcomers: Collection[int], new: Layout) -> None:
        """The `newcomers`, which hold nothing that counts, come in; all go over to `new`."""
        witness = self.ranks[min(self.ranks)]
        for number in newcomers:
            born = self.ranks[number] = self._born(number)
            born.layout, born.group = witness.layout, witness.group
            born.ticket, born.step = witness.ticket, witness.step
            born.last_loss = witness.last_loss
        self.move(new)

    def launch_again(self) -> None:
        """All are gone; as many begin anew on the same layout and resume."""
        for rank in self.ranks.values():
            rank.hooks.detach()
        self.run_id += 1
        self.ranks = {number: self._born(number) for number in self.layout.ranks}
        paths = self.ranks[min(self.ranks)].checkpoints.candidates()
        layout = replace(self.layout, generation=self.layout.generation + 1)
        self._settle(RecoveryPlan(layout=layout, restore=paths))

    def blocks(self) -> dict[Block, State]:
        """Every block as its lowest holder has it, copied."""
        return {
            block: {
                name: part.clone()
                for name, part in read_block(rank.model, rank.optimizer, block).items()
            }
            for number, rank in sorted(self.ranks.items(), reverse=True)
            for block in blocks_on(self.layout, number)
        }

    def together(self, body: Callable[[Rank], T]) -> dict[int, T]:
        """`body` of all ranks, in a group of their own."""

        def on_thread(fabric: ThreadFabric) -> T:
            torch.set_num_threads(1)
            rank = self.ranks[fabric.rank]
            rank.join(cast(InterruptibleProcessGroup, fabric))
            return body(rank)

        return run_world(tuple(sorted(self.ranks)), on_thread)

    def close(self) -> None:
        """The ranks are done."""
        for rank in self.ranks.values():
            rank.checkpoints.close()
            rank.hooks.detach()

    def _settle(self, chosen: RecoveryPlan) -> None:
        def settle(rank: Rank) -> None:
            if chosen.restore and not chosen.only_lost:
                rank.do_restore(chosen.restore, chosen.layout)
            else:
                rank.do_move(chosen.layout, chosen.restore)
            rank.take_place()
            rank.enter(is_regroup=True, moved_bytes=0, took_s=0.0)

        self.layout = chosen.layout
        self.together(settle)

    def _born(self, number: int) -> Rank:
        spec = RankSpec(
            config=self.config,
            rank=number,
            world_size=len(self.layout.ranks),
            node_of=self.node_of or {other: other for other in {*self.layout.ranks, number}},
            stores=(),
            ring_dir=str(self.directory / "rings"),
            run_dir=str(self.directory / "run"),
            run_id=self.run_id,
            first_run_id=1,
        )
        rank = Rank(spec=spec)
        rank.corpus = self.corpus or rank.corpus
        rank.attach()
        return rank
