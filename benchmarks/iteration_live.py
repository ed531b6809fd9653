"""How well is the time of each iteration of a running pipelined job predicted?

`OMP_NUM_THREADS=1 python -m benchmarks.iteration_live`; three minutes. A job of the engine on the
emulated accelerator (two stages, documents of different lengths), whose rings are read by the
agent's readers and judged by the controller's machine. Each step after the warm-up: the prediction
of `predictor/job_level/iteration` (made of chunks that its cost models expect, before it is told
what the ranks measured) beside what the step took. ResiHP's own error per iteration, on GPUs:
2.81-5.06 %. Last line: JSON with the mean, median and 90 % quantile of |predicted / measured - 1|,
and the part of the steps inside the 95 % interval.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.predictor.job_level.iteration import IterationReport

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def reports(folder: Path, count: int) -> list[IterationReport]:
    """Run a job until so many of its iterations were predicted; return the predictions."""
    from support.exact_jobs import exact_job
    from support.fleet import Fleet
    from support.watched_fleets import WatchedFleet

    config = ControllerConfig(detector=DetectorConfig(warmup_steps=8, canary_period_steps=0))
    job = exact_job(
        folder, steps=100_000, num_stages=2, replicas=1, slots_per_rank=8, rows_per_step=16,
        rows_per_microbatch=4, emulate=True, emulated_step_s=1.0, peer_timeout_s=60.0,
    )  # fmt: skip
    found: dict[int, IterationReport] = {}
    fleet = Fleet(directory=folder, config=job, num_nodes=1, ranks_per_node=2)
    with fleet, WatchedFleet(fleet=fleet, config=config) as watched:

        def are_there() -> bool:
            watched.poll()
            newest = None if watched.job is None else watched.job.detection.iteration.newest
            if newest is not None:
                found[newest.step] = newest
            return len(found) >= count

        fleet.await_(are_there)
    return [found[step] for step in sorted(found)]


def main() -> int:
    """Print the errors and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="not used: the job is made here")
    parser.add_argument("--steps", type=int, default=60, help="that are predicted")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        told = reports(Path(folder), options.steps)
    errors = np.array([abs(one.expected_s / one.duration_s - 1.0) for one in told])
    inside = [one.least_s <= one.duration_s <= one.most_s for one in told]
    outcome = {
        "iterations": len(told),
        "error_mean": float(errors.mean()),
        "error_median": float(np.median(errors)),
        "error_90": float(np.quantile(errors, 0.9)),
        "inside_interval": float(np.mean(inside)),
        "load": round(load, 1),
    }
    Console(width=100).print(f"newest: {told[-1]}")
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
