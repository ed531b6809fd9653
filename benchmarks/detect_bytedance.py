"""Who is accused in production traces, and how soon is a rank found that is slowed a little?

`python -m benchmarks.detect_bytedance`; some minutes. AR holds one slow worker (rank 0, from the
first step), SE and ST hold none: their trouble is work. Into SE a slowdown is injected at a random
rank and step; a rule sees the record up to the first (second, ...) slow step and no more, or, where
only one of three steps is slow ("in 1 of 3"), up to the last of so many. "False":
accusations of anybody else, and of anybody in clean data: whole traces, random halves of the steps,
steps in random order, everything up to each step, healthy runs of a mixture of experts.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rank_traces import (
    OURS,
    PLAYED,
    accused,
    compute,
    only,
    share,
    slowed,
    steps_of,
    until,
)
from pacekeeper.predictor.recorded.anomalies import Anomaly
from pacekeeper.predictor.recorded.rank_slowdowns import rank_faults
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.simulator.readers.bytedance import read_bytedance
from pacekeeper.simulator.readers.smartmoe import read_smartmoe

INJECTIONS = (
    (1.03, 1, 1),
    (1.03, 2, 1),
    (1.05, 1, 1),
    (1.05, 2, 1),
    (1.10, 1, 1),
    (1.50, 1, 1),
    (1.50, 5, 1),
    (1.20, 25, 3),
    (1.50, 25, 3),
)  # factor, steps seen of it, slow in one of so many
BARS = {(1.05, 1): 0.95, (1.03, 2): 0.95}
SLOW_RANK, SLOWDOWN = 0, 2.35


def clean_variants(
    trace: Trace, rng: np.random.Generator, rounds: int
) -> Iterator[tuple[str, Trace]]:
    """A healthy trace in other forms, all of them still healthy."""
    table, steps = compute(trace), steps_of(trace)
    yield "whole", trace
    for _ in range(rounds):
        yield "half", only(trace, np.isin(table.step, rng.permutation(steps)[: len(steps) // 2]))
    for last in steps[:: max(1, len(steps) // 28)]:
        yield "prefix", until(trace, int(last))
    for _ in range(rounds):
        order = rng.permutation(len(steps))
        shuffled = order[np.searchsorted(steps, table.step)].astype(np.intp)
        yield "shuffled", _with_steps(trace, shuffled)


def _with_steps(trace: Trace, step: Any) -> Trace:
    return replace(trace, compute=replace(compute(trace), step=step), ops=None)


def injected(
    trace: Trace, factor: float, steps_seen: int, every: int, trials: int, seed: int, rule: str
) -> dict[str, Any]:
    """Random ranks slowed from random steps on: how many are found in the first steps."""
    rng = np.random.default_rng(seed)
    steps, ranks = steps_of(trace), [worker.rank for worker in trace.workers]
    hits, false = [], 0
    for _ in range(trials):
        rank = int(rng.choice(ranks))
        onset = int(rng.integers(1, len(steps) - steps_seen + 1))
        seen = until(trace, int(steps[onset + steps_seen - 1]))
        slow = slowed(seen, rank, int(steps[onset]), factor, every=every)
        named = accused(slow, rule, healthy=seen)
        hits.append(rank in named)
        false += len(named - {rank})
    found = share(hits)
    return {"factor": factor, "steps": steps_seen, "every": every, "found": found, "false": false}


def show_accused(console: Console, traces: Mapping[str, Trace]) -> dict[str, list[Anomaly]]:
    """What our rule says of each trace as it is, and whom the others accuse."""
    table = Table(title="who is accused: ranks, or how many of them")
    for column in ("trace", "slowdown", "95 %", "first step", *PLAYED):
        table.add_column(column, justify="right")
    found = {name: list(rank_faults(trace)) for name, trace in traces.items()}
    for name, anomalies in found.items():
        named = [
            {t.rank for t in anomalies if t.rank is not None},
            *(accused(traces[name], rule) for rule in PLAYED[1:]),
        ]
        worst = max(anomalies, key=lambda t: t.slowdown, default=None)
        table.add_row(
            name,
            "" if worst is None else f"x{worst.slowdown:.3f}",
            "" if worst is None else f"{worst.low:.3f}-{worst.high:.3f}",
            "" if worst is None else str(worst.first_step),
            *(_ranks(ranks) for ranks in named),
        )
    console.print(table)
    return found


def _ranks(ranks: Collection[int]) -> str:
    """Few are named, many counted."""
    if not ranks:
        return "nobody"
    return f"{len(ranks)} ranks" if len(ranks) > 2 else ", ".join(f"rank {rank}" for rank in ranks)


def show_clean(
    console: Console, healthy: Mapping[str, Trace], rng: np.random.Generator, rounds: int
) -> list[dict[str, Any]]:
    """Accusations by rule, data and form."""
    counts: dict[tuple[str, str, str], list[int]] = {}
    for name, trace in healthy.items():
        for form, variant in clean_variants(trace, rng, rounds):
            for rule in PLAYED:
                counts.setdefault((name, form, rule), []).append(len(accused(variant, rule)))
    table = Table(title="accusations in clean data")
    for column in ("data", "form", "traces", *PLAYED):
        table.add_column(column, justify="right")
    for name, form in dict.fromkeys((name, form) for name, form, _ in counts):
        sums = [sum(counts[name, form, rule]) for rule in PLAYED]
        table.add_row(name, form, str(len(counts[name, form, OURS])), *map(str, sums))
    console.print(table)
    return [
        {"data": name, "form": form, "rule": rule, "traces": len(each), "accused": sum(each)}
        for (name, form, rule), each in counts.items()
    ]


def show_injected(
    console: Console, trace: Trace, trials: int, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """What each rule finds of the slowdowns put into a trace."""
    rows = {
        rule: [injected(trace, *injection, trials, seed, rule) for injection in INJECTIONS]
        for rule in PLAYED
    }
    table = Table(title=f"found of {trials} slowdowns put into SE (false accusations)")
    for column in ("factor", "within steps", "bar", *PLAYED):
        table.add_column(column, justify="right")
    for i, (factor, steps, every) in enumerate(INJECTIONS):
        bar = BARS.get((factor, steps))
        name = f"x{factor}" + (f" in 1 of {every}" if every > 1 else "")
        cells = (f"{rows[rule][i]['found']:.1%} ({rows[rule][i]['false']})" for rule in rows)
        table.add_row(name, str(steps), f"{bar:.0%}" if bar else "-", *cells)
    console.print(table)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--trials", type=int, default=100, help="injections per row")
    parser.add_argument("--rounds", type=int, default=3, help="random halves and shuffles")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.data / "bytedance_straggler"
    traces = {name: read_bytedance(folder / f"trace-{name}.parquet") for name in ("AR", "SE", "ST")}
    healthy = {name: traces[name] for name in ("SE", "ST")}
    for path in sorted((options.data / "smartmoe_ranktimes").glob("rank_times_*.parquet")):
        trace = read_smartmoe(path)
        name = path.stem.removeprefix("rank_times_")
        healthy[f"MoE {name}"] = trace
        healthy[f"MoE {name} experts"] = replace(trace, compute=trace.expert_compute)
    console = Console(width=170)
    found = show_accused(console, traces)
    rng = np.random.default_rng(options.seed)
    clean = show_clean(console, healthy, rng, options.rounds)
    rows = show_injected(console, traces["SE"], options.trials, options.seed)
    ours = {(row["factor"], row["steps"]): row["found"] for row in rows[OURS]}
    slow = found["AR"]
    holds = {
        "AR": [(t.rank, t.first_step) for t in slow]
        == [(SLOW_RANK, int(steps_of(traces["AR"])[0]))]
        and abs(slow[0].slowdown / SLOWDOWN - 1.0) <= 0.03,
        "clean": not any(row["accused"] for row in clean if row["rule"] == OURS),
        **{
            f"x{factor} in {steps}": ours[factor, steps] >= bar
            for (factor, steps), bar in BARS.items()
        },
    }
    accusations = {
        name: [
            {"rank": t.rank, "slowdown": round(t.slowdown, 4), "first_step": t.first_step}
            for t in anomalies
        ]
        for name, anomalies in found.items()
    }
    result = {"accused": accusations, "clean": clean, "injected": rows, "holds": holds}
    print(json.dumps(result))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
