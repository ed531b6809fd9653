"""ResiHP's evaluation, simulated: ours beside ResiHP, Greyhound, Adaptra, ReCycle and Oobleck.

`python -m benchmarks.simulate_resihp`; some minutes (`--quick`: one draw, one interval, 1,000
iterations of the large job). Six models on 16 to 64 devices (research 4.1-4.3): one device becomes
slow, so that the unmitigated job loses 35, 55 or 70 % of its throughput, and 1,000 iterations of
the healthy job's time are played from then on; one device stops every 2 h, 1 h or 30 min, until
half are gone; stops and medium slow ones in turn. Then 256 devices over 10,000 iterations, with
faults that are mended (`--rates`: this alone, at several rates, as the paper tells none; `most`:
the fluid limit over that policy). Figures are goodput of the whole span: what noticing, deciding
and moving take counts. What is fitted is said in `benchmarks/resihp_paper.py`, each policy's rules
in docs/simulator.md. `whole` cells: ours where a micro-batch is handed on whole, as the others do.
Prints tables, last one line of JSON.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from benchmarks.resihp_paper import (
    DROPS,
    LARGE,
    LARGE_OVER,
    PAPERS,
    Paper,
    baseline_step_s,
    fitted_flops,
    job_of,
    slow_speed,
)
from benchmarks.resihp_tables import Row, rounded, show_rates, show_slow, show_stops, summary
from pacekeeper.simulator.cluster.fault_generator import FaultKind, FaultRule, drawn_history
from pacekeeper.simulator.cluster.history import History, NodesJoined, SpeedChanged
from pacekeeper.simulator.engine.event_loop import SimulationResult, simulate
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.jobs.pipeline_assignment import Work
from pacekeeper.simulator.policies.base import PolicyOf
from pacekeeper.simulator.policies.pipeline.adaptra import Adaptra
from pacekeeper.simulator.policies.pipeline.greyhound import Greyhound
from pacekeeper.simulator.policies.pipeline.no_mitigation import Unmitigated
from pacekeeper.simulator.policies.pipeline.oobleck import Oobleck
from pacekeeper.simulator.policies.pipeline.pacekeeper import Repartition
from pacekeeper.simulator.policies.pipeline.recycle import ReCycle
from pacekeeper.simulator.policies.pipeline.resihp import ResiHP

ROWS, WHOLE_ROWS = 16, 1  # of a micro-batch
STEPS = 1000  # iterations of the healthy job, from the onset of a slowdown
LARGE_STEPS = 10_000
RATE = (1.0, 4.0)  # h between two faults of the large job, and until one is mended
RATES = ((4.0, 4.0), (2.0, 4.0), RATE, (1.0, 8.0))
HOURS = {"2h": 2.0, "1h": 1.0, "30min": 0.5}
HOUR_S = 3600.0

SLOW = {"degraded": Unmitigated(), "adaptra": Adaptra(), "greyhound": Greyhound()}
BOTH: dict[str, PolicyOf[Work]] = {"resihp": ResiHP(), "ours": Repartition()}
STOPS = {"recycle": ReCycle(), "oobleck": Oobleck()}
STRONG = {
    "recycle": ReCycle(name="recycle+", is_strengthened=True),
    "oobleck": Oobleck(name="oobleck+", is_strengthened=True),
}


def played(
    history: History, job: PipelineJob, policies: Mapping[str, PolicyOf[Work]], seed: int
) -> dict[str, SimulationResult]:
    """Every policy in the same history."""
    return {
        name: simulate(history, job, job.routing, policy, seed=seed)
        for name, policy in policies.items()
    }


def slow_history(job: PipelineJob, rank: int, speed: float, duration_s: float) -> History:
    """One device is slow from 0 s on, of a job that has warmed up."""
    ranks = job.baseline.ranks
    return History(
        name="slow",
        num_nodes=len(ranks),
        duration_s=duration_s,
        changes=(
            NodesJoined(at_s=0.0, nodes=ranks),
            SpeedChanged(at_s=0.0, node=rank, speed=speed),
        ),
    )


def slow_draw(paper: Paper, flops: float, severity: str, seed: int) -> Row:
    """One device drawn: samples of each policy over the degraded run, and of the fluid limit."""
    case = paper.case
    draw = np.random.default_rng([seed, case.num_ranks, round(100 * DROPS[severity])])
    rank = int(draw.integers(case.num_ranks))
    job = job_of(case, flops, ROWS)
    speed = slow_speed(job, rank, DROPS[severity])
    duration_s = STEPS * baseline_step_s(job)
    history = slow_history(job, rank, speed, duration_s)
    found = played(history, job, {**SLOW, **BOTH}, seed)
    whole_job = job_of(case, flops, WHOLE_ROWS)
    found["whole"] = simulate(history, whole_job, whole_job.routing, BOTH["ours"], seed=seed)
    fluid = paper.samples_per_s * duration_s * (case.num_ranks - 1.0 + speed) / case.num_ranks
    return {
        "speed": speed,
        "over_degraded": {n: o.samples / found["degraded"].samples for n, o in found.items()},
        "fluid": {name: outcome.samples / fluid for name, outcome in found.items()},
    }


def slow_cell(paper: Paper, flops: float, severity: str, seeds: int) -> Row:
    """Means over the draws; fluid fractions with the least of them. implied_drop: what the fault
    must have cost the unmitigated job, for ResiHP as simulated to reach what is printed.
    """
    draws = [slow_draw(paper, flops, severity, seed) for seed in range(seeds)]
    names = draws[0]["fluid"]
    at = list(DROPS).index(severity)
    over = {n: float(np.mean([d["over_degraded"][n] for d in draws])) for n in names}
    low, high = paper.greyhound[at]
    theirs = paper.resihp[at]
    printed = {
        "greyhound": (low, high),
        "resihp": (theirs, theirs),
        "resihp_over_greyhound": (theirs / high, theirs / low),
    }
    found = over | {"resihp_over_greyhound": over["resihp"] / over["greyhound"]}
    return {
        "model": paper.case.name,
        "severity": severity,
        "speed": float(np.mean([d["speed"] for d in draws])),
        "over_degraded": over,
        "fluid": {n: float(np.mean([d["fluid"][n] for d in draws])) for n in names},
        "fluid_min": min(d["fluid"]["ours"] for d in draws),
        "is_won": all(d["fluid"]["ours"] > d["fluid"]["resihp"] for d in draws),
        "is_whole_won": all(d["fluid"]["whole"] > d["fluid"]["resihp"] for d in draws),
        "printed": printed,
        "off": {name: deviation(found[name], *span) for name, span in printed.items()},
        "most": paper_limit(severity, draws, paper.case.num_ranks),
        "implied_drop": 1.0 - (1.0 - DROPS[severity]) * over["resihp"] / theirs,
    }


def paper_limit(severity: str, draws: Sequence[Row], num_ranks: int) -> float:
    """The fluid limit's speed-up over the degraded run: no plan can be better."""
    mean = np.mean([(num_ranks - 1.0 + d["speed"]) / num_ranks for d in draws])
    return float(mean / (1.0 - DROPS[severity]))


