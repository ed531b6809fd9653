"""A mixture of experts trained by a loop of your own, with a change of the layout on the way.

`python examples/train_engine.py MODEL TOKENS.bin OUT`, or the same under `torchrun
--nproc-per-node 4`. MODEL is a folder with config.json; OUT gets a Hugging Face checkpoint.
"""

import os
import sys
from dataclasses import replace

import torch

from pacekeeper.trainer import Engine, EngineGroups, cross_entropy
from pacekeeper.trainer.data.sampler import Sampler
from pacekeeper.trainer.data.token_stream import open_tokens
from pacekeeper.trainer.engine.micro_batches import MicroBatch

STEPS, ROWS, WARMUP = 20, 16, 5


def loss(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return a sum over targets: the engine divides by their number on all ranks."""
    z_loss = logits.logsumexp(-1).square()[batch["labels"] >= 0].sum()
    return cross_entropy(logits, batch) + 1e-4 * z_loss


def main(model: str, tokens: str, out: str) -> None:
    groups = EngineGroups.single_process()
    if "RANK" in os.environ:  # torchrun; on GPUs: "cpu:gloo,cuda:nccl" and a device for each rank
        torch.distributed.init_process_group("gloo")
        groups = EngineGroups.from_torch(torch.device("cpu"))
    engine = Engine.from_config(model, seed=1, groups=groups, max_grad_norm=1.0)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=3e-3, weight_decay=0.01)
    engine.add_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
    stream, held_out = open_tokens([tokens]).split(0.1)
    train = Sampler(stream=stream, row_tokens=32, rows_per_step=ROWS, seed=1)
    tests = Sampler(stream=held_out, row_tokens=32, rows_per_step=ROWS, is_shuffled=False)
    for step in range(STEPS):
        if step == STEPS // 2:  # the lists of experts of all layers, in reverse: they swap ranks
            experts = tuple(layer[::-1] for layer in engine.layout.experts)
            engine.apply(replace(engine.layout, generation=2, experts=experts))
        rows = engine.micro_batches(ROWS, rows_per_microbatch=2)
        result = engine.step([train.batch(step, places).tensors for places in rows], loss)
        schedule.step()
        if step % 5 == 4 and groups.control.rank == 0:
            print(f"step {step + 1} loss {result.loss.item():.4f}")
    rows = engine.micro_batches(tests.num_first_places(0), rows_per_microbatch=2)
    value = engine.evaluate([tests.batch(0, places).tensors for places in rows])
    if groups.control.rank == 0:
        print(f"evaluation loss {value.item():.4f}")
    engine.export(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
