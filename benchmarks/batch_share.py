"""Batch shares in a plain training script: throughput with one slow rank, equality of gradients.

`python -m benchmarks.batch_share [--trainer ddp|fsdp2] [--speed X]`; about a minute. Four ranks
(gloo, one process each) train a tiny model in float64 beside a real agent and controller; a sleep
for each micro-batch stands for the device, and from some step on one rank's takes 1 / X as long.
The controller finds it and offers shares; once the rank is well again, it takes them back.

`fluid_fraction`: throughput under the plan over that of ranks whose work could be divided without
limit, the sum of their speeds; `without_plan` the same before. Steps of the job itself while all
were well are the measure of speed 1. `gradient_error`: the largest difference of any gradient in
any step from one process that computes the whole batch, over the largest gradient. `beside_sleep`:
what a step of a well job takes beyond the sleeps, a part of them; much of it is a busy host, on
which `fluid_fraction` says little. `is_beyond_bound`: it is more than 2 % above what whole
micro-batches allow, since the host was busier while all were well: run it again. `has_returned`:
once the rank was well again, shares were even for the last 20 steps. Prints a table, last one line
of JSON; ends with 1 where `fluid_fraction` is below 0.9 or beyond the bound, `gradient_error` above
1e-9, or shares did not return.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from pacekeeper.trainer.adapters import pytorch
from pacekeeper.trainer.adapters.batch_shares import BatchShares, ShareSchedule, step_loader

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

JOB, RANKS, SLOW_RANK = "batch-share", 4, 2
PER_STEP, ROWS, TOKENS, WORDS = 40, 2, 16, 32
S_PER_MICRO_BATCH = 0.03
LEAST_FRACTION, MOST_ERROR = 0.9, 1e-9
BEYOND = 1.02  # of what whole micro-batches allow: by more than noise
SLOW_FROM, MEASURED, MOST_STEPS = 45, 20, 400
COMMAND = (sys.executable, "-m", "pacekeeper.cli.main")


class Rows(Dataset[dict[str, Tensor]]):
    """Drawn tokens; labels are the tokens, some of which no loss counts."""

    def __len__(self) -> int:
        return PER_STEP * ROWS * MOST_STEPS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(WORDS, (TOKENS,), generator=draw)
        labels = ids.where(torch.arange(TOKENS) >= number % 5, -100)
        return {"input_ids": ids, "labels": labels}


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return nn.Sequential(nn.Embedding(WORDS, 8), layers, nn.Linear(8, WORDS)).double()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the tokens that have a label."""
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def wrapped(trainer: str, model: Any) -> nn.Module:
    """The model as such a script has it."""
    if trainer == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model[1])
    fully_shard(model)
    return model  # type: ignore[no-any-return]


def train(trainer: str, speed: float, rings: str, folder: Path, rank: int) -> None:
    """One rank: trains until the plan was in force and was taken back."""
    dist.init_process_group("gloo")
    model, alone, rows = wrapped(trainer, make_model()), make_model(), Rows()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    schedule = ShareSchedule(rank=rank, num_ranks=RANKS, micro_batches_per_step=PER_STEP)
    pace = pytorch.attach(job=JOB, ring_dir=rings, micro_batches_per_step=PER_STEP)
    shares = BatchShares(pace, model, schedule)
    loader = step_loader(schedule, rows, rows_per_micro_batch=ROWS, is_shuffled=False)
    told, error, left = list[dict[str, Any]](), 0.0, MEASURED
    even = schedule.at(0)
    for step, own in enumerate(loader):
        counts, began_s = schedule.at(step), time.monotonic()
        was_planned = any(one["counts"] != even for one in told)
        is_slow = step >= SLOW_FROM and (not was_planned or left > 0)
        slowdown = 1.0 / speed if rank == SLOW_RANK and is_slow else 1.0
        with pace.step(step):
            for batch in shares.micro_batches(own):
                with pace.micro_batch_timer(tokens=batch["input_ids"].numel()):
                    time.sleep(S_PER_MICRO_BATCH * slowdown)
                    shares.backward(loss_of(model, batch))
            took_s = time.monotonic() - began_s
            whole = range(step * PER_STEP * ROWS, (step + 1) * PER_STEP * ROWS)
            loss_of(alone, default_collate([rows[number] for number in whole])).backward()
            error = max(error, difference(model, alone))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        told.append({"counts": counts, "slow": is_slow, "took_s": took_s})
        left -= counts != even
        if has_returned(told):
            break
    pace.detach()
    (folder / f"rank-{rank}.json").write_text(json.dumps({"steps": told, "error": error}))
    dist.destroy_process_group()


