"""Batch shares for Hugging Face's Trainer: `class MyTrainer(SharesMixin, Trainer)`.

Imports nothing of it. To the Trainer a step is one batch, the list of this rank's micro-batches;
their passes run here. The job opts in with `Pacekeeper(..., micro_batches_per_step=...)` among the
callbacks. See docs/plan-consumer.md.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pacekeeper.core.errors import ConfigError
from pacekeeper.trainer.adapters.batch_shares.dealing import ShareSchedule, step_loader
from pacekeeper.trainer.adapters.batch_shares.shares import (
    BatchShares,
    shifted_tokens_in,
    tokens_in,
)
from pacekeeper.trainer.adapters.huggingface import Pacekeeper


class SharesMixin:
    """Overrides the Trainer's loader and training step."""

    args: Any
    callback_handler: Any
    _schedule: ShareSchedule
    _shares: BatchShares | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train from the first step on.

        Raises:
            ConfigError: The run is to resume from a checkpoint: the data would begin anew.
        """
        if resume_from_checkpoint:
            raise ConfigError("a Trainer with batch shares cannot resume from a checkpoint")
        self._shares = None
        trainer: Any = super()
        return trainer.train(resume_from_checkpoint, *args, **options)

    def get_train_dataloader(self) -> DataLoader[list[Any]]:
        """Return the loader of this rank's part of each step.

        Raises:
            ConfigError: Micro-batches are accumulated by the Trainer as well, or the callback is
                missing.
        """
        trainer: Any = self
        if self.args.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"gradient_accumulation_steps = {self.args.gradient_accumulation_steps}: expected "
                "1 with batch shares",
                remedy="set micro_batches_per_step of the callback instead: of all ranks together",
            )
        self._schedule = ShareSchedule(
            rank=self.args.process_index,
            num_ranks=self.args.world_size,
            micro_batches_per_step=self._callback().micro_batches_per_step,
        )
        return step_loader(
            self._schedule,
            trainer.train_dataset,
            rows_per_micro_batch=self.args.per_device_train_batch_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            collate=trainer._get_collator_with_removed_columns(trainer.data_collator, "training"),
            num_workers=self.args.dataloader_num_workers,
        )

    def training_step(
        self, model: nn.Module, inputs: list[Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run this rank's micro-batches; return its part of the loss: the ranks' mean is that of
        the global batch.
        """
        trainer: Any = self
        model.train()
        if self._shares is None:
            pace = self._callback().pace
            if pace is None:
                raise ConfigError("this rank could not attach: see the warning above")
            self._shares = BatchShares(pace, model, self._schedule, tokens_of=self._count_tokens)
        total = torch.zeros((), device=self.args.device)
        for batch in self._shares.micro_batches(inputs):
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, trainer._prepare_inputs(batch))
            loss = self._shares.scale(loss)
            trainer.accelerator.backward(loss)
            total = total + loss.detach()
        return total

    def _count_tokens(self, batch: Any) -> int:
        """Return the labels that the model's loss, a mean, counts."""
        labels = {"labels": batch["labels"]}
        is_shifted = getattr(self, "_loss_shifts_labels", True)
        return shifted_tokens_in(labels) if is_shifted else tokens_in(labels)

    def _callback(self) -> Pacekeeper:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, Pacekeeper) and callback.micro_batches_per_step:
                return callback
        raise ConfigError(
            "no callback opts in to batch shares",
            remedy="pass callbacks=[Pacekeeper(job=..., micro_batches_per_step=...)]",
        )
