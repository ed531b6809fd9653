"""What does watching a large job cost: samples a second on one core, bytes of state per rank?

`python -m benchmarks.detect_cost`; two minutes. 8,000 ranks with 8 micro-batches a step take the
detector's whole path: records -> one sample per rank -> cost model -> charts -> judgement, refits
and their thresholds included; then a week of 30 s steps on few ranks, state at its ends. CPU time.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import cusum_bank
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.telemetry.records import MicroBatchRecord
from pacekeeper.predictor.cost.features import FEATURES, StepSample, sample_of
from pacekeeper.predictor.online.state import begin
from pacekeeper.predictor.online.update import fold
from pacekeeper.predictor.stats.cusum_design import chart_rules, gaussian

BAR_SAMPLES_S = 500_000
WEEK_S, STEP_S = 7 * 86_400.0, 30.0
CONFIG = DetectorConfig()
MEASURED_STEPS = 64  # two refits among them


def bytes_of(value: object) -> int:
    """Of all arrays, tuples and numbers that a value is made of."""
    if isinstance(value, np.ndarray):
        return sys.getsizeof(value) if value.base is None else value.nbytes
    size = sys.getsizeof(value)
    if is_dataclass(value):
        return size + sum(bytes_of(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return size + sum(bytes_of(key) + bytes_of(each) for key, each in value.items())
    if isinstance(value, tuple | list):
        return size + sum(bytes_of(each) for each in value)
    return size


def records_of(sample: StepSample, num_microbatches: int) -> list[MicroBatchRecord]:
    """The step in micro-batches of the same size."""
    work = np.rint(sample.features[:, 1:] / num_microbatches).astype(int).tolist()
    names = FEATURES[1:]
    return [
        MicroBatchRecord(
            rank=rank,
            step=sample.step,
            micro_batch=micro_batch,
            generation=sample.generation,
            compute_s=float(observed_s) / num_microbatches,
            **dict(zip(names, row, strict=True)),
        )
        for rank, observed_s, row in zip(sample.ranks, sample.observed_s, work, strict=True)
        for micro_batch in range(num_microbatches)
    ]


def path_cost(job: Any, num_microbatches: int, steps: int) -> dict[str, float]:
    """CPU seconds of each part of the path, of `steps` steps after the warm-up."""
    evidence, spent = begin(), {"records": 0.0, "fold": 0.0, "longest_fold": 0.0}
    for i in range(CONFIG.skip_steps + CONFIG.warmup_steps + steps):
        records = records_of(job.next(), num_microbatches)
        began_s = time.process_time()
        sample = sample_of(records)
        sampled_s = time.process_time()
        evidence, _ = fold(CONFIG, evidence, sample)
        folded_s = time.process_time()
        if i >= CONFIG.skip_steps + CONFIG.warmup_steps:
            spent["records"] += sampled_s - began_s
            spent["fold"] += folded_s - sampled_s
            spent["longest_fold"] = max(spent["longest_fold"], folded_s - sampled_s)
    num_samples = steps * job.num_ranks * num_microbatches
    return {
        "samples_per_s": num_samples / (spent["records"] + spent["fold"]),
        "fold_samples_per_s": num_samples / spent["fold"],
        "longest_fold_s": spent["longest_fold"],
        "charts_bytes_per_rank": bytes_of(evidence.charts) / job.num_ranks,
        "state_bytes_per_rank": bytes_of(evidence) / job.num_ranks,
    }


def bank_cost(num_ranks: int, num_microbatches: int, steps: int) -> dict[str, float]:
    """The charts alone, fed with each micro-batch's residual."""
    rules = chart_rules(gaussian(), samples=1e7)
    bank = cusum_bank.begin(rules, num_ranks)
    random = np.random.default_rng(0)
    residuals = random.standard_normal((num_microbatches, num_ranks)).astype(np.float32)
    began_s = time.process_time()
    for _ in range(steps):
        bank, _ = cusum_bank.fold(rules, bank, residuals, autocorrelation=0.2)
    spent_s = time.process_time() - began_s
    return {
        "bank_samples_per_s": steps * residuals.size / spent_s,
        "bank_bytes_per_rank": (bank.charts.nbytes + bank.last.nbytes) / num_ranks,
    }


def week_sizes(job: Any, steps: int) -> tuple[int, int]:
    """Bytes of state once the history is full, and after `steps` steps more."""
    evidence, full = begin(), CONFIG.history_steps + 2 * CONFIG.warmup_steps
    for _ in range(full):
        evidence, _ = fold(CONFIG, evidence, job.next())
    start_bytes = bytes_of(evidence)
    for _ in range(steps):
        evidence, _ = fold(CONFIG, evidence, job.next())
    return start_bytes, bytes_of(evidence)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--ranks", type=int, default=8_000)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=MEASURED_STEPS)
    parser.add_argument("--week-ranks", type=int, default=16, help="ranks of the simulated week")
    parser.add_argument("--week-scale", type=float, default=1.0, help="of a week's steps")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support.synthetic_job import DEVICE_CLOCK, SyntheticJob

    job = SyntheticJob(seed=1, num_ranks=options.ranks, **DEVICE_CLOCK)
    result: dict[str, Any] = path_cost(job, options.micro_batches, options.steps)
    result |= bank_cost(options.ranks, options.micro_batches, 200)
    week = SyntheticJob(seed=2, num_ranks=options.week_ranks, **DEVICE_CLOCK)
    steps = max(1, round(WEEK_S / STEP_S * options.week_scale))
    start_bytes, end_bytes = week_sizes(week, steps)
    result |= {
        "week_steps": steps,
        "week_ranks": options.week_ranks,
        "week_start_bytes": start_bytes,
        "week_end_bytes": end_bytes,
        "bar_samples_per_s": BAR_SAMPLES_S,
        # Numbers differ in size by their digits: a step of 10,000 takes no more than one of 10.
        "holds": result["samples_per_s"] >= BAR_SAMPLES_S and end_bytes <= 1.01 * start_bytes,
    }
    table = Table(
        title=f"{options.ranks:,} ranks x {options.micro_batches} micro-batches, one core"
    )
    for column in ("what", "measured"):
        table.add_column(column, justify="right")
    rows = {
        "records to judgement, refits included": f"{result['samples_per_s']:,.0f} samples/s",
        "without taking the records apart": f"{result['fold_samples_per_s']:,.0f} samples/s",
        "longest step (a refit)": f"{result['longest_fold_s'] * 1e3:.0f} ms",
        "charts and their window": f"{result['charts_bytes_per_rank']:.0f} bytes/rank",
        "all state, history included": f"{result['state_bytes_per_rank']:.0f} bytes/rank",
        "charts per micro-batch, alone": f"{result['bank_samples_per_s']:,.0f} samples/s",
        "their state": f"{result['bank_bytes_per_rank']:.0f} bytes/rank",
        f"a week ({steps:,} steps), start to end": f"{start_bytes:,} -> {end_bytes:,} bytes",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
