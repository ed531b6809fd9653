"""The MoE trainer as one process with a group of one: no store, no ring, no emulation.

It takes the same steps as a job of many ranks: same samples, same learning rates, same losses up to
rounding. Tests use it as the undisturbed run.
"""

import time
from collections.abc import Iterator

import torch

from pacekeeper.core.config import TrainConfig
from pacekeeper.core.layout import even_layout
from pacekeeper.trainer.block_state import ordered_parameters
from pacekeeper.trainer.collectives import LocalFabric
from pacekeeper.trainer.data import Corpus
from pacekeeper.trainer.model import MoETransformer
from pacekeeper.trainer.rules import learning_rate
from pacekeeper.trainer.work import WorkMeter, WorkPass


def train_alone(config: TrainConfig) -> Iterator[tuple[int, float, float]]:
    """(step, loss, tokens per second) of each step."""
    torch.set_num_threads(1)  # as every rank: at this size threads only wait for each other
    layout = even_layout(
        ranks=[0],
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        replicas=1,
        num_virtual_shards=config.num_heads,
    )
    corpus = Corpus.from_stdlib(config)
    model = MoETransformer(config, layout, 0)
    model.set_layout(layout, LocalFabric())
    optimizer = torch.optim.AdamW(
        ordered_parameters(model), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    for step in range(config.steps):
        began_s = time.perf_counter()
        output = model(corpus.batch(step, range(config.rows_per_step)), WorkPass(WorkMeter()))
        loss = output.loss_sum / corpus.target_tokens(step)
        (loss + config.balance_loss * output.balance_sum / config.rows_per_step).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
        rate = corpus.num_tokens(step) / (time.perf_counter() - began_s)
        yield step, float(loss.detach()), rate
