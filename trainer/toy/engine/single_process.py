"""The MoE trainer as one process with a group of one: no store, no ring, no emulation.

It takes the same steps as a job of many ranks: same samples, same learning rates, same losses up to
rounding. Tests use it as the undisturbed run. Its checkpoints are those of any job: what one of
them saved, the other goes on from.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import nan

import torch
from torch import Tensor

from pacekeeper.core.config.run_fingerprint import run_fingerprint
from pacekeeper.core.config.train import TrainConfig
from pacekeeper.core.layout.even_layout import even_layout
from pacekeeper.core.layout.layout import Layout
from pacekeeper.trainer.checkpoint.manager import Checkpoints, Position
from pacekeeper.trainer.distributed.collectives import LocalFabric
from pacekeeper.trainer.elastic.rendezvous import newest_run_id, next_run_id
from pacekeeper.trainer.toy.engine.job_rules import learning_rate
from pacekeeper.trainer.toy.model.block_state_dict import ModelStates, ordered_parameters
from pacekeeper.trainer.toy.model.dataset import Corpus
from pacekeeper.trainer.toy.model.flop_counter import WorkMeter, WorkPass
from pacekeeper.trainer.toy.model.transformer import MoETransformer


def train_alone(config: TrainConfig) -> Iterator[tuple[int, float, float]]:
    """(step, loss, tokens per second) of each step from step 0 on; nothing is saved."""
    yield from _SingleProcessRank(replace(config, checkpoint_dir="", resume="never")).run()


def train_and_save(config: TrainConfig) -> Iterator[tuple[int, float, float]]:
    """The same, from where `config.resume` says, with checkpoints as the settings ask for them.

    Raises DataError where none can be read of those that there are, HostError where storage does
    not say what it has.
    """
    alone = _SingleProcessRank(config)
    alone.resume()
    try:
        yield from alone.run()
        alone.save(is_last=True)
    finally:
        alone.checkpoints.close()


@dataclass(slots=True)
class _SingleProcessRank:
    config: TrainConfig
    layout: Layout = field(init=False)
    corpus: Corpus = field(init=False)
    model: MoETransformer = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    checkpoints: Checkpoints = field(init=False)
    step: int = 0
    last_loss: float = nan

    def __post_init__(self) -> None:
        config = self.config
        torch.set_num_threads(1)  # as every rank: at this size threads only wait for each other
        self.layout = even_layout(
            ranks=[0],
            num_layers=config.num_layers,
            num_experts=config.num_experts,
            replicas=1,
            num_virtual_shards=config.num_heads,
        )
        self.corpus = Corpus.from_stdlib(config)
        self.model = MoETransformer(config, self.layout, 0)
        self.model.set_layout(self.layout, LocalFabric())
        self.optimizer = torch.optim.AdamW(
            ordered_parameters(self.model),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        run_id = next_run_id(newest_run_id(config))
        self.checkpoints = Checkpoints(
            config,
            rank=0,
            run_id=run_id,
            first_run_id=run_id,
            identity=run_fingerprint(config, self.corpus.crc()),
            states=ModelStates(self.model, self.optimizer),
        )

    def resume(self) -> None:
        """Go back to what is to be resumed, if there is anything."""
        fabric = LocalFabric()
        paths = self.checkpoints.agree_on_start(fabric)
        if not paths:
            return
        found = self.checkpoints.stage(paths, self.layout, fabric)
        self.checkpoints.apply(found)
        self.model.set_layout(self.layout, fabric)
        self.step = found.step
        self.last_loss = nan if found.last_loss is None else found.last_loss

    def run(self) -> Iterator[tuple[int, float, float]]:
        """Each step that is left."""
        while self.step < self.config.steps:
            began_s = time.perf_counter()
            self.last_loss = float(self._train())
            rate = self.corpus.num_tokens(self.step - 1) / (time.perf_counter() - began_s)
            yield self.step - 1, self.last_loss, rate
            if self.step < self.config.steps:
                self.save()

    def save(self, *, is_last: bool = False) -> None:
        """Save where it is time to, beside the training."""
        at = Position(
            layout=self.layout, step=self.step, ticket=self.step, last_loss=self.last_loss
        )
        is_storing = self.checkpoints.is_storing
        self.checkpoints.save_if_due(at, is_storing=is_storing, is_last=is_last)

    def _train(self) -> Tensor:
        """One step; its loss."""
        config, meter = self.config, WorkMeter()
        batch = self.corpus.batch(self.step, range(config.rows_per_step))
        output = self.model(batch, WorkPass(meter))
        loss: Tensor = output.loss_sum / self.corpus.target_tokens(self.step)
        (loss + config.balance_loss * output.balance_sum / config.rows_per_step).backward()
        self.checkpoints.receive_votes([self.checkpoints.encode_vote(self.step + 1, self.layout)])
        self.checkpoints.settle()
        self.optimizer.param_groups[0]["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.checkpoints.partial.count(meter.routed)
        self.step += 1
        self.checkpoints.step_is_over(self.step)
        return loss.detach()
