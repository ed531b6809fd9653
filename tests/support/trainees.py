"""Ranks that train, save and go back as processes do, but as threads: no stores, no rings."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.layout import Block, Layout
from pacekeeper.trainer.checkpoint.block_states import blocks_on
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.distributed.collectives import Collectives
from pacekeeper.trainer.toy.engine.job_rules import learning_rate
from pacekeeper.trainer.toy.model.block_state_dict import (
    ModelStates,
    ordered_parameters,
    read_block,
)
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.transformer import MoETransformer
from pacekeeper.trainer.toy.parallel.grad_reduce import ReplicaSync
from support.training import forward_backward
from support.worlds import ThreadFabric, run_world

State = dict[Block, dict[str, Tensor]]


class Trainee:
    """One rank of a job's run, at step 0 or where the job left off."""

    def __init__(
        self, fabric: Collectives, config: TrainConfig, layout: Layout, *, run_id: int = 1
    ) -> None:
        torch.set_num_threads(1)
        self.config, self.layout, self.fabric = config, layout, fabric
        self.corpus = Corpus.from_stdlib(config)
        self.model = MoETransformer(config, layout, fabric.rank)
        self.optimizer = torch.optim.AdamW(
            ordered_parameters(self.model),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        self.checkpoints = Checkpoints(
            config,
            rank=fabric.rank,
            run_id=run_id,
            first_run_id=1,
            identity=run_fingerprint(config, self.corpus.crc()),
            states=ModelStates(self.model, self.optimizer),
        )
        self.step = 0
        paths = self.checkpoints.agree_on_start(fabric)
        if paths:
            found = self.checkpoints.stage(paths, layout, fabric)
            self.checkpoints.apply(found)
            self.step = found.step
        self.began = self.step
        self.model.set_layout(layout, fabric)
        self.sync = ReplicaSync(layout, fabric)

    def train(self, until: int, *, waits: bool = True) -> None:
        """Up to `until` steps; `waits` for storage after each, or goes on beside it."""
        while self.step < until:
            self.optimizer.zero_grad()
            forward_backward(self.model, self.corpus, self.layout, self.fabric, self.step)
            self.sync.synchronise(self.model)
            word = self.checkpoints.encode_vote(self.step + 1, self.layout)
            votes = self.fabric.exchange([self.checkpoints.is_storing, *word]).tolist()
            self.checkpoints.receive_votes([vote[1:] for vote in votes])
            self.optimizer.param_groups[0]["lr"] = learning_rate(self.config, self.step)
            self.optimizer.step()
            self.step += 1
            self.checkpoints.step_is_over(self.step)
            at = Position(layout=self.layout, step=self.step, ticket=self.step, last_loss=1.0)
            self.checkpoints.save_if_due(at, is_storing=any(vote[0] for vote in votes))
            if waits:
                self.checkpoints.close()
                self.fabric.exchange([1.0])  # or another would see it being written
        self.checkpoints.close()

    def state(self) -> State:
        """All that training goes on from."""
        return {
            block: {
                name: tensor.clone()
                for name, tensor in read_block(self.model, self.optimizer, block).items()
            }
            for block in blocks_on(self.layout, self.fabric.rank)
        }


def trained(
    config: TrainConfig,
    layout: Layout,
    until: int,
    *,
    directory: Path | None = None,
    run_id: int = 1,
    waits: bool = True,
) -> tuple[int, State]:
    """Train a world up to `until` steps; the step it began at, and the blocks of all ranks, which
    hold the same bits.
    """
    config = replace(config, checkpoint_dir="" if directory is None else str(directory))

    def body(fabric: ThreadFabric) -> tuple[int, State]:
        one = Trainee(fabric, config, layout, run_id=run_id)
        one.train(until, waits=waits)
        return one.began, one.state()

    found, together = run_world(layout.ranks, body), State()
    for _, state in found.values():
        for block, tensors in state.items():
            assert_same(tensors, together.setdefault(block, tensors), str(block))
    (began,) = {began for began, _ in found.values()}
    return began, together


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys(), what
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, (what, differing)


def assert_all_same(one: State, other: State) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys()
    for block, tensors in one.items():
        assert_same(tensors, other[block], str(block))
