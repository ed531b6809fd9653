"""Data-parallel training whose ranks run unequal numbers of micro-batches where one is slow.

`torchrun --nproc-per-node 4 examples/batch_shares.py [--ring-dir DIR]`; shares change once an agent
and a controller run, and a rank is slow (docs/plan-consumer.md).
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import pacekeeper
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule, step_loader

PER_STEP, ROWS = 16, 4  # micro-batches of all ranks, and rows of one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ring-dir", default=None, help="this node's ring directory")
    ring_dir = parser.parse_args().ring_dir
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = torch.randn(PER_STEP * ROWS * 20, 8)
    dataset = TensorDataset(rows, rows.sum(1, keepdim=True))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())

    schedule = ShareSchedule(rank=rank, num_ranks=world_size, micro_batches_per_step=PER_STEP)
    pace = pacekeeper.attach(
        model, optimizer, job="example", ring_dir=ring_dir, micro_batches_per_step=PER_STEP
    )
    shares = BatchShares(pace, model, schedule, tokens_of=lambda batch: len(batch[0]))
    loader = step_loader(schedule, dataset, rows_per_micro_batch=ROWS)
    for own in loader:  # this rank's micro-batches of a step
        for x, y in shares.micro_batches(own):
            shares.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    pace.detach()
    print(f"rank {rank}: {len(loader)} steps, {schedule.at(shares.step)} micro-batches", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
