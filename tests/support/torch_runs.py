"""Plain PyTorch loops with our one line, or blocks: `python -m support.torch_runs RINGS FOLDER`.

As people train: sharded and replicated, accumulating, recomputing, compiled, in stages, with steps
that are skipped or raise.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pacekeeper
from pacekeeper.trainer.adapters import pytorch
from support.forked_ranks import STEPS, Lengths, Pace, run_all

HIDDEN, VOCABULARY, SEQUENCES, TOKENS = 16, 64, 2, 16
WAYS_STEPS = 4
PIECES = {"between": 0.4, "stages": 0.4}  # seconds that the slow rank of a job takes for a step


class Layer(nn.Module):
    """A residual layer, recomputed in the backward pass if so wanted."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU())
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            hidden = checkpoint(self.inner, x, use_reentrant=False)
        else:
            hidden = self.inner(x)
        out: Tensor = x + self.outer(hidden)
        return out


class Model(nn.Module):
    """Tokens to logits, on a device that takes its time."""

    def __init__(self, pace: Pace | None = None, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*(Layer(recomputes=recomputes) for _ in range(2)))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.pace = pace

    def forward(self, ids: Tensor) -> Tensor:
        if self.training and self.pace is not None:
            self.pace.take(ids)
        logits: Tensor = self.head(self.layers(self.embed(ids)))
        return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, -2), ids.flatten())
    return loss


def sharded(model: Model) -> Model:
    for layer in model.modules():
        if isinstance(layer, Layer):
            fully_shard(layer)
    fully_shard(model)
    return model


def batch() -> Tensor:
    return torch.arange(SEQUENCES * TOKENS).reshape(SEQUENCES, TOKENS) % VOCABULARY


@contextlib.contextmanager
def group() -> Iterator[None]:
    """The ranks of this job, that torch's launcher would have started."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_of(job: str, rings: Path, folder: Path, rank: int) -> None:
    with group():
        match job:
            case "slow":
                _slow(rings, rank)
            case "uneven":
                _uneven(rings, rank)
            case _:
                _stages(folder / "alone", rank)
                _in_between(folder / "alone", rank)


def _slow(rings: Path, rank: int) -> None:
    """Sharded parameters, recomputed layers: every layer waits for all ranks."""
    torch.manual_seed(0)
    model = sharded(Model(Pace(rank, becomes_slow=True), recomputes=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = Lengths(rank, is_uneven=False)
    pace = pacekeeper.attach(model, optimizer, job="slow", ring_dir=str(rings))
    for _ in range(STEPS):
        ids = lengths.batch()["input_ids"]
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    pace.detach()


def _uneven(rings: Path, rank: int) -> None:
    """Replicas that accumulate two batches, one of which has long sequences only."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(Pace(rank, becomes_slow=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    lengths = Lengths(rank, is_uneven=True)
    pace = pacekeeper.attach(model, optimizer, job="uneven", ring_dir=str(rings))
    for _ in range(STEPS):
        for number in range(2):
            ids = lengths.batch()["input_ids"]
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    pace.detach()


def _stages(rings: Path, rank: int) -> None:
    """Two stages in 1F1B; the first one is slow, and the second waits for it."""
    torch.manual_seed(0)
    whole = Model()
    slow = nn.Sequential(whole.embed, Slow(PIECES["stages"] / 2))
    part: nn.Module = slow if rank == 0 else whole.head
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
    pace = pytorch.attach(job="stages", role=f"stage{rank}", ring_dir=str(rings))
    for step in range(WAYS_STEPS):
        ids = batch()
        with pace.step(step), pace.micro_batch_timer(tokens=ids.numel(), tensor_share=0.5):
            if rank == 0:
                schedule.step(ids)
            else:
                schedule.step(target=ids)
    pace.detach()


class Slow(nn.Module):
    """A layer of a device that takes its time."""

    def __init__(self, takes_s: float) -> None:
        super().__init__()
        self.takes_s = takes_s

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.takes_s)
        return hidden


def _in_between(rings: Path, rank: int) -> None:
    """Shards; evaluations and waits between steps, a wait that is told and overheard as well."""
    torch.manual_seed(0)
    model = Model()
    model.layers.append(Slow(PIECES["between"] if rank == 1 else 0.0))
    model = sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pace = pytorch.attach(job="between", ring_dir=str(rings))
    for step in range(WAYS_STEPS):
        ids = batch()
        with pace.step(step) as result, pace.micro_batch_timer(tokens=ids.numel()):
            loss = loss_of(model(ids), ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with pace.waiting():
                dist.all_reduce(loss.detach())
            result.loss = float(loss)
        model.eval()
        with torch.no_grad():
            model(ids)
        model.train()
        dist.barrier()
    pace.detach()


def alone(folder: Path) -> None:
    """What needs no other rank; each of them a job."""
    rings = str(folder / "alone")
    _compiled(rings)
    _scaled(rings)
    _raising(rings)
    nowhere = pytorch.attach(job="nowhere", ring_dir=str(Path(__file__)))
    with nowhere.step(0), nowhere.micro_batch_timer(tokens=1):
        pass
    nowhere.detach()
    print("all are done")


def _compiled(rings: str) -> None:
    """One graph, with and without us: the lines stand around it."""
    from torch._dynamo.testing import CompileCounter

    graphs: Any = CompileCounter()
    plain = Model(recomputes=True)
    model = torch.compile(plain, backend=graphs, fullgraph=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    pace = pytorch.attach(job="compiled", ring_dir=rings)
    for step in range(WAYS_STEPS):
        ids = batch()
        with pace.step(step), pace.micro_batch_timer(tokens=ids.numel()):
            loss_of(model(ids), ids).backward()
        optimizer.step()
    pace.detach()
    assert graphs.frame_count == 1, graphs.frame_count


def _scaled(rings: str) -> None:
    """Mixed precision; in step 1 gradients overflow, and the optimizer is not called."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pace = pytorch.attach(job="scaled", ring_dir=rings)
    for step in range(WAYS_STEPS):
        ids = batch()
        before = model.head.weight.detach().clone()
        with pace.step(step):
            with (
                pace.micro_batch_timer(tokens=ids.numel()),
                torch.autocast("cpu", dtype=torch.bfloat16),
            ):
                loss = loss_of(model(ids), ids) * (float("inf") if step == 1 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert torch.equal(before, model.head.weight) == (step == 1)
    pace.detach()


def _raising(rings: str) -> None:
    """A batch out of bounds in step 1, which is done again with the next one."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    pace = pytorch.attach(job="raising", ring_dir=rings)
    for step, wrong in ((0, 0), (1, VOCABULARY), (1, 0), (2, 0)):
        ids = batch() + wrong
        with (
            contextlib.suppress(IndexError),
            pace.step(step),
            pace.micro_batch_timer(tokens=ids.numel()) as told,
        ):
            told.add_expert_rows([ids.numel() - 3, 0, 3])
            loss_of(model(ids), ids % VOCABULARY).backward()
            optimizer.step()
    pace.detach()


if __name__ == "__main__":
    sys.exit(run_all(rank_of, alone, jobs=("slow", "uneven", "ways")))
