"""The emulated accelerator and injected faults: declared, never hidden, and off unless asked for.

Emulated: the rank does its real arithmetic, then waits until the modelled device time of the
counted work (floating-point operations, bytes, kernels; this rank's speed; jitter) has passed, and
reports that time, as device events would. The detector sees only what a real trainer reports.
"""

import contextlib
import json
import math
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from pacekeeper.core.config import TrainConfig
from pacekeeper.trainer.timing import ComputeTime
from pacekeeper.trainer.work import (
    Work,
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
_SPIN_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Time of work on the emulated device: kernels * kernel_s + max(compute, memory traffic)."""

    flops_per_s: float
    bytes_per_s: float
    kernel_s: float

    def time_s(self, work: Work) -> float:
        """Seconds at full speed (roofline plus a fixed cost per kernel)."""
        return work.kernels * self.kernel_s + max(
            work.flops / self.flops_per_s, work.bytes / self.bytes_per_s
        )

    @classmethod
    def calibrated(cls, config: TrainConfig, world_size: int) -> "DeviceModel":
        """A device on which an even share of the global batch takes `emulated_step_s`."""
        work = even_step_work(config, world_size)
        compute_s = config.emulated_step_s * (1.0 - KERNEL_SHARE)
        flops_per_s = work.flops / compute_s
        return cls(
            flops_per_s=flops_per_s,
            bytes_per_s=flops_per_s / FLOPS_PER_BYTE,
            kernel_s=config.emulated_step_s * KERNEL_SHARE / work.kernels,
        )


def even_step_work(config: TrainConfig, world_size: int) -> Work:
    """Forward and backward work of one rank's even share, documents of a quarter row."""
    tokens = config.rows_per_step * config.row_tokens // world_size
    squared = tokens * config.row_tokens // 4
    rows = tokens * config.experts_per_token
    active = max(1, config.num_experts * config.replicas // world_size)
    hidden = config.hidden_size
    layer = (
        attention_work(tokens, squared, hidden)
        + router_work(tokens, hidden, config.num_experts)
        + expert_work(rows, active, hidden, config.expert_hidden_size)
        + combine_work(tokens, config.experts_per_token, hidden)
    )
    forward = layer.scaled(config.num_layers) + head_work(tokens, hidden, VOCABULARY)
    per_micro_batch = Work(flops=forward.flops, bytes=forward.bytes)
    kernels = Work(kernels=forward.kernels * config.num_microbatches)
    return (per_micro_batch + kernels).scaled(3.0)


@dataclass(slots=True, kw_only=True)
class EmulatedClock:
    """The segment clock of an emulated device. `slowdown` is the fault: 1.0 = healthy."""

    meter: WorkMeter
    device: DeviceModel
    jitter: float
    seed: int
    slowdown: float = 1.0
    num_segments: int = 0
    num_overruns: int = 0  # segments whose real arithmetic took longer than the modelled time
    _random: random.Random = field(init=False)
    _began_s: float = 0.0
    _paused_s: float = 0.0
    _compute_s: float = 0.0
    _wait_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def begin(self) -> None:
        self._compute_s = self._wait_s = 0.0
        self._began_s = time.perf_counter()

    def pause(self) -> None:
        modelled_s = self.device.time_s(self.meter.take()) * self.slowdown
        if self.jitter > 0.0:
            # Mean 1: jitter moves single segments, not the average.
            modelled_s *= math.exp(self._random.gauss(-(self.jitter**2) / 2, self.jitter))
        due_s = self._began_s + modelled_s
        self.num_segments += 1
        if modelled_s > 0.0 and time.perf_counter() > due_s:
            self.num_overruns += 1
        _wait_until(due_s)
        self._compute_s += modelled_s
        self._paused_s = time.perf_counter()

    def resume(self) -> None:
        self._began_s = time.perf_counter()
        self._wait_s += self._began_s - self._paused_s

    def end(self) -> ComputeTime | None:
        self.meter.finish_backward()
        self.pause()
        return ComputeTime(
            compute_s=self._compute_s, wait_s=self._wait_s, ended_mono_s=time.monotonic()
        )


@dataclass(slots=True, kw_only=True)
class Burner:
    """Real extra compute for the CPU clock: (slowdown - 1) times a segment's own CPU time."""

    slowdown: float = 1.0

    def __call__(self, spent_s: float) -> None:
        if self.slowdown <= 1.0:
            return
        until_s = time.thread_time() + (self.slowdown - 1.0) * spent_s
        while time.thread_time() < until_s:
            sum(range(100))


@dataclass(slots=True, kw_only=True)
class FaultInjector:
    """Obeys `directory`/rank-R.json and writes down what it did, with the step, in truth.jsonl.

    `{"slowdown": 1.6, "kind": "compute"}`; looked at once per step, only re-read when it changed.
    """

    directory: Path
    rank: int
    target: EmulatedClock | Burner
    _stamp_ns: int = 0

    def step_began(self, step: int) -> None:
        """Set the target's slowdown to what the file says now."""
        path = self.directory / f"rank-{self.rank}.json"
        try:
            stamp_ns = path.stat().st_mtime_ns
            if stamp_ns == self._stamp_ns:
                return
            order = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return  # none, or in the middle of being written: look again at the next step
        self._stamp_ns = stamp_ns
        self.target.slowdown = float(order["slowdown"])
        line = {
            "rank": self.rank,
            "kind": order.get("kind", "compute"),
            "slowdown": self.target.slowdown,
            "step": step,
            "mono_s": time.monotonic(),
        }
        with (self.directory / "truth.jsonl").open("a") as truth:
            truth.write(json.dumps(line) + "\n")


def stop_duty_cycle(pid: int, *, duty: float, period_s: float, seconds: float) -> None:
    """Stop the process `pid` for `duty` of each period (SIGSTOP, SIGCONT); always ends running.

    Raises ValueError for a duty outside (0, 1); ends early where the process is gone.
    """
    if not 0.0 < duty < 1.0:
        raise ValueError(f"duty: expected between 0 and 1, got {duty}")
    give_up_s = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        try:
            while time.monotonic() < give_up_s:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(period_s * duty)
                os.kill(pid, signal.SIGCONT)
                time.sleep(period_s * (1.0 - duty))
        finally:
            os.kill(pid, signal.SIGCONT)


def _wait_until(due_s: float) -> None:
    """Sleep to just before, then watch the clock: late wake-ups would look like slowness."""
    left_s = due_s - time.perf_counter()
    if left_s > _SPIN_S:
        time.sleep(left_s - _SPIN_S / 2)
    while time.perf_counter() < due_s:
        time.sleep(0)
