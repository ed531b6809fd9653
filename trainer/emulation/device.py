"""The emulated accelerator of the byte trainer: declared, never hidden, off unless asked for.

Emulated: the rank does its real arithmetic, then waits until the modelled device time of the
counted work (floating-point operations, bytes, kernels; this rank's speed; jitter) has passed, and
reports that time, as device events would. The detector sees only what a real trainer reports.
"""

import math
import random
import time
from dataclasses import dataclass, field

from pacekeeper.core.config.train import TrainConfig
from pacekeeper.trainer.emulation.faults import Burner as Burner
from pacekeeper.trainer.emulation.faults import wait_until
from pacekeeper.trainer.hooks.compute_timers import ComputeTime, WallClock
from pacekeeper.trainer.toy.model.flop_counter import (
    OpCount,
    WorkMeter,
    attention_work,
    combine_work,
    expert_work,
    head_work,
    router_work,
)

VOCABULARY = 256  # bytes
KERNEL_SHARE = 0.15  # of an even step's time goes into starting kernels
FLOPS_PER_BYTE = 4.0  # balance of the emulated device: most segments are compute-bound


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Time of work on the emulated device: kernels * kernel_s + max(compute, memory traffic)."""

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float

    def time_s(self, work: OpCount) -> float:
        """Seconds at full speed (roofline plus a fixed cost per kernel)."""
        return work.kernels * self.kernel_s + max(
            work.flops / self.flops_per_s, work.bytes / self.bytes_per_s
        )

    @classmethod
    def calibrated(cls, config: TrainConfig, world_size: int) -> "DeviceModel":
        """A device on which an even share of the global batch takes `emulated_step_s`."""
        work = even_step_work(config, world_size)
        compute_s = config.emulated_step_s * (1.0 - KERNEL_SHARE)
        # A narrow model is bound by memory traffic: its step shall take that long all the same.
        flops_per_s = max(work.flops, work.bytes * FLOPS_PER_BYTE) / compute_s
        return cls(
            flops_per_s=flops_per_s,
            bytes_per_s=flops_per_s / FLOPS_PER_BYTE,
            kernel_s=config.emulated_step_s * KERNEL_SHARE / work.kernels,
        )


def even_step_work(config: TrainConfig, world_size: int) -> OpCount:
    """Forward and backward work of one rank's even share, documents of a quarter row."""
    # A stage has its part of the layers, and as many times the tokens.
    layers = config.num_layers / config.num_stages
    tokens = config.rows_per_step * config.row_tokens * config.num_stages // world_size
    squared = tokens * config.row_tokens // 4
    rows = tokens * config.experts_per_token
    active = max(1, config.num_experts * config.replicas * config.num_stages // world_size)
    hidden = config.hidden_size
    layer = (
        attention_work(tokens, squared, hidden)
        + router_work(tokens, hidden, config.num_experts)
        + expert_work(rows, active, hidden, config.expert_hidden_size)
        + combine_work(tokens, config.experts_per_token, hidden)
    )
    head = head_work(tokens, hidden, VOCABULARY).scaled(1.0 / config.num_stages)  # in the mean
    forward = layer.scaled(layers) + head
    # Micro-batches share out flops and bytes, but each starts all the kernels.
    started = forward.kernels * config.num_microbatches
    return OpCount(flops=forward.flops, bytes=forward.bytes, kernels=started).scaled(3.0)


@dataclass(slots=True, kw_only=True)
class EmulatedClock(WallClock):
    """The segment clock of an emulated device. `slowdown` is the fault: 1.0 = healthy."""

    meter: WorkMeter
    device: DeviceModel
    jitter: float
    seed: int
    slowdown: float = 1.0
    num_segments: int = 0
    num_overruns: int = 0  # segments whose real arithmetic took longer than the modelled time
    overrun_s: float = 0.0  # by how much, in all: time that no such device would have needed
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def pause(self) -> None:
        modelled_s = self.device.time_s(self.meter.take()) * self.slowdown
        if self.jitter > 0.0:
            # Mean 1: jitter moves single segments, not the average.
            modelled_s *= math.exp(self._random.gauss(-(self.jitter**2) / 2, self.jitter))
        due_s = self._began_s + modelled_s
        self.num_segments += 1
        late_s = time.perf_counter() - due_s
        if modelled_s > 0.0 and late_s > 0.0:
            self.num_overruns += 1
            self.overrun_s += late_s
        wait_until(due_s)
        self._compute_s += modelled_s
        self._paused_s = time.perf_counter()

    def end(self) -> ComputeTime | None:
        self.pause()
        return ComputeTime(
            compute_s=self._compute_s, wait_s=self._wait_s, ended_mono_s=time.monotonic()
        )