def deviation(found: float, low: float, high: float) -> float:
    """Relative, from the nearer end of what is printed; 0 inside."""
    if found < low:
        return found / low - 1.0
    return found / high - 1.0 if found > high else 0.0


def stop_cell(paper: Paper, flops: float, interval: str, seeds: int, *, is_mixed: bool) -> Row:
    """Samples a second, means over the draws, with the fluid limit's.

    The span is 4 h for 16 devices, as much longer for more: half are gone at 30 min (research 4.1).
    """
    case = paper.case
    job = job_of(case, flops, ROWS)
    kinds = (FaultKind.STOP, FaultKind.SLOW) if is_mixed else (FaultKind.STOP,)
    speed = slow_speed(job, 0, DROPS["medium"])
    rates: dict[str, list[float]] = {}
    policies = {**BOTH, **STOPS, **({f"{n}+": p for n, p in STRONG.items()} if is_mixed else {})}
    for seed in range(seeds):
        history = drawn_history(
            FaultRule(kinds=kinds, every_s=HOURS[interval] * HOUR_S, slow_speed=speed),
            num_nodes=case.num_ranks,
            duration_s=case.num_ranks / 4.0 * HOUR_S,
            seed=seed,
        )
        for name, outcome in played(history, job, policies, seed).items():
            rates.setdefault(name, []).append(outcome.samples_per_s)
        left = history.node_s() / history.duration_s / case.num_ranks
        rates.setdefault("fluid", []).append(paper.samples_per_s * left)
    means = {name: float(np.mean(of)) for name, of in rates.items()}
    at = list(HOURS).index(interval)
    names = ("resihp", "oobleck", "recycle")
    printed = {n: of[at] for n, of in zip(names, paper.stops, strict=True) if at < len(of)}
    return {
        "model": case.name,
        "interval": interval,
        "samples_per_s": means,
        "printed": {} if is_mixed else printed,
        "over_recycle": means["resihp"] / means["recycle"],
        "printed_over_recycle": paper.mixed[at] if is_mixed else None,
        "is_won": all(a >= b for a, b in zip(rates["ours"], rates["resihp"], strict=True)),
    }


