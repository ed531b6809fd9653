"""What an adapter costs the training thread, and what share of a step of the tests' models that is.

`python -m benchmarks.adapter_cost [--rounds N] [--only NAME]`; some minutes. The one line,
`pacekeeper.attach(model, optimizer)`, is measured in place, between marks around its hooks, for
short and for long micro-batches, and for short ones that leave the caches cold
(`benchmarks.attach_gaps`). The adapters of trainers, in whose code there are no marks, are measured
by steps: each trainer that is installed runs in a process of its own on one CPU, its steps with and
without the adapter in turn, with one and with four micro-batches in a step. A step lasts from one
step of the optimizer to the next, in CPU time of the training thread; of each run the lowest tenth
counts, and of the differences between runs in turn the median, with its quartiles. The models are
as small as tests want them, a few milliseconds a step, and a real step is a thousand times as long.
Prints tables, last one line of JSON; ends with 1 unless what the one line adds to a micro-batch of
each size, with its part of a step, is at most 50 us up to the end of its interval. Other adapters
have no bar.
"""

import argparse
import contextlib
import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import attach_gaps
from benchmarks.attach_gaps import COVERED, SIZES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

FEW, MANY = 1, 4  # micro-batches of a step
COLD = 5  # steps that say nothing yet
MOST_US = 50.0  # that the one line may add to a micro-batch, with its part of a step
KEPT = "kept"
Run = Callable[[bool, int, int, Path], None]  # watched, steps, micro-batches, folder of rings


def plain_torch(watched: bool, steps: int, batches: int, rings: Path) -> None:
    from pacekeeper.trainer.adapters import pytorch
    from support.torch_runs import Model, batch, loss_of

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = batch()
    pace = pytorch.attach(job="cost", device="cpu", ring_dir=str(rings)) if watched else None
    for step in range(steps):
        with pace.step(step) if pace else contextlib.nullcontext():
            for _ in range(batches):
                timer = pace.micro_batch_timer(tokens=ids.numel()) if pace else None
                with timer or contextlib.nullcontext():
                    loss_of(model(ids), ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    if pace:
        pace.detach()


def huggingface(watched: bool, steps: int, batches: int, rings: Path) -> None:
    from transformers import TrainerCallback

    from pacekeeper.trainer.adapters.huggingface import Pacekeeper
    from support.huggingface_runs import Paced, trainer

    watch = Pacekeeper(job="cost", ring_dir=str(rings)) if watched else TrainerCallback()
    options: dict[str, Any] = {
        "max_steps": steps,
        "gradient_accumulation_steps": batches,
        "logging_strategy": "no",
    }
    trainer(Paced(None), rings, watch, **options).train()


def lightning(watched: bool, steps: int, batches: int, rings: Path) -> None:
    import lightning.pytorch as package

    from pacekeeper.trainer.adapters.lightning import Pacekeeper
    from support.lightning_runs import automatic, loader, trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    watch = Pacekeeper(job="cost", ring_dir=str(rings)) if watched else package.Callback()
    options = {"max_steps": steps, "accumulate_grad_batches": batches}
    made = trainer(package, rings, watch, max_epochs=-1, **options)
    made.fit(automatic(package.LightningModule), loader(2 * steps * batches))


def deepspeed(watched: bool, steps: int, batches: int, rings: Path) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
    import deepspeed as library  # type: ignore[import-not-found,unused-ignore]

    from pacekeeper.trainer.adapters import deepspeed as adapter_deepspeed
    from support.deepspeed_rank import Model

    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    library.init_distributed("gloo", verbose=False)
    engine, *_ = library.initialize(
        model=Model({"world_size": 1}),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": batches,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 1_000_000,
        },
    )
    watch = None
    if watched:
        watch = adapter_deepspeed.watch(engine, job="cost", ring_dir=str(rings))
    for _ in range(steps * batches):
        engine.backward(engine(torch.zeros(2, 96, dtype=torch.int64)))
        engine.step()
    if watch is not None:
        watch.close()


