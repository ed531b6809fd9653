"""A rank of a plain DDP job on gloo that hangs, stalls or rests as `benchmarks.hangs` asks it to.

It attaches by `pacekeeper.trainer.adapters.pytorch` and says nothing else. A file KIND-RANK in the
faults' directory asks for a fault; the rank writes its time into the file STRUCK-RANK when it
begins. Each rank reads its data from files of its own, which may lie on a mount that hangs.
"""

import argparse
import io
import os
import random
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.rank_processes import end_with_parent
from pacekeeper.trainer.adapters import pytorch

JOB = "hangs"
WIDTH, ITEMS = 16, 8
IN_PASS, BETWEEN, LOOP, MISMATCH = "lock", "between", "loop", "mismatch"
EVALUATE, SAVE = "evaluate", "save"  # on rank 0 alone, while the others wait for it


class Faults:
    """What this rank is asked to do wrong."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank

    def is_asked(self, kind: str) -> bool:
        path = self.directory / f"{kind}-{self.rank}"
        if not path.exists():
            return False
        path.unlink()
        (self.directory / f"struck-{self.rank}").write_text(repr(time.time()))
        return True

    def deadlocks(self, kind: str) -> None:
        if self.is_asked(kind):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # never comes back: what the stack shows


class Files(Dataset[Tensor]):
    """Items that are read from the file `item`, or from `item-N` where the Nth one has its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.began = directory / "began"
        self.num_read = 0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, item: int) -> Tensor:
        self.began.write_text(repr(time.time()))
        own = self.directory / f"item-{self.num_read}"
        self.num_read += 1
        path = own if os.path.lexists(own) else self.directory / "item"
        with path.open("rb") as file:
            return torch.full((WIDTH,), float(len(file.read(4096))) + item)


class Model(nn.Module):
    """A layer whose pass takes `step_s`."""

    def __init__(self, faults: Faults, step_s: float, stalls: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.faults, self.step_s, self.stalls = faults, step_s, stalls
        self.random = random.Random(faults.rank)

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(self.step_s)
        if self.training:
            self.faults.deadlocks(IN_PASS)
            if self.faults.is_asked(LOOP):
                while True:
                    pass
            if self.random.random() < self.stalls:
                time.sleep(self.random.uniform(0.3, 1.4))  # below the limit
        result: Tensor = self.layer(rows)
        return result


class SlowFile(io.BytesIO):
    """A checkpoint's file that takes `seconds` to write."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def write(self, data: object) -> int:
        time.sleep(self.seconds)
        self.seconds = 0.0
        return super().write(data)  # type: ignore[arg-type]


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: each rank has a folder of its own")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--stalls", type=float, default=0.0, help="share of steps with a stall")
    parser.add_argument("--rest-s", type=float, default=0.0, help="rank 0 evaluates and saves")
    args = parser.parse_args()
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=args.rank,
        world_size=args.size,
    )
    faults = Faults(args.folder / "faults", args.rank)
    module = Model(faults, args.step_s, args.stalls)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    pytorch.attach(model, optimizer, job=JOB, ring_dir=str(args.folder / "rings"))
    loader = DataLoader(Files(args.folder / f"data-{args.rank}"), batch_size=1)
    done, steps = args.folder / f"steps-{args.rank}", 0
    while True:
        for batch in loader:
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            faults.deadlocks(BETWEEN)
            if faults.is_asked(MISMATCH):
                dist.recv(torch.zeros(1), src=0)  # a message that is never sent
            steps += 1
            done.write_text(str(steps))
            if args.rest_s and steps % 40 == 0:
                if args.rank == 0:
                    model.eval()
                    end_s = time.monotonic() + args.rest_s
                    while time.monotonic() < end_s:
                        module(batch)
                    model.train()
                dist.barrier()
                if args.rank == 0:
                    torch.save(model.state_dict(), SlowFile(args.rest_s))  # noqa: TID251
                dist.barrier()


if __name__ == "__main__":
    os.nice(1)
    main()
