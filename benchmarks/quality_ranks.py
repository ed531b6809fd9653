"""Ranks of the engine as threads: their steps, votes, moves, checkpoints and restores are real.

Only what connects and what kills is made up: a rank dies between two steps.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor

from pacekeeper.core.config.engine import EngineConfig
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.core.layout.resize.shrink import RecoveryPlan
from pacekeeper.trainer.checkpoint.block_states import blocks_on, read_block
from pacekeeper.trainer.elastic.agreement.quorum import Group
from pacekeeper.trainer.elastic.agreement.recovery_decision import RecoverySources, plan_recovery
from pacekeeper.trainer.elastic.engine_worker import EngineWorker
from pacekeeper.trainer.elastic.launch_spec import RankSpec
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.engine.job import batch_of, engine_options, make_optimizer, prepare_job
from pacekeeper.trainer.groups.checked_payload import exchange_values
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.groups.former import Generation

if TYPE_CHECKING:
    from support.rank_threads import ThreadGroup

T = TypeVar("T")
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _ThreadGeneration:
    """Groups of threads, as a worker has them."""

    groups: EngineGroups

    def abort(self) -> None:
        """Nobody waits between two steps."""


class ThreadWorker(EngineWorker):
    """A worker whose groups are given."""

    def join(self, group: "ThreadGroup") -> None:
        """Be in this group until another is given."""
        groups = EngineGroups(exchange=group, gradients=group, control=group, snapshots=group)
        self._generation = cast(Generation, _ThreadGeneration(groups))


@dataclass(kw_only=True)
class ThreadJob:
    """Ranks on `layout`, of generation 2 at least; every checkpoint is written before the next
    step.
    """

    config: EngineConfig
    layout: Layout
    directory: Path
    run_id: int = 1
    saved_bytes: int = 0  # by all ranks
    ranks: tuple[int, ...] = field(init=False)  # when all live
    workers: dict[int, ThreadWorker] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = self.layout.ranks
        self.workers = {rank: self._born(rank) for rank in self.ranks}
        self.together(lambda worker: worker.resume(), trains=False)
        self._settle(RecoveryPlan(layout=self.layout))

    @property
    def first(self) -> ThreadWorker:
        """The worker of the lowest rank."""
        return self.workers[min(self.workers)]

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.first.step

    def train(self, steps: int) -> None:
        """So many, with the checkpoints that are due on the way."""

        def go_on(worker: ThreadWorker) -> int:
            written = 0
            for _ in range(steps):
                ballot = worker.do_step()
                worker.save(is_storing=ballot.is_storing, is_copying=ballot.is_copying)
                written += sum(news.size_bytes for news in worker.checkpoints.close())
                exchange_values([1.0], worker.generation.groups.control)
            return written

        self.saved_bytes += sum(self.together(go_on).values())

    def die(self, victims: Collection[int]) -> None:
        """The `victims` are gone; the others go on as the leader decides."""
        for rank in victims:
            self.workers.pop(rank).hooks.detach()
        for worker in self.workers.values():
            worker.leave()
        leader = self.first
        chosen = plan_recovery(
            self.layout,
            self.workers,
            generation=self.layout.generation + 1,
            floor=leader.floor(len(self.workers), leader.spec.node_of),
            has_begun=True,
            has_frozen=leader.checkpoints.is_replaying(),
            means=RecoverySources(
                sources=leader.checkpoints.sources,
                is_partial=leader.checkpoints.partial.is_on,
            ),
        )
        self._settle(chosen)

    def join(self, newcomers: Collection[int], new: Layout) -> None:
        """The `newcomers`, which hold nothing that counts, come in; all go over to `new`."""
        witness = self.first
        for rank in newcomers:
            born = self.workers[rank] = self._born(rank)
            born.layout, born.ticket, born.step = witness.layout, witness.ticket, witness.step
            born.last_loss = witness.last_loss
        self._settle(RecoveryPlan(layout=new))

    def launch_again(self) -> None:
        """All are gone; as many begin anew and resume on the same layout."""
        for worker in self.workers.values():
            worker.hooks.detach()
        self.run_id += 1
        self.workers = {rank: self._born(rank) for rank in self.layout.ranks}
        paths = self.first.checkpoints.candidates()
        layout = replace(self.layout, generation=self.layout.generation + 1)
        self._settle(RecoveryPlan(layout=layout, restore=paths))

    def reset(self, blocks: Iterable[Block]) -> None:
        """These blocks are as at the beginning, without optimizer state: as if never saved."""
        lost = frozenset(blocks)
        for rank, worker in self.workers.items():
            held = blocks_on(self.layout, rank)
            fresh = self._fresh_engine(rank)
            first = {block: read_block(fresh.states, block) for block in held if block in lost}
            states = worker.engine.states
            states.load(held, first, states.num_updates)

    def loss(self) -> float:
        """Mean over the targets of the rows that are held out."""

        def look(worker: ThreadWorker) -> float:
            sampler = worker.job.evaluation
            assert sampler is not None, "the job has evaluation_data"
            rows = worker.engine.micro_batches(
                sampler.num_first_places(0), self.config.rows_per_microbatch
            )
            return worker.engine.evaluate(batch_of(self.config, sampler, 0, rows)).item()

        return self.together(look)[min(self.workers)]

    def blocks(self) -> dict[Block, State]:
        """Every block as its lowest holder has it, copied."""
        return {
            block: {n: t.clone() for n, t in read_block(worker.engine.states, block).items()}
            for rank, worker in sorted(self.workers.items(), reverse=True)
            for block in blocks_on(self.layout, rank)
        }

    def digest(self) -> str:
        """Of all state: equal for runs that are the same bit by bit."""
        found = hashlib.sha256()
        for block, state in sorted(self.blocks().items()):
            for name, tensor in state.items():
                found.update(f"{block} {name}".encode())
                found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()

    def together(self, body: Callable[[ThreadWorker], T], *, trains: bool = True) -> dict[int, T]:
        """`body` of all ranks, in a group of their own, in which they train where it `trains`."""
        from support.rank_threads import run_ranks

        def on_thread(group: "ThreadGroup") -> T:
            torch.set_num_threads(1)
            worker = self.workers[group.rank]
            worker.join(group)
            if trains:
                worker.engine.go_back(worker.layout, worker.generation.groups, worker.step)
            return body(worker)

        ranks = tuple(sorted(self.workers))
        return dict(zip(ranks, run_ranks(ranks, on_thread), strict=True))

    def close(self) -> None:
        """The ranks are done."""
        for worker in self.workers.values():
            worker.checkpoints.close()
            worker.hooks.detach()

    def _settle(self, chosen: RecoveryPlan) -> None:
        def settle(worker: ThreadWorker) -> None:
            worker.group = Group.first(chosen.layout.generation, chosen.layout.ranks)
            if chosen.restore and not chosen.only_lost:
                worker.do_restore(chosen.restore, chosen.layout)
            else:
                worker.do_move(chosen.layout, chosen.restore)
            worker.enter(is_regroup=True, moved_bytes=0, took_s=0.0)

        self.together(settle, trains=False)
        self.layout = chosen.layout

    def _born(self, rank: int) -> ThreadWorker:
        spec = RankSpec(
            config=self.config,
            rank=rank,
            world_size=len(self.ranks),
            node_of={other: other for other in self.ranks},
            stores=(),
            ring_dir=str(self.directory / "rings"),
            run_dir=str(self.directory / "run"),
            run_id=self.run_id,
            first_run_id=1,
        )
        worker = ThreadWorker(spec=spec)
        worker.attach()
        return worker

    def _fresh_engine(self, rank: int) -> Engine:
        job = prepare_job(self.config, self.layout.ranks)
        options = engine_options(self.config, job, torch.device("cpu"))
        engine = Engine(job.skeleton, job.source, layout=self.layout, rank=rank, options=options)
        engine.add_optimizer(make_optimizer(self.config, engine))
        return engine
