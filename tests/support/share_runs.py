"""Jobs of three ranks with batch shares: `python -m support.share_runs RINGS FOLDER`.

Their agent is played: plans with drawn shares lie beside the rings. What each rank saw is in
FOLDER/JOB-RANK.json.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from pacekeeper.core.errors import UnreachableError
from pacekeeper.core.layout.layout import Layout, with_batch_shares
from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule, step_loader
from pacekeeper.trainer.plans.gather import CpuGather
from support.forked_ranks import fork_ranks
from support.plan_offers import offer

RANKS, PER_STEP, ROWS, TOKENS, WORDS = 3, 6, 2, 7, 32
NUM_ROWS, STEPS, SEED = 61, 32, 3  # one row of each epoch fills no step
REFUSED_STEP, EVEN_FROM = 10, 28
LOST_RANK, LOST_STEP, PATIENCE_S = 1, 2, 3.0
JOBS = ("ddp", "fsdp2", "ahead", "dead", "frozen", "waits")


class Rows(Dataset[dict[str, Tensor]]):
    """Drawn tokens, of which some have no label: micro-batches differ in tokens."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(number))
        labels = ids.where(torch.arange(TOKENS) >= number % TOKENS, -100)
        return {"input_ids": ids, "labels": labels, "number": torch.tensor(number)}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Embedding(WORDS, 8), layers, nn.Linear(8, WORDS)).double()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def wrapped(job: str) -> nn.Module:
    model: Any = make_model()
    if job != "fsdp2":
        return DistributedDataParallel(model)
    for part in model[1:]:
        fully_shard(part)
    fully_shard(model)
    return model  # type: ignore[no-any-return]


class Bounded(BatchShares):
    """A rank that refuses a plan where it would run all micro-batches."""

    def check(self, layout: Layout) -> None:
        super().check(layout)
        rank = self.schedule.rank
        if rank == LOST_RANK and layout.rows_of(PER_STEP)[rank] == PER_STEP:
            raise ValueError("no room for all micro-batches")


def rows_of_step(step: int) -> list[int]:
    """The rows of the global batch, written down apart from what deals them."""
    epoch, at = divmod(step, NUM_ROWS // (PER_STEP * ROWS))
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(SEED + epoch))
    return order[at * PER_STEP * ROWS : (at + 1) * PER_STEP * ROWS].tolist()


def drawn_shares(step: int) -> list[float]:
    """Of whole micro-batches; at the refused step all of them for one rank, even at the end."""
    if step >= EVEN_FROM:
        return [1.0 / RANKS] * RANKS
    if step == REFUSED_STEP:
        return [float(rank == LOST_RANK) for rank in range(RANKS)]
    draw = random.Random(step)
    while True:
        ends = [0, *sorted(draw.randint(0, PER_STEP) for _ in range(RANKS - 1)), PER_STEP]
        counts = [end - first for first, end in pairwise(ends)]
        if counts[LOST_RANK] < PER_STEP:
            return [count / PER_STEP for count in counts]


def rank_of(job: str, rings: Path, folder: Path, rank: int) -> None:
    dist.init_process_group("gloo")
    if job == "waits":
        _wait(rings, folder, rank)
        return
    schedule = ShareSchedule(rank=rank, num_ranks=RANKS, micro_batches_per_step=PER_STEP)
    # A directory of its own for each rank, as on a node of its own.
    pace = pytorch.attach(job=job, ring_dir=str(rings / f"{rank}"), micro_batches_per_step=PER_STEP)
    model = wrapped(job)
    is_lossy = job in ("dead", "frozen")
    gather = CpuGather(PATIENCE_S if is_lossy else 60.0)
    shares = Bounded(pace, model, schedule, gather=gather)
    workers: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 3} if job == "ahead" else {}
    loader = step_loader(schedule, Rows(), rows_per_micro_batch=ROWS, seed=SEED, **workers)
    (folder / f"{job}-{rank}.pid").write_text(str(os.getpid()))
    told: dict[str, Any] = {"steps": [], "error": ""}
    try:
        _train(job, rank, shares, model, loader, told)
    except UnreachableError as error:
        told["error"] = type(error).__name__
        other = int((folder / f"{job}-{LOST_RANK}.pid").read_text())
        if rank == 0:
            os.kill(other, signal.SIGKILL)
    (folder / f"{job}-{rank}.json").write_text(json.dumps(told))
    if not is_lossy:
        dist.destroy_process_group()


def _train(
    job: str, rank: int, shares: BatchShares, model: nn.Module, loader: Any, told: dict[str, Any]
) -> None:
    pace, alone, step = shares._session._hooks, make_model(), 0
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    while step < STEPS:
        for own in loader:
            if rank == LOST_RANK and step == LOST_STEP:
                _lose(job)
            generation = shares.layout.generation
            if job != "ahead" or step % 8 == 0:
                plan = replace(
                    shares.layout,
                    generation=generation + 1,
                    pipelines=with_batch_shares(shares.layout.pipelines, drawn_shares(step)),
                )
                assert pace.ring.path is not None
                offer(pace.ring.path, plan, base=generation)
            counts, numbers = shares.schedule.at(step), list[int]()
            with pace.step(step):
                for batch in shares.micro_batches(own):
                    numbers += batch["number"].tolist()
                    with pace.micro_batch_timer(tokens=batch["input_ids"].numel()):
                        shares.backward(loss_of(model, batch))
                whole = default_collate([Rows()[number] for number in rows_of_step(step)])
                loss_of(alone, whole).backward()
                # Also without gradients, between the passes and the update: sharded parameters that
                # stayed whole then would be the old ones in the next step.
                with torch.no_grad():
                    evaluated = (loss_of(model, whole) - loss_of(alone, whole)).abs().item()
                error = max(difference(model, alone), evaluated)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            entry = {"counts": counts, "rows": numbers, "error": error}
            told["steps"].append(entry | {"generation": pace.generation})
            step += 1
            if step == STEPS:
                break


def _wait(rings: Path, folder: Path, rank: int) -> None:
    """Rank 0 waits for a functional collective, which the others enter once another thread of rank
    0 has run meanwhile; they give up after a while.
    """
    pace = pytorch.attach(job="waits", ring_dir=str(rings / f"{rank}"))
    has_run, is_waiting = folder / "waits-has-run", threading.Event()

    def run() -> None:
        is_waiting.wait()
        time.sleep(0.2)  # the main thread is within the operator by then
        has_run.touch()

    threading.Thread(target=run).start()
    give_up_s = time.monotonic() + 20.0
    while rank and not has_run.exists() and time.monotonic() < give_up_s:
        time.sleep(0.01)
    (folder / f"waits-{rank}.json").write_text(json.dumps({"could_run": has_run.exists()}))
    world = dist.group.WORLD
    assert world is not None, "initialised"
    gathered = functional.all_gather_tensor(torch.ones(1), 0, world)
    with pace.step(0), pace.micro_batch_timer(tokens=1):
        if rank == 0:
            is_waiting.set()
        functional.wait_tensor(gathered)
    is_waiting.set()


def _lose(job: str) -> None:
    if job == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)


def difference(model: nn.Module, alone: nn.Module) -> float:
    worst = 0.0
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = one.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert other.grad is not None
        worst = max(worst, (gradient - other.grad).abs().max().item())
    return worst


def main() -> int:
    """Run all jobs at once; those that lose a rank do not end well."""
    rings, folder = Path(sys.argv[1]), Path(sys.argv[2])
    pids = [
        pid
        for job in JOBS
        for pid in fork_ranks(partial(rank_of, job, rings, folder), folder / job, RANKS)
    ]
    for pid in pids:
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