def has_returned(told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether other shares than the first were in force, and, all well, not in the last steps."""
    even, last = told[0]["counts"], told[-MEASURED:]
    was_planned = any(one["counts"] != even for one in told)
    return was_planned and all(one["counts"] == even and not one["slow"] for one in last)


def difference(model: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a gradient, over the largest gradient."""
    worst = largest = 0.0
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = one.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        assert other.grad is not None
        worst = max(worst, (gradient - other.grad).abs().max().item())
        largest = max(largest, other.grad.abs().max().item())
    return worst / largest


@contextmanager
def watched(folder: Path) -> Iterator[Path]:
    """A controller and an agent; yields the agent's ring directory."""
    rings, processes = folder / "rings", list[subprocess.Popen[str]]()
    rings.mkdir()

    def start(*arguments: str) -> subprocess.Popen[str]:
        log = (folder / f"{arguments[0]}.log").open("w")
        with log:
            processes.append(
                subprocess.Popen(
                    [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=log, text=True
                )
            )
        return processes[-1]

    try:
        controller = start(
            "controller",
            "--listen",
            "127.0.0.1:0",
            "--api-listen",
            "127.0.0.1:0",
            "--store",
            str(folder / "store.sqlite"),
        )
        assert controller.stdout is not None
        address = controller.stdout.readline().split()[2]
        start(
            "agent", "--controller", address, "--node", "node-0", "--ring-dir", str(rings),
            "--metrics-listen", "",
        )  # fmt: skip
        yield rings
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def main() -> int:
    """Print the table, then one line of JSON; return 1 where a bar is missed."""
    from support.forked_ranks import fork_ranks

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--speed", type=float, default=0.5, help="of the slow rank, 1: as others")
    parser.add_argument("--data", help="not needed: tokens are drawn")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with watched(folder) as rings:
            body = functools.partial(train, given.trainer, given.speed, str(rings), folder)
            pids = fork_ranks(body, folder / "rank", RANKS)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit("\n".join(path.read_text()[-2000:] for path in folder.glob("*.log")))
        ranks = [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(RANKS)]
    steps = ranks[0]["steps"]
    even, total_speed = steps[0]["counts"], RANKS - 1 + given.speed
    # Before and after: what else the host does changes meanwhile.
    healthy_s = statistics.median(
        one["took_s"] for one in steps[5:] if not one["slow"] and one["counts"] == even
    )
    before = [one["took_s"] for one in steps if one["slow"] and one["counts"] == even]
    planned = [one for one in steps if one["slow"] and one["counts"] != even]
    if not planned:
        sys.exit("no plan came into force: the host is too busy, or the rank too fast")
    planned_s = statistics.median(one["took_s"] for one in islice(planned, 2, None))
    counts = planned[-1]["counts"]
    fluid_s = healthy_s * RANKS / total_speed
    speeds = [given.speed if rank == SLOW_RANK else 1.0 for rank in range(RANKS)]
    longest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    table = Table("", "a step", "of the fluid limit")
    for what, took_s in (
        ("all well, even shares", healthy_s),
        ("one slow, even shares", statistics.median(before)),
        ("one slow, shares of the plan", planned_s),
    ):
        share = "" if took_s is healthy_s else f"{fluid_s / took_s:.3f}"
        table.add_row(what, f"{took_s * 1e3:.0f} ms", share)
    Console().print(table)
    fraction, error = fluid_s / planned_s, max(rank["error"] for rank in ranks)
    bound, is_home = PER_STEP / total_speed / longest, has_returned(steps)
    is_beyond = fraction > bound * BEYOND
    if is_beyond:
        print("beyond the bound: run it again", file=sys.stderr)
    is_met = fraction >= LEAST_FRACTION and not is_beyond and error <= MOST_ERROR and is_home
    result = {
        "trainer": given.trainer,
        "is_met": is_met,
        "fluid_fraction": round(fraction, 4),
        "is_beyond_bound": is_beyond,
        "has_returned": is_home,
        "without_plan": round(fluid_s / statistics.median(before), 4),
        "bound_of_whole_micro_batches": round(bound, 4),
        "micro_batches": counts,
        "steps_to_relief": len(before),
        "steps_to_return": sum(not one["slow"] and one["counts"] != even for one in steps),
        "gradient_error": error,
        "beside_sleep": round(healthy_s / (even[0] * S_PER_MICRO_BATCH) - 1.0, 3),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
