"""Batch shares in other people's trainers: `python -m support.share_trainer_runs RINGS FOLDER`.

Two ranks of Hugging Face's Trainer, and two of Lightning's; a played agent offers drawn shares
before each step. FOLDER/JOB-RANK.json: the shares of each step, and the largest difference of a
parameter from one process that trained on the whole batches.
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from pacekeeper.core.layout.layout import with_batch_shares
from pacekeeper.trainer.adapters import huggingface, lightning
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule, step_loader
from pacekeeper.trainer.adapters.batch_shares.huggingface import SharesMixin
from support.forked_ranks import fork_ranks
from support.plan_offers import offer
from support.share_runs import Rows, loss_of, make_model

RANKS, PER_STEP, ROWS, STEPS, SEED, RATE = 2, 5, 2, 12, 3, 0.05
CONFIG = MixtralConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=16,
)


def offer_drawn(shares: BatchShares) -> None:
    """Offer other shares of whole micro-batches, at least one for each rank."""
    pace, generation = shares._session._hooks, shares.layout.generation
    first = random.Random(shares.step).randint(1, PER_STEP - 1)
    pipelines = with_batch_shares(
        shares.layout.pipelines, (first / PER_STEP, (PER_STEP - first) / PER_STEP)
    )
    plan = replace(shares.layout, generation=generation + 1, pipelines=pipelines)
    assert pace.ring.path is not None
    offer(pace.ring.path, plan, base=generation)


def difference(
    model: nn.Module, alone: nn.Module, loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
) -> float:
    """Train `alone` on whole batches; return the largest difference of a parameter."""
    optimizer, rows, steps_per_epoch = torch.optim.SGD(alone.parameters(), lr=RATE), Rows(), 6
    assert len(rows) // (PER_STEP * ROWS) == steps_per_epoch
    for step in range(STEPS):
        epoch, at = divmod(step, steps_per_epoch)
        draw = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(len(rows), generator=draw).tolist()
        own = order[at * PER_STEP * ROWS : (at + 1) * PER_STEP * ROWS]
        loss(alone, default_collate([rows[number] for number in own])).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def tell(folder: Path, job: str, rank: int, counts: list[Any], error: float) -> None:
    (folder / f"{job}-{rank}.json").write_text(json.dumps({"counts": counts, "error": error}))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM._from_config(CONFIG, experts_implementation="eager").double()


class MyTrainer(SharesMixin, HuggingFaceTrainer):  # type: ignore[misc]
    """As the page says; the counts of each step are kept."""

    counts: list[Any]

    def training_step(self, *args: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **named)
        assert self._shares is not None
        self.counts.append(self._shares.schedule.at(self._shares.step - 1))
        return loss


class Offers(TrainerCallback):  # type: ignore[misc]
    """Plays the agent between two steps."""

    trainer: MyTrainer

    def on_step_end(self, *args: Any, **named: Any) -> None:
        assert self.trainer._shares is not None
        offer_drawn(self.trainer._shares)


def huggingface_rank(rings: Path, folder: Path, rank: int) -> None:
    watch = huggingface.Pacekeeper(
        job="huggingface", ring_dir=str(rings / str(rank)), micro_batches_per_step=PER_STEP
    )
    rows = [Rows()[number] for number in range(len(Rows()))]
    offers = Offers()
    trainer = MyTrainer(
        model=mixtral(),
        args=TrainingArguments(
            output_dir=str(folder / f"run-{rank}"), report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", per_device_train_batch_size=ROWS, max_steps=STEPS, seed=SEED,
            optim="sgd", learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0,
            ddp_backend="gloo",
        ),
        train_dataset=rows,
        data_collator=default_collate,
        callbacks=[watch, offers],
    )  # fmt: skip
    trainer.counts, offers.trainer = [], trainer
    trainer.train()
    error = difference(
        trainer.accelerator.unwrap_model(trainer.model),
        mixtral(),
        lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["labels"]).loss,
    )
    tell(folder, "huggingface", rank, trainer.counts, error)


class Module(LightningModule):  # type: ignore[misc]
    """As the page says; the counts of each step are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.counts = make_model(), list[Any]()

    def train_dataloader(self) -> Any:
        self.schedule = ShareSchedule(
            rank=self.trainer.global_rank, num_ranks=RANKS, micro_batches_per_step=PER_STEP
        )
        return step_loader(self.schedule, Rows(), rows_per_micro_batch=ROWS, seed=SEED)

    def on_train_start(self) -> None:
        found = (c for c in self.trainer.callbacks if isinstance(c, lightning.Pacekeeper))
        pace = next(found).pace
        assert pace is not None
        self.shares = BatchShares(pace, self.trainer.strategy.model, self.schedule)

    def training_step(self, own: list[Any], number: int) -> None:
        self.counts.append(self.schedule.at(self.shares.step))
        for batch in self.shares.micro_batches(own):
            self.manual_backward(self.shares.scale(loss_of(self.model, batch)))
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        offer_drawn(self.shares)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def lightning_rank(rings: Path, folder: Path, rank: int) -> None:
    watch: Any = lightning.Pacekeeper(
        job="lightning", ring_dir=str(rings / str(rank)), micro_batches_per_step=PER_STEP
    )
    assert isinstance(watch, Callback)
    module = Module()
    trainer = Trainer(
        accelerator="cpu", strategy="ddp", devices=RANKS, max_steps=STEPS, callbacks=[watch],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module)
    tell(folder, "lightning", rank, module.counts, difference(module.model, make_model(), loss_of))


JOBS = {"huggingface": huggingface_rank, "lightning": lightning_rank}


def main() -> int:
    """0 where all ended well."""
    rings, folder = Path(sys.argv[1]), Path(sys.argv[2])
    pids = [
        pid
        for job, body in JOBS.items()
        for pid in fork_ranks(partial(body, rings, folder), folder / job, RANKS)
    ]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main())
