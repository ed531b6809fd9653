"""Recorded runs of our own format, made line by line: one slow rank, and what its node showed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.records import MicroBatchRecord, StepRecord
from pacekeeper.core.telemetry.samples import DeviceSample, HostSample
from pacekeeper.core.telemetry.trace_jsonl import (
    TraceHeader,
    attached_line,
    header_line,
    record_line,
)

HOT, COOL = 0x40, 0x0  # NVML: hardware thermal slowdown; none
STEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """Ranks spread evenly over nodes; `slow` compute `slowdown` times as long from `onset` on."""

    nodes: int = 2
    ranks_per_node: int = 4
    steps: int = 60
    slow: tuple[int, ...] = (5,)
    slowdown: float = 1.3
    onset: int = 30
    is_hot: bool = False  # the slow rank's device, from the onset on
    stall_ratio: float = 0.0  # of what the slow rank loses, its thread was frozen
    has_samples: bool = True
    seed: int = 1

    @property
    def world(self) -> int:
        return self.nodes * self.ranks_per_node


def write_job(directory: Path, job: RecordedJob) -> list[Path]:
    """One file per node; each node's clock begins somewhere else."""
    random = np.random.default_rng(job.seed)
    noise = random.lognormal(0.0, 0.005, (job.steps, job.world))
    paths = []
    for node in range(job.nodes):
        ranks = range(node * job.ranks_per_node, (node + 1) * job.ranks_per_node)
        lines = [header_line(TraceHeader(job="moe", run_id=7, node=f"node-{node}"))]
        lines += [
            attached_line(
                Attachment(
                    job="moe", rank=rank, world_size=job.world, pid=100 + rank, run_id=7,
                    device_uuid=f"GPU-{rank}",
                )
            )
            for rank in ranks
        ]  # fmt: skip
        for step in range(job.steps):
            ended_s = 1000.0 * (node + 1) + (step + 1) * STEP_S
            lines += _step(job, ranks, step, ended_s, noise[step])
        path = directory / f"moe-7-node-{node}.trace.jsonl"
        path.write_text("\n".join(lines) + "\n")
        paths.append(path)
    return paths


def _step(
    job: RecordedJob, ranks: range, step: int, ended_s: float, noise: np.ndarray
) -> Iterator[str]:
    for rank in ranks:
        is_slow = rank in job.slow and step >= job.onset
        compute_s = 0.4 * float(noise[rank]) * (job.slowdown if is_slow else 1.0)
        lost_s = compute_s * (1.0 - 1.0 / job.slowdown) if is_slow else 0.0
        yield record_line(
            MicroBatchRecord(
                rank=rank, step=step, micro_batch=0, generation=1, compute_s=compute_s,
                tokens=1000, sum_len_squared=40_000, expert_rows=2000, run_queue_s=0.0,
                stall_s=job.stall_ratio * lost_s, ended_mono_s=ended_s - 0.1,
            )
        )  # fmt: skip
        yield record_line(
            StepRecord(
                rank=rank, step=step, generation=1, duration_s=STEP_S, tokens=8000,
                ended_mono_s=ended_s,
            )
        )  # fmt: skip
        if job.has_samples:
            yield record_line(device_sample(rank, ended_s, is_hot=job.is_hot and is_slow))
    if job.has_samples:
        yield record_line(HostSample(sampled_s=ended_s, num_cores=8, load_1min=2.0))


def device_sample(rank: int, sampled_s: float, *, is_hot: bool) -> DeviceSample:
    """A device at work, cool and at full clock, or so hot that it slows down."""
    return DeviceSample(
        device_index=rank, device_uuid=f"GPU-{rank}", sampled_s=sampled_s, name="H100",
        sm_clock_mhz=1300.0 if is_hot else 1980.0, sm_clock_max_mhz=1980.0,
        temperature_celsius=91.0 if is_hot else 60.0, power_watts=500.0, power_limit_watts=700.0,
        utilisation_ratio=1.0, clock_event_reasons=HOT if is_hot else COOL,
    )  # fmt: skip


NUM_RANKS, NUM_STEPS = 8, 40


def write_run(
    path: Path, *, late: int | None = None, bad: int = 0, dead: int | None = None
) -> Path:
    """A run of eight ranks; `late` is ready 30 % of a step after all others, `dead` ends early."""
    random = np.random.default_rng(1)
    lines = [header_line(TraceHeader(job="moe", node="n"))]
    for step in range(NUM_STEPS):
        compute_s = 0.1 * random.lognormal(0.0, 0.01, NUM_RANKS)
        tokens = [1000] * NUM_RANKS
        if dead is not None:  # with uneven work, so that its part in the times is looked for
            tokens = random.integers(800, 1200, NUM_RANKS).tolist()
            compute_s *= np.array(tokens) / 1000.0
        if late is not None:
            compute_s[late] *= 1.3
        for rank in range(NUM_RANKS):
            if rank == dead and step >= NUM_STEPS // 2:
                continue
            lines.append(
                record_line(
                    MicroBatchRecord(
                        rank=rank, step=step, micro_batch=0, generation=1,
                        compute_s=float(compute_s[rank]), tokens=tokens[rank],
                        sum_len_squared=40_000, expert_rows=2000,
                        wait_s=float(compute_s.max() - compute_s[rank] + 0.005),
                    )
                )
            )  # fmt: skip
            step_s = float(compute_s.max()) + 0.01
            lines.append(
                record_line(
                    StepRecord(rank=rank, step=step, generation=1, duration_s=step_s, tokens=8000)
                )
            )
    path.write_text("\n".join([*lines, *["{torn"] * bad]) + "\n")
    return path
