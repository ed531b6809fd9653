"""Runs of Lightning's own Trainer with our adapter: `python -m support.lightning_runs`."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytorch_lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from pacekeeper.trainer.adapters.lightning import Pacekeeper
from support.foreign_models import TinyModel
from support.forked_ranks import STEPS, Lengths, Pace, run_all

SAMPLES, ROWS, TOKENS = 12, 2, 8  # of the lone runs


class Body(nn.Module):
    """A tiny model on a device that takes its time; buffers make DDP broadcast before a pass."""

    def __init__(self, pace: Pace | None) -> None:
        super().__init__()
        self.model, self.pace = TinyModel(vocabulary=64), pace
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, input_ids: Any) -> Any:
        found = self.model(input_ids=input_ids)["logits"].square().mean()
        if self.training and self.pace is not None:
            self.pace.take(input_ids)
        return found


def automatic(base: Any, pace: Pace | None = None) -> Any:
    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = Body(pace)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.body(batch["input_ids"])

        def validation_step(self, batch: Any, number: int) -> None:
            self.body(batch["input_ids"])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2)

    return Module()


def manual(base: Any) -> Any:
    """Two optimizers, each with a pass of its own."""

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = Body(None)
            self.automatic_optimization = False

        def training_step(self, batch: Any, number: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.body(batch["input_ids"]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            parts = (self.body.model.head, self.body.model.embedding)
            return [torch.optim.SGD(part.parameters(), 1e-2) for part in parts]

    return Module()


def trainer(package: Any, folder: Path, watch: Any, **options: Any) -> Any:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return package.Trainer(callbacks=[watch], **quiet | options)


def loader(count: int = SAMPLES, lengths: Lengths | None = None) -> Any:
    samples: Any = [{"input_ids": torch.arange(TOKENS)} for _ in range(count)]
    return DataLoader(samples, ROWS, collate_fn=lengths.batch if lengths is not None else None)


def rank_of(job: str, rings: Path, folder: Path, rank: int) -> None:
    """The first becomes slow; the other has long sequences on one rank, and accumulates."""
    becomes_slow = job == "slow"
    passes = 1 if becomes_slow else 2
    pace = Pace(rank, becomes_slow=becomes_slow, passes_per_step=passes)
    lengths = Lengths(rank, is_uneven=not becomes_slow)
    trainer(
        lightning,
        folder,
        Pacekeeper(job=job, ring_dir=str(rings)),
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=passes,
        val_check_interval=30,
    ).fit(
        automatic(lightning.LightningModule, pace),
        loader(2 * ROWS * STEPS * passes, lengths),
        loader(8),
    )


def alone(folder: Path) -> None:
    """Accumulates and evaluates in the middle of a step; goes on; several optimizers; the elder."""
    rings = str(folder / "alone")
    module = automatic(lightning.LightningModule)
    first = trainer(
        lightning, folder, Pacekeeper(job="first", ring_dir=rings), max_epochs=2,
        accumulate_grad_batches=4, val_check_interval=3,
    )  # fmt: skip
    first.fit(module, loader(), loader(4))
    first.save_checkpoint(folder / "saved.ckpt")
    trainer(lightning, folder, Pacekeeper(job="resumed", ring_dir=rings), max_epochs=3,
            accumulate_grad_batches=4).fit(
        module, loader(), ckpt_path=folder / "saved.ckpt", weights_only=False
    )  # fmt: skip
    watch = Pacekeeper(job="manual", ring_dir=rings)
    trainer(lightning, folder, watch, max_epochs=1).fit(manual(lightning.LightningModule), loader())
    elder = Pacekeeper(job="elder", ring_dir=rings)
    trainer(pytorch_lightning, folder, elder, max_epochs=1).fit(
        automatic(pytorch_lightning.LightningModule), loader()
    )
    nowhere = Pacekeeper(job="nowhere", ring_dir=str(folder / "saved.ckpt"))
    trainer(lightning, folder, nowhere, max_epochs=1).fit(module, loader())
    print("all are done")


if __name__ == "__main__":
    sys.exit(run_all(rank_of, alone))
