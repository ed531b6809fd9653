"""Whole jobs of `pacekeeper launch`: one rank that saves and resumes, and ranks that are struck."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.common import NotRun, Scale, Size, figure, require
from benchmarks.gpu.ranks import MOST_RANKS, random_layout
from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.layout.codec import decode_layout, encode_layout
from pacekeeper.core.telemetry.node_report import PlanFile
from pacekeeper.trainer.groups.reconfiguring import can_reconfigure

JOB = "gpu"
_FOREVER = 100_000  # steps
_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Figures of `launch_one_rank`."""

    way: str = figure("started by")
    steps: int = figure("steps")
    first_loss: float = figure("loss of the first step, on text that counts upwards")
    last_loss: float = figure("loss of the last step")
    step_s: float = figure("median seconds of a step")
    resumed_at: int | None = figure("step at which a second start went on from the checkpoint")
    start_s: float = figure("seconds from the command to the first step")


def launch_one_rank(device: torch.device, scale: Scale) -> Launched:
    """Start `pacekeeper launch` with one rank, and again from its checkpoint.

    With torch before 2.15 on CUDA as one rank of torchrun, which has no checkpoints.
    """
    is_elastic = device.type == "cpu" or can_reconfigure(device)
    own = {"checkpoint_period_steps": scale.steps // 2} if is_elastic else {}
    with job(scale.small, device, 1, steps=scale.steps, saves=is_elastic, **own) as one:
        began_s = time.monotonic()
        with one.started(None if is_elastic else _TORCHRUN) as process:
            one.await_(process, lambda: bool(one.lines()))
            start_s = time.monotonic() - began_s
            _end(process, 0)
        first = one.lines()
        resumed_at = None
        if is_elastic:
            one.write(steps=scale.steps + 4)
            with one.started() as process:
                _end(process, 0)
            resumed_at = next(line["step"] for line in one.rank_lines() if "loss" in line)
            require(resumed_at == scale.steps, f"the second start began at step {resumed_at}")
    losses = [line["loss"] for line in first]
    require(losses[-1] < losses[0], f"the loss rose from {losses[0]} to {losses[-1]}")
    return Launched(
        way="pacekeeper launch" if is_elastic else "pacekeeper launch under torchrun's variables",
        steps=len(first),
        first_loss=losses[0],
        last_loss=losses[-1],
        step_s=float(np.median([line["seconds"] for line in first[1:]])),
        resumed_at=resumed_at,
        start_s=start_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """Figures of `survive`."""

    ranks: int = figure("ranks, with a device each")
    plan_s: float = figure("seconds of a plan: experts on random ranks")
    kill_s: float = figure("seconds of regrouping after SIGKILL of a rank")
    freeze_s: float = figure("seconds of regrouping after SIGSTOP of a rank")
    loss_apart: float = figure("largest relative difference of a loss to an undisturbed run")


def survive(device: torch.device, scale: Scale) -> Survival:
    """Kill and freeze ranks of elastic jobs, and give one a plan: they train on, exactly."""
    if device.type == "cuda" and not can_reconfigure(device):
        raise NotRun(f"elastic jobs on CUDA need torch 2.15 or later, this is {torch.__version__}")
    count = min(torch.cuda.device_count(), MOST_RANKS) if device.type == "cuda" else 2
    with job(scale.small, device, count, steps=12) as one:
        with one.started() as process:
            _end(process, 0)
        wanted = [line["loss"] for line in one.lines()]
    took, apart = {}, 0.0
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with job(scale.small, device, count, steps=_FOREVER) as one, one.started() as process:
            one.await_(process, lambda: len(one.lines()) > 4)
            if number == signal.SIGKILL:
                one.offer_plan(process)
                took["plan"] = one.event(process, "plan", 2)["took_s"]
            os.kill(one.pid(process, count - 1), number)
            took[number.name] = one.event(process, "regroup", 1)["took_s"]
            one.await_(process, lambda: len(one.lines()) > len(wanted))
            process.terminate()
            _end(process, 0)
            found = one.lines()
        require([line["step"] for line in found] == list(range(len(found))), "a step is missing")
        losses = [line["loss"] for line in found]
        apart = max(apart, *(abs(a / b - 1.0) for a, b in zip(losses, wanted, strict=False)))
    return Survival(
        ranks=count,
        plan_s=took["plan"],
        kill_s=took["SIGKILL"],
        freeze_s=took["SIGSTOP"],
        loss_apart=apart,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job in a folder: model, data and settings; where its records are."""

    folder: Path
    size: Size
    ranks: int
    settings: Mapping[str, Any]

    def write(self, **changes: Any) -> None:
        """Write the settings."""
        lines = [f"{name} = {json.dumps(v)}" for name, v in {**self.settings, **changes}.items()]
        (self.folder / "job.toml").write_text("\n".join(["[engine]", *lines, ""]))

    @contextmanager
    def started(
        self, environment: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """The command, until it is left; `environment` makes it a rank of torchrun."""
        command = [sys.executable, "-m", "pacekeeper.cli.main", "launch"]
        command += [
            "--config",
            str(self.folder / "job.toml"),
            "--run-dir",
            str(self.folder / "run"),
        ]
        command += ["--ring-dir", str(self.folder / "rings")]
        given = {name: v for name, v in os.environ.items() if name not in _TORCHRUN}
        if environment is None:
            command += ["--ranks-per-node", str(self.ranks)]
            command += ["--rendezvous", f"127.0.0.1:{_free_port()}"]
        else:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            given |= {**environment, **place}
        with subprocess.Popen(command, env=given) as process:
            try:
                yield process
            finally:
                process.kill()  # its ranks end with it

    def lines(self) -> list[dict[str, Any]]:
        """The step log."""
        return _read_lines(self.folder / "run" / "steps.jsonl")

    def rank_lines(self) -> list[dict[str, Any]]:
        """The log of rank 0 since it was started last: steps and events."""
        return _read_lines(self.folder / "run" / "steps-0.jsonl")

    def event(self, process: subprocess.Popen[bytes], name: str, count: int) -> dict[str, Any]:
        """The event of rank 0 with this name that comes as number `count`."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.rank_lines() if line.get("event") == name]

        self.await_(process, lambda: len(found()) >= count)
        return found()[count - 1]

    def pid(self, process: subprocess.Popen[bytes], rank: int) -> int:
        """The process of a rank, as the agent knows it."""
        collector = RingCollector(directory=self.folder / "rings")

        def find() -> bool:
            collector.poll(time.monotonic())
            return rank in collector.pids().get(JOB, {})

        self.await_(process, find)
        found = collector.pids()[JOB][rank]
        collector.close()
        return found

    def offer_plan(self, process: subprocess.Popen[bytes]) -> None:
        """Offer random replicas and shares, as the agent of a node does."""
        collector = RingCollector(directory=self.folder / "rings")
        layouts: list[tuple[int, int, bytes]] = []

        def find() -> bool:
            for reading in collector.poll(time.monotonic()):
                layouts.extend((reading.run_id, *one) for one in reading.layouts)
            return bool(layouts)

        self.await_(process, find)
        run_id, generation, data = layouts[-1]
        plan = encode_layout(random_layout(decode_layout(data), Random(5), least=2))
        is_offered = collector.offer_plan(
            PlanFile(
                job=JOB,
                generation=generation + 1,
                base_generation=generation,
                data=plan,
                sha256=hashlib.sha256(plan).digest(),
                run_id=run_id,
            )
        )
        require(is_offered, "the plan could not be offered")
        collector.close()

    def await_(self, process: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
        """Wait until something is so; the section's own time limit ends it."""
        while not is_so():
            code = process.poll()
            require(code is None or is_so(), f"the job ended with {code}")
            time.sleep(0.02)


@contextmanager
def job(
    size: Size, device: torch.device, ranks: int, *, saves: bool = False, **own: Any
) -> Iterator[Job]:
    """A job of this model in a folder that goes when it is left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(size.config))
        source, tokens = Random(0), list[int]()
        end = size.vocabulary - 1
        while len(tokens) < 40 * size.rows * size.row_tokens:
            first = source.randrange(end)
            tokens += [(first + i) % end for i in range(source.randrange(20, 200))] + [end]
        np.asarray(tokens, dtype="<u2").tofile(folder / "tokens.bin")
        settings: dict[str, Any] = {
            "job": JOB,
            "model": str(folder / "model"),
            "data": [str(folder / "tokens.bin")],
            "data_dtype": "uint16",
            "data_end_of_document": end,
            "rows_per_step": 2 * size.rows,
            "rows_per_microbatch": size.rows // 2,
            "row_tokens": size.row_tokens,
            "learning_rate": 1e-3,
            "decay": "constant",
            "precision": "bfloat16",
            "device": device.type,
            "replicas": min(ranks, 2),
            "slots_per_rank": size.experts,
            "tick_s": 0.05,
            "peer_timeout_s": 8.0,
            "checkpoint_dir": str(folder / "saved") if saves else "",
        }
        found = Job(folder=folder, size=size, ranks=ranks, settings=settings | own)
        found.write()
        yield found


def _end(process: subprocess.Popen[bytes], code: int) -> None:
    found = process.wait()
    require(found == code, f"the job ended with {found}; its own messages say why")


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
