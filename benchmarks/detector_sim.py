"""How soon is a slow rank named, how well is it measured, and how often is nobody to blame?

`python -m benchmarks.detector_sim`; some minutes. Seeded paper jobs of 4 ranks: skewed and drifting
experts, documents of all lengths, plans that change every rank's share by a factor of 0.4 to 1.6.
Delays count the first slow step as 1; "false" is findings + recoveries that should not have been.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pacekeeper.core.config.detector import DetectorConfig
from pacekeeper.core.incidents.findings import Finding
from pacekeeper.predictor.online.state import begin
from pacekeeper.predictor.online.update import fold

if TYPE_CHECKING:
    from support.synthetic_job import Noise

HEALTHY_STEPS, PLAN_PERIOD_STEPS = 500, 40
EARLY_PLAN, FAULT, RELIEF_AFTER, LIFT_AFTER, LAST_AFTER = 30, 60, 20, 60, 110
SLOWDOWNS = (1.2, 1.35, 1.6, 2.5)
# name, clock, healthy runs, {slowdown: most steps to the finding}
CLOCKS = (("emulated", "DEVICE_CLOCK", 100, {1.6: 2, 1.2: 5}), ("cpu", "CPU_CLOCK", 50, {1.6: 6}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run with a fault. delay_steps None: never found; false ones are counted together."""

    delay_steps: int | None
    found_slowdown: float
    false_findings: int
    false_recoveries: int
    recovery_steps: int | None


def healthy_run(noise: "Noise", seed: int) -> list[Finding]:
    """All findings of a job that nothing is wrong with."""
    from support.synthetic_job import SyntheticJob

    job, evidence, config = SyntheticJob(seed=seed, **noise), begin(), DetectorConfig()
    found: list[Finding] = []
    for step in range(HEALTHY_STEPS):
        if step and step % PLAN_PERIOD_STEPS == 0:
            job.shuffle()
        evidence, judgement = fold(config, evidence, job.next())
        found += judgement.findings
    return found


def faulty_run(noise: "Noise", seed: int, slowdown: float) -> Outcome:
    """One rank gets slow, work is planned around it, the fault is lifted."""
    from support.synthetic_job import SyntheticJob

    job, evidence, config = SyntheticJob(seed=seed, **noise), begin(), DetectorConfig()
    rank, fault = seed % job.num_ranks, FAULT + seed % 7
    lift = fault + LIFT_AFTER
    slow, named = {rank: slowdown}, None
    false_findings = false_recoveries = 0
    recovery_steps = None
    for step in range(fault + LAST_AFTER):
        if step == EARLY_PLAN:
            job.shuffle()
        elif step in (fault + RELIEF_AFTER, lift + RELIEF_AFTER):
            job.plan(slow if step < lift else None)
        is_slow = fault <= step < lift
        evidence, judgement = fold(config, evidence, job.next(slow if is_slow else None))
        for finding in judgement.findings:
            if named is None and finding.rank == rank and is_slow:
                named = finding
            else:
                false_findings += 1
        for _ in judgement.recovered:
            false_recoveries += is_slow
            recovery_steps = step - lift + 1 if not is_slow else recovery_steps
    return Outcome(
        delay_steps=None if named is None else named.step - fault + 1,
        found_slowdown=float("nan") if named is None else named.slowdown,
        false_findings=false_findings,
        false_recoveries=false_recoveries,
        recovery_steps=recovery_steps,
    )


def summary(slowdown: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a row of the table says."""
    delays = [o.delay_steps for o in outcomes if o.delay_steps is not None]
    errors = [abs(o.found_slowdown / slowdown - 1) for o in outcomes if o.delay_steps is not None]
    recoveries = [o.recovery_steps for o in outcomes if o.recovery_steps is not None]
    return {
        "slowdown": slowdown,
        "runs": len(outcomes),
        "found": len(delays),
        "delay_median": float(np.median(delays)),
        "delay_p95": float(np.quantile(delays, 0.95)),
        "delay_max": max(delays),
        "error_median": round(float(np.median(errors)), 4),
        "error_p95": round(float(np.quantile(errors, 0.95)), 4),
        "false_findings": sum(o.false_findings for o in outcomes),
        "false_recoveries": sum(o.false_recoveries for o in outcomes),
        "recovered": len(recoveries),
        "recovery_median": float(np.median(recoveries)) if recoveries else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--runs", type=int, default=100, help="runs with a fault, per row")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of healthy runs")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from support import synthetic_job

    result: dict[str, Any] = {}
    table = Table(title="one slow rank of four")
    columns = ("clock", "slowdown", "found", "delay p50/p95/max", "bar", "error p50/p95", "false")
    for column in (*columns, "closed in"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, noise_name, healthy_runs, bars in CLOCKS:
        noise: Noise = getattr(synthetic_job, noise_name)
        rows = []
        for slowdown in SLOWDOWNS:
            seeds = range(options.seed, options.seed + options.runs)
            row = summary(slowdown, [faulty_run(noise, seed, slowdown) for seed in seeds])
            rows.append(row)
            table.add_row(
                name, f"x{slowdown}", f"{row['found']}/{row['runs']}",
                f"{row['delay_median']:.0f}/{row['delay_p95']:.0f}/{row['delay_max']}",
                str(bars.get(slowdown, "-")),
                f"{row['error_median']:.1%}/{row['error_p95']:.1%}",
                f"{row['false_findings']}+{row['false_recoveries']}",
                f"{row['recovery_median']} ({row['recovered']})",
            )  # fmt: skip
        runs = max(1, round(healthy_runs * options.scale))
        false = sum(len(healthy_run(noise, options.seed + 10_000 + seed)) for seed in range(runs))
        table.add_row(
            name, "healthy", f"{runs} x {HEALTHY_STEPS} steps", "", "", "", str(false), ""
        )
        result[name] = {
            "faults": rows,
            "healthy_runs": runs,
            "healthy_steps": runs * HEALTHY_STEPS,
            "false_findings": false,
            "holds": false == 0
            and all(row["delay_p95"] <= bars.get(row["slowdown"], 1e9) for row in rows)
            and all(row["found"] == row["runs"] for row in rows if row["slowdown"] in bars),
        }
    Console().print(table)
    print(json.dumps(result))
    return 0 if all(entry["holds"] for entry in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
