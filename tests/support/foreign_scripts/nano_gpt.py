"""A loop in the manner of nanoGPT: `[torchrun] nano_gpt.py [--steps N]`; it ends with code 7."""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, ROWS, TOKENS, ACCUMULATES = 64, 4, 16, 3


class GPT(nn.Module):
    """Embedding, one block, head; it returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.lm_head = nn.Linear(32, VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx)
        logits = self.lm_head(x + self.mlp(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    is_ddp = "RANK" in os.environ
    if is_ddp:
        torch.distributed.init_process_group("gloo")
    raw_model = GPT()
    matrices = [p for p in raw_model.parameters() if p.dim() == 2]
    vectors = [p for p in raw_model.parameters() if p.dim() < 2]
    optimizers = [torch.optim.AdamW(matrices, 1e-3), torch.optim.SGD(vectors, 1e-3)]
    model = DistributedDataParallel(raw_model) if is_ddp else raw_model
    for _ in range(steps):
        raw_model.eval()
        with torch.no_grad():
            raw_model(*batch())
        raw_model.train()
        for micro_step in range(ACCUMULATES):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = micro_step == ACCUMULATES - 1
            _, loss = model(*batch())
            (loss / ACCUMULATES).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    if is_ddp:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    print("as we were", __name__, sys.argv[1:], sys.path[0], "pacekeeper" in globals())


def batch() -> tuple[Tensor, Tensor]:
    data = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1))
    return data[:, :-1], data[:, 1:]


if __name__ == "__main__":
    main()
    sys.exit(0 if "RANK" in os.environ else 7)
