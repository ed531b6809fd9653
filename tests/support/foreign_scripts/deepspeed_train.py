"""DeepSpeed's own loop in one process: `deepspeed_train.py PORT`; ZeRO 2, accumulated batches."""

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

ROWS, TOKENS, ACCUMULATES, STEPS = 2, 8, 2, 4


class Model(nn.Module):
    """Embeds and answers with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(ids).flatten(0, 1), ids.flatten())


def main() -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=sys.argv[1], DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it runs a compiler
    deepspeed.init_distributed("gloo", verbose=False)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=Model(), config=settings)
    for _ in range(STEPS * ACCUMULATES):
        engine.backward(engine(torch.zeros(ROWS, TOKENS, dtype=torch.int64)))
        engine.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
