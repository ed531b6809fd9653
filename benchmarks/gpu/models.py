"""Engines of the sections: in mixed precision, with a process group of one rank, and watched."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.common import Size, synchronize
from pacekeeper.agent.rings.collector import RingCollector
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.trainer.adapters.reporter import default_clock
from pacekeeper.trainer.engine.engine import Engine
from pacekeeper.trainer.groups.devices import device_uuid
from pacekeeper.trainer.groups.engine_groups import EngineGroups
from pacekeeper.trainer.hooks import hooks

JOB = "gpu"


def use_loopback() -> None:
    """Let process groups of this machine alone use its loopback, unless the user says otherwise."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")


def meet(backend: str, folder: str, rank: int = 0, world_size: int = 1) -> None:
    """Form the default process group of the ranks that meet in a folder."""
    use_loopback()
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


@contextmanager
def one_rank(device: torch.device) -> Iterator[EngineGroups]:
    """The groups of a job of one rank, over NCCL on a GPU and gloo on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        meet("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", folder)
        yield EngineGroups.from_torch(device)
        synchronize(device)
        dist.destroy_process_group()


def engine_of(
    size: Size, device: torch.device, *, groups: EngineGroups | None = None, **options: Any
) -> Engine:
    """An engine in mixed precision, the same weights each time, unless `options` say otherwise."""
    given: dict[str, Any] = {"compute_dtype": torch.bfloat16, "max_grad_norm": 1.0, **options}
    return Engine.from_config(size.config, seed=7, device=device, groups=groups, **given)


def add_adamw(engine: Engine, rate: float = 1e-3) -> None:
    """Train all parameters with AdamW, as `pacekeeper launch` does."""
    is_fused = engine.device.type == "cuda"
    engine.add_optimizer(torch.optim.AdamW(engine.parameters(), lr=rate, fused=is_fused))


class Watched:
    """Attaches engines to rings of a folder, and reads the rings as the agent does."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._collector = RingCollector(directory=folder)

    def watch(self, engine: Engine) -> hooks.Hooks:
        """Attach an engine, with the clock of its device."""
        found = self.attach()
        engine.watch(found)
        return found

    def attach(self) -> hooks.Hooks:
        """Attach to a ring, with the clock of the device."""
        clock, timer = default_clock(self._device)
        found = hooks.attach(
            job=JOB,
            rank=0,
            world_size=1,
            ring_dir=str(self._folder),
            clock=clock,
            timer=timer,
            device_uuid=device_uuid(self._device),
        )
        found.set_generation(1)
        return found

    def records(self) -> list[MicroBatchRecord]:
        """The micro-batches since the last call, in order."""
        return [
            record
            for reading in self._collector.poll(time.monotonic())
            for record in reading.records
            if isinstance(record, MicroBatchRecord)
        ]


@contextmanager
def watched(device: torch.device) -> Iterator[Watched]:
    """Rings in memory for as long as the block lasts."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Watched(Path(folder), device)