def large(flops: float, steps: int, seeds: int, rate: tuple[float, float] = RATE) -> Row:
    """256 devices: one stops or becomes slow, in turn, so often; each is back after so long."""
    job = job_of(LARGE, flops, ROWS)
    duration_s = steps * baseline_step_s(job)
    every_h, mended_h = rate
    rule = FaultRule(
        kinds=(FaultKind.STOP, FaultKind.SLOW),
        every_s=every_h * HOUR_S,
        slow_speed=slow_speed(job, 0, DROPS["medium"]),
        mended_after_s=mended_h * HOUR_S,
    )
    ratios: dict[str, list[float]] = {}
    for seed in range(seeds):
        history = drawn_history(rule, num_nodes=LARGE.num_ranks, duration_s=duration_s, seed=seed)
        found = played(history, job, {**BOTH, **STRONG}, seed)
        for name in ("resihp", *STRONG):
            ratios.setdefault(name, []).append(found["ours"].samples / found[name].samples)
        for name in STRONG:
            ratio = found["resihp"].samples / found[name].samples
            ratios.setdefault(f"resihp_{name}", []).append(ratio)
            most = found[name].fluid_samples / found[name].samples
            ratios.setdefault(f"most_{name}", []).append(most)
        lost = 1.0 - found["ours"].samples / (
            duration_s / baseline_step_s(job) * _step_samples(job)
        )
        ratios.setdefault("lost", []).append(lost)
    return {name: round(float(np.mean(of)), 3) for name, of in ratios.items()}


def _step_samples(job: PipelineJob) -> float:
    return job.problem.rows_per_step * job.samples_per_row


def swept(flops: float, seeds: int, console: Console) -> int:
    """The large job at every rate of faults."""
    rows = []
    for every_h, mended_h in RATES:
        row = large(flops, LARGE_STEPS, seeds, (every_h, mended_h))
        rows.append({"every_h": every_h, "mended_h": mended_h, **row})
    show_rates(rows, console)
    print(json.dumps({"seeds": seeds, "large_bars": LARGE_OVER, "rows": rows}))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one draw, fewer intervals")
    parser.add_argument("--rates", action="store_true", help="the large job at several rates")
    arguments = parser.parse_args()
    seeds = 1 if arguments.quick else arguments.seeds
    intervals = ["1h"] if arguments.quick else list(HOURS)
    console = Console(width=180)
    flops = {paper.case.name: fitted_flops(paper, ROWS) for paper in PAPERS}
    if arguments.rates:
        return swept(float(np.mean(list(flops.values()))), seeds, console)
    slow = [
        slow_cell(paper, flops[paper.case.name], severity, seeds)
        for paper in PAPERS
        for severity in DROPS
    ]
    show_slow(slow, console)
    stops, mixed = (
        [
            stop_cell(paper, flops[paper.case.name], interval, seeds, is_mixed=is_mixed)
            for paper in PAPERS
            for interval in intervals
        ]
        for is_mixed in (False, True)
    )
    show_stops("one device stops every ..., samples/s", stops, console)
    show_stops("stops and medium slow devices in turn, samples/s", mixed, console)
    of_large = large(
        float(np.mean(list(flops.values()))),
        STEPS if arguments.quick else LARGE_STEPS,
        1 if arguments.quick else min(seeds, 2),
    )
    result = summary(slow, stops, mixed, of_large, is_whole=not arguments.quick)
    result |= {
        "seeds": seeds,
        "tflops": {name: round(rate / 1e12, 1) for name, rate in flops.items()},
        "rows": {"slow": slow, "stops": stops, "mixed": mixed},
    }
    print(json.dumps(rounded(result)))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