def megatron(watched: bool, steps: int, batches: int, rings: Path) -> None:
    from pacekeeper.trainer.adapters import megatron as adapter_megatron
    from support import megatron_rank

    _one_rank_of_megatron()
    from megatron.core import pipeline_parallel  # type: ignore[import-not-found,unused-ignore]

    with megatron_rank.CudaIsTheCpu():
        model = megatron_rank._model(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        watch = None
        if watched:
            watch = adapter_megatron.watch(
                [model], job="cost", optimizer=optimizer, ring_dir=str(rings)
            )
        tokens = torch.zeros(2, 96, dtype=torch.int64)
        places = torch.arange(96).expand_as(tokens)

        def forward_step(_: Any, model: Any) -> Any:
            output = model(tokens, places, None, labels=tokens)
            return output, lambda losses: (losses.mean(), {})

        for _ in range(steps):
            optimizer.zero_grad()
            pipeline_parallel.get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter(()), model=[model],
                num_microbatches=batches, seq_length=96, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            optimizer.step()
        if watch is not None:
            watch.close()


@functools.cache
def _one_rank_of_megatron() -> None:
    from megatron.core import parallel_state  # type: ignore[import-not-found,unused-ignore]

    from support.megatron_rank import stand_in_for_cuda

    torch.distributed.init_process_group("gloo")
    stand_in_for_cuda()
    parallel_state.initialize_model_parallel()


def torchtitan(watched: bool, steps: int, batches: int, rings: Path) -> None:
    from pacekeeper.trainer.adapters import torchtitan as adapter_torchtitan
    from support.torchtitan_rank import trainer_of

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    case = {
        "world_size": 1, "steps": steps, "accumulates": batches, "evaluates_after": [],
        "batches": [[[[2, 96]] * batches]], "vocabulary": 64, "paces": [], "slow_from": 0,
    }  # fmt: skip
    trainer = trainer_of(case, 0)
    watch = adapter_torchtitan.watch(trainer, job="cost", ring_dir=str(rings)) if watched else None
    trainer.train()
    if watch is not None:
        watch.close()


ONE_LINE = "attach(model, optimizer)"
KINDS: dict[str, tuple[str, Run]] = {
    "told by blocks": ("torch", plain_torch),
    "Hugging Face": ("transformers", huggingface),
    "Lightning": ("lightning", lightning),
    "DeepSpeed": ("deepspeed", deepspeed),
    "Megatron-Core": ("megatron", megatron),
    "torchtitan": ("torchtitan", torchtitan),
}


@contextlib.contextmanager
def steps_marked() -> Iterator[list[float]]:
    """CPU time of this thread at each step of any optimizer."""
    marks: list[float] = []
    from torch.optim import optimizer

    hook = optimizer.register_optimizer_step_post_hook(lambda *_: marks.append(time.thread_time()))
    try:
        yield marks
    finally:
        hook.remove()


def measure(run: Run, steps: int, rounds: int) -> dict[str, Any]:
    """Return microseconds of CPU time of a step, and what the adapter adds to it."""
    torch.set_num_threads(1)
    spent: dict[tuple[bool, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for batches in (FEW, MANY):
                for watched in (False, True):
                    with steps_marked() as marks:
                        run(watched, steps, batches, Path(folder))
                    assert len(marks) == steps, (len(marks), steps)
                    took = [b - a for a, b in zip(marks[COLD:], marks[COLD + 1 :], strict=False)]
                    low_us = statistics.quantiles(took, n=10)[0] * 1e6
                    spent.setdefault((watched, batches), []).append(low_us)
    step_us = statistics.median(spent[False, MANY])
    added_us = {n: _differences(spent[True, n], spent[False, n]) for n in (FEW, MANY)}
    per_batch = [(m - f) / (MANY - FEW) for f, m in zip(*added_us.values(), strict=True)]
    return {
        "step_us": step_us,
        "added_us": statistics.median(added_us[MANY]),
        "per_micro_batch_us": statistics.median(per_batch),
        "per_micro_batch_quartiles_us": statistics.quantiles(per_batch, n=4)[::2],
        "ratio": 1.0 + statistics.median(added_us[MANY]) / step_us,
    }


def _differences(ones: list[float], others: list[float]) -> list[float]:
    return [one - other for one, other in zip(ones, others, strict=True)]


def in_a_process(name: str, steps: int, rounds: int) -> dict[str, Any]:
    """The same, in a process that has loaded nothing else."""
    more = ["--steps", str(steps), "--rounds", str(rounds), "--inside", name]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.adapter_cost", *more],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **place, "MASTER_PORT": _free_port(), "OMP_NUM_THREADS": "1"},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _free_port() -> str:
    from support.ports import free_port

    return str(free_port())


def main() -> int:
    """Print the tables, then one line of JSON; return 1 where the one line misses its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each kind")
    parser.add_argument("--only", choices=(ONE_LINE, *KINDS), help="this one alone")
    parser.add_argument("--inside", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.inside:
        run = KINDS[arguments.inside][1]
        print(json.dumps(measure(run, arguments.steps, arguments.rounds)))
        return 0
    before = os.getloadavg()[0]
    names = [arguments.only] if arguments.only else [ONE_LINE, *KINDS]
    outcome: dict[str, Any] = {"trainers": {}, "bar_us": MOST_US, "is_met": True}
    if ONE_LINE in names:
        names.remove(ONE_LINE)
        outcome["one_line"] = {s.name: attach_gaps.cost(s, arguments.rounds) for s in SIZES}
        for one in outcome["one_line"].values():
            one["bar"] = verdict(*one["interval_us"])
        outcome["is_met"] = all(one["bar"] == KEPT for one in outcome["one_line"].values())
    for name in names:
        if find_spec(KINDS[name][0]) is not None:
            found = in_a_process(name, arguments.steps, arguments.rounds)
            outcome["trainers"][name] = found
    outcome["not_installed"] = [n for n in names if n not in outcome["trainers"]]
    outcome["load"] = [round(before, 1), round(os.getloadavg()[0], 1)]
    show(outcome)
    print(json.dumps(outcome))
    return 0 if outcome["is_met"] else 1


def verdict(low_us: float, high_us: float) -> str:
    """Return what an interval of the cost says of the bar."""
    if high_us <= MOST_US:
        return KEPT
    return "MISSED" if low_us > MOST_US else "not shown: it lies within the noise"


def show(outcome: dict[str, Any]) -> None:
    """Print the tables for people."""
    if "one_line" in outcome:
        sizes = outcome["one_line"].values()
        table = Table(title=f"one line, us between marks; load {outcome['load']}")
        table.add_column("")
        for name, one in outcome["one_line"].items():
            table.add_column(f"{name}: {one['micro_batch_ms']:.1f} ms", justify="right")
        for name in attach_gaps.GAPS:
            table.add_row(name, *(f"{one['by_gap_us'][name]:.0f}" for one in sizes))
        keys = ("per_micro_batch_us", "per_step_us", "with_part_of_step_us", "bare_hooks_us")
        for key in keys:
            table.add_row(key.replace("_", " "), *(f"{one[key]:.0f}" for one in sizes))
        ends = (tuple(f"{end:.0f}" for end in one["interval_us"]) for one in sizes)
        table.add_row(f"{COVERED:.0%} of rounds drawn again", *(f"{a} to {b}" for a, b in ends))
        table.add_row(f"bar of {MOST_US:.0f} us", *(one["bar"] for one in sizes))
        Console().print(table)
    if not outcome["trainers"] and not outcome["not_installed"]:
        return
    table = Table(title=f"adapters, us of CPU time; load {outcome['load']}")
    for column in ("trainer", "step without", "added", "per micro-batch", "quartiles", "ratio"):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for name, one in outcome["trainers"].items():
        told = (one["step_us"], one["added_us"], one["per_micro_batch_us"])
        quartiles = " to ".join(f"{value:.0f}" for value in one["per_micro_batch_quartiles_us"])
        table.add_row(name, *(f"{value:.0f}" for value in told), quartiles, f"{one['ratio']:.3f}")
    for name in outcome["not_installed"]:
        table.add_row(name, "not installed")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
