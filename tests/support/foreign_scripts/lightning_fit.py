"""Lightning's Trainer, automatic optimization: `lightning_fit.py FOLDER`."""

import sys
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

ROWS, TOKENS, ACCUMULATES, STEPS = 2, 8, 2, 4


class Module(lightning.LightningModule):  # type: ignore[misc]
    """Embeds and answers; its batches are tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))

    def training_step(self, batch: Any, number: int) -> Tensor:
        ids, targets = batch
        return nn.functional.cross_entropy(self.body(ids).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: Any, number: int) -> None:
        self.training_step(batch, number)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    ids = torch.arange(TOKENS)
    loader: Any = DataLoader([(ids, ids)] * (ROWS * ACCUMULATES * STEPS), ROWS)  # type: ignore[arg-type]
    lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=sys.argv[1],
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATES,
    ).fit(Module(), loader, DataLoader([(ids, ids)] * 4, ROWS))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
