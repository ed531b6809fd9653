"""Slowdowns of a whole job that recur, ramp, fade or overlap, spliced into real healthy runs.

`python -m benchmarks.detect_job_level --data DIR`; minutes. Runs: step times of MLPerf Training
v5.1 logs (DIR/mlperf_v51_steps). Each is judged beside the other runs of its system, alone with its
work told (which is the same in every step) and alone with nothing told; live, step by step; and by
the rules of others. An incident is found where a quarter of the steps of an alarm are slow; other
alarms are false. A flagged healthy run whose flagged steps took more than 1.02 x those of its
replicates counts apart: it was slow (`slow_beside_replicates`, which imports no detector).

The false alarm rate has a 95 % interval, and is told for what is left when one submitter, or one
system, is left out.
"""

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import beta

from benchmarks.job_rules import JOB_RULES, alarms_of
from benchmarks.slow_beside_replicates import were_slow
from benchmarks.step_runs import Run, durations, with_durations
from pacekeeper.predictor.cost.features import Array, Flags
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.cusum import QUIET_SUSPICION
from pacekeeper.predictor.detector.global_slowdown import HELD_STEPS
from pacekeeper.predictor.job_level.block_charts import (
    healthy_pace,
    limits_of,
    with_findings,
)
from pacekeeper.predictor.job_level.blocks import BLOCK_STEPS
from pacekeeper.predictor.job_level.online import (
    LEAST_STEPS,
    WINDOW_STEPS,
    JobLevelState,
    JobStep,
    update_job_level,
)
from pacekeeper.predictor.recorded.trace import StepTable, Trace
from pacekeeper.predictor.stats.cusum_design import DAY_S
from pacekeeper.simulator.io.tables import read_table

FACTORS = (1.05, 1.1, 1.2, 1.4)
TOKENS = 4096  # of a step, where its work is told
SHORTEST_STEPS = 150
BLOCK = 50  # consecutive steps that are resampled together
RATES = (100.0, 10.0, 1.0)  # false alarms per job-day
COLUMNS = {100.0: 4, 10.0: 16, 1.0: 128}  # folded at once, by the rate asked for
REFIT_BLOCKS = 16  # between two looks at what is healthy, once a job has filled its memory
RATE_WITHIN = 2.0
PAUSE = 10.0  # of a step's time, for an evaluation between two steps
OF_ALARM = 0.25  # of an alarm's steps must be slow
Shape = Callable[[random.Random, int], Array]  # how much of the slowdown each step has, 0 to 1


def recurring(draw: random.Random, size: int) -> Array:
    """Tens of slow steps, tens of healthy ones, again and again."""
    part, at = np.zeros(size), size // 4 + draw.randrange(20)
    while at < size:
        end = at + draw.randrange(15, 60)
        part[at:end] = 1.0
        at = end + draw.randrange(15, 60)
    return part


def alternating(draw: random.Random, size: int) -> Array:
    """The same with a period, from a quarter of the run on."""
    half, step = draw.randrange(20, 50), np.arange(size)
    return np.where((step > size // 4) & (step // half % 2 == 1), 1.0, 0.0)


def once(draw: random.Random, size: int) -> Array:
    """One incident of 50 or 80 steps."""
    part, length = np.zeros(size), draw.choice((50, 80))
    begin = draw.randrange(60, max(61, size - length - 20))
    part[begin : begin + length] = 1.0
    return part


def five_percent(draw: random.Random, size: int) -> Array:
    """50 steps, 5 % slow."""
    part = np.zeros(size)
    begin = draw.randrange(60, size - 70)
    part[begin : begin + 50] = 1.0
    return part


def ramping(draw: random.Random, size: int) -> Array:
    """It grows over 40 or 80 steps, stays for 60 and goes at once."""
    length, begin = draw.choice((40, 80)), size // 3
    part = np.clip((np.arange(size) - begin) / length, 0.0, 1.0)
    part[begin + length + 60 :] = 0.0
    return part


def fading(draw: random.Random, size: int) -> Array:
    """It comes at once, stays for 30 steps and fades over 60 or 100."""
    length, begin = draw.choice((60, 100)), size // 3
    part = np.clip(1.0 - (np.arange(size) - begin - 30) / length, 0.0, 1.0)
    part[:begin] = 0.0
    return part


def overlapping(draw: random.Random, size: int) -> Array:
    """Two incidents, of which the second begins while the first lasts."""
    begin, lap = size // 3, draw.randrange(20, 60)
    part = np.zeros(size)
    part[begin : begin + 80] += 0.5
    part[begin + lap : begin + lap + 80] += 0.5
    return part


SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (five_percent, once, recurring, alternating, ramping, fading, overlapping)
}


LIVE = {"ours, live, work told": TOKENS, "ours, live": 0}  # tokens of a step, 0: not told
OURS = ("ours, replicates", "ours, work told", "ours, alone", *LIVE)


@dataclass(slots=True)
class Count:
    """Of runs, those in which the incident was found, and false alarms."""

    runs: int = 0
    found: int = 0
    false: int = 0


def read_runs(folder: Path) -> list[Run]:
    """The runs of the logs with their replicates; steps without a time are left out."""
    table = read_table(folder / "mlperf_v51_steps" / "steps.parquet")
    words = [table.words(name) for name in ("submitter", "system", "benchmark")]
    step, took_s, number, paused = (
        table.numbers(name) for name in ("step", "step_time_s", "run", "after_eval")
    )
    num_pauses = np.cumsum(paused > 0.0)  # also of rows without a time
    rows: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at in np.flatnonzero(np.isfinite(took_s) & (took_s > 0.0)).tolist():
        rows[tuple(str(column[at]) for column in words)][int(number[at])].append(at)
    runs = []
    for system, of_run in rows.items():
        traces = [_trace("/".join(system), step[at], took_s[at]) for at in of_run.values()]
        runs += [
            Run(
                name=f"{trace.name}/{run}",
                record=system[0],
                trace=trace,
                replicates=tuple(other for other in traces if other is not trace),
                after_pause=np.diff(num_pauses[at], prepend=num_pauses[at[0]]) > 0,
            )
            for (run, at), trace in zip(of_run.items(), traces, strict=True)
        ]
    return [run for run in runs if run.num_steps >= SHORTEST_STEPS]


def _trace(name: str, step: Array, took_s: Array) -> Trace:
    unknown = np.full(step.size, np.nan)
    table = StepTable(
        step=step.astype(np.intp), duration_s=took_s, tokens=unknown, sum_len_squared=unknown
    )
    return Trace(name=name, source="mlperf", workers=(), steps=table)


def alarms(judge: str, run: Run) -> list[tuple[int, int]] | None:
    """[first, end) of what a judge calls slow, in rows of the run; None: it cannot judge it."""
    if judge in JOB_RULES:
        return alarms_of(JOB_RULES[judge], run, durations(run.trace))
    if judge in LIVE:
        return live_alarms(run, LIVE[judge])
    trace, table = run.trace, run.trace.steps
    assert table is not None
    step = table.step
    if judge == "ours, work told":
        trace = replace(trace, steps=replace(table, tokens=np.full(step.size, float(TOKENS))))
    found = run.judged("replicates" if judge == "ours, replicates" else "nothing", trace)
    return [
        (
            int(np.searchsorted(step, one.first_step)),
            step.size if one.last_step is None else int(np.searchsorted(step, one.last_step)) + 1,
        )
        for one in found
    ]


def live_alarms(run: Run, tokens: int) -> list[tuple[int, int]]:
    """[first, end) of the findings of the run as a job that is watched while it trains, in rows."""
    assert run.trace.steps is not None and run.after_pause is not None
    step, ended_s = run.trace.steps.step, 1.0
    pace, found, begun = JobLevelState(), list[tuple[int, int]](), None
    for at, took_s in enumerate(durations(run.trace).tolist()):
        ended_s += took_s * (1.0 + PAUSE * run.after_pause[at])
        told = JobStep(
            step=int(step[at]),
            generation=1,
            duration_s=took_s,
            tokens=tokens,
            sum_len_squared=0,
            ended_s=ended_s,
        )
        pace, news = update_job_level(pace, told)
        if news.is_over and begun is not None:
            found.append((begun, at))
            begun = None
        if news.found is not None:
            onset = int(np.searchsorted(step, news.found.onset_step))
            if pace.is_open:
                begun = onset
            else:
                found.append((onset, at + 1))
    return found if begun is None else [*found, (begun, step.size)]


def alarm_rate(series_s: Array, asked: float, expected: float, seed: int) -> float:
    """False alarms of the live charts over those asked for, until `expected` were asked for.

    Consecutive steps are resampled in blocks of BLOCK and folded through the charts from a job's
    first step on; each alarm is a finding that ends at once. Columns are folded together, with the
    thresholds of one job that has shown what all of them have.

    Args:
        series_s: step times of a healthy run.
        asked: false alarms per job-day.
        expected: alarms that the time is enough for.
        seed: of the blocks.
    """
    rng, step_s = np.random.default_rng(seed), float(np.median(series_s))
    middles = np.median(np.lib.stride_tricks.sliding_window_view(np.log(series_s), BLOCK_STEPS), 1)
    columns = COLUMNS[asked]
    between = DAY_S / (BLOCK_STEPS * step_s * asked)
    charts = cusum.with_ranks(cusum.no_charts(), range(columns))
    quiet = np.full((WINDOW_STEPS // BLOCK_STEPS, columns), np.nan)
    held, is_open = np.zeros(columns), np.zeros(columns, dtype=np.bool_)
    alarms, num_blocks = 0, ceil(expected * between / columns)
    for block in range(num_blocks):
        if block % (BLOCK // BLOCK_STEPS) == 0:
            at = rng.integers(series_s.size - BLOCK + 1, size=columns)
        sample, at = middles[at], at + BLOCK_STEPS
        is_learnt = np.ones(columns, dtype=np.bool_)
        if block * BLOCK_STEPS >= LEAST_STEPS:
            if block < len(quiet) or block % REFIT_BLOCKS == 0:
                health = healthy_pace(quiet, charts.excursions)
                limits = limits_of(asked, step_s, charts.excursions)
            charts = cusum.advance(
                limits,
                charts,
                step=block,
                log_ratio=sample - health.log_ratio,
                doubt=health.doubt,
                sigma=health.sigma,
                is_open=is_open,
            )
            suspicion = cusum.suspicion(limits, charts)
            found = np.flatnonzero(suspicion >= 1.0)
            if found.size:
                alarms += found.size
                charts = with_findings(charts, found)
                limits = limits_of(asked, step_s, charts.excursions)
            held = np.where(suspicion <= QUIET_SUSPICION, 0.0, held + 1.0)
            is_learnt = (held == 0.0) | (held > HELD_STEPS)
        quiet[:-1, is_learnt], quiet[-1, is_learnt] = quiet[1:, is_learnt], sample[is_learnt]
    return alarms / (num_blocks * columns / between)


def print_rates(runs: Sequence[Run], expected: float) -> bool:
    """Print the false alarms raised over those asked for, by system; do they agree?"""
    one_each = {run.name.rpartition("/")[0]: run for run in runs}
    table = Table("system", *(f"{asked:g} a job-day" for asked in RATES))
    table.title = f"live, work told: alarms raised over asked for, until {expected:g} asked for"
    rows = {}
    for name, run in one_each.items():
        rows[name] = [alarm_rate(durations(run.trace), asked, expected, 0) for asked in RATES]
        table.add_row(name, *(f"{ratio:.2f}" for ratio in rows[name]))
    means = np.mean(list(rows.values()), axis=0)
    table.add_row("all", *(f"{ratio:.2f}" for ratio in means))
    Console(width=120).print(table)
    holds = bool(((means >= 1.0 / RATE_WITHIN) & (means <= RATE_WITHIN)).all())
    answer = {"rates": RATES, "raised_over_asked": means.tolist(), "systems": rows, "holds": holds}
    print(json.dumps(answer))
    return holds


def count(judge: str, runs: Sequence[Run], shape: str) -> Count:
    """What a judge finds of one incident in each run."""
    total = Count()
    for run in runs:
        draw = random.Random(f"{shape}/{run.name}")
        factor = FACTORS[0] if shape == "five_percent" else draw.choice(FACTORS)
        part = SHAPES[shape](draw, run.num_steps)
        slow = replace(
            run, trace=with_durations(run.trace, durations(run.trace) * (1 + (factor - 1) * part))
        )
        told = alarms(judge, slow)
        if told is None:
            continue
        hits = [_share(part > 0.0, alarm) >= OF_ALARM for alarm in told]
        total.runs += 1
        total.found += any(hits)
        total.false += hits.count(False)
    return total


def _share(is_slow: Flags, alarm: tuple[int, int]) -> float:
    return float(is_slow[alarm[0] : alarm[1]].mean())


def flagged(judge: str, runs: Sequence[Run]) -> Iterator[tuple[Run, bool]]:
    """Healthy runs that a judge calls slow, and whether they were beside their replicates."""
    for run in runs:
        told = alarms(judge, run)
        if told:
            yield run, were_slow(run, told)


def rates_without(
    false: Sequence[Run], runs: Sequence[Run], group: Callable[[Run], str]
) -> tuple[float, float]:
    """The least and the highest rate of flagged runs when one group is left out."""
    rates = []
    for name in {group(run) for run in runs}:
        kept = sum(group(run) != name for run in runs)
        rates.append(sum(group(run) != name for run in false) / max(1, kept))
    return min(rates), max(rates)


def interval(found: int, of: int) -> tuple[float, float]:
    """95 % interval of a share (Clopper and Pearson 1934)."""
    low = float(beta.ppf(0.025, found, of - found + 1)) if found else 0.0
    high = float(beta.ppf(0.975, found + 1, of - found)) if found < of else 1.0
    return low, high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--every", type=int, default=1, help="judge every n-th run only")
    parser.add_argument(
        "--rates", type=float, nargs="?", const=100.0, default=0.0, metavar="N",
        help="print the live detector's false alarm rates instead, each in the time for N alarms",
    )  # fmt: skip
    options = parser.parse_args()
    runs = read_runs(options.data)[:: options.every]
    if options.rates:
        return 0 if print_rates(runs, options.rates) else 1
    judges = (*OURS, *JOB_RULES)
    shown = Table("judge", "healthy runs flagged", *SHAPES, title="found / runs, false alarms")
    answer: dict[str, object] = {"runs": len(runs), "submitters": len({r.record for r in runs})}
    for judge in judges:
        told = list(flagged(judge, runs))
        false = [run for run, was_slow in told if not was_slow]
        low, high = interval(len(false), len(runs))
        counts = {shape: count(judge, runs, shape) for shape in SHAPES}
        by_submitter = {
            name: sum(run.record == name for run in false)
            for name in sorted({run.record for run in runs})
        }
        left_out = {
            "submitter": rates_without(false, runs, lambda run: run.record),
            "system": rates_without(false, runs, lambda run: run.name.rpartition("/")[0]),
        }
        answer[judge] = {
            "healthy_flagged": len(false),
            "slow_beside_replicates": len(told) - len(false),
            "rate_low": low,
            "rate_high": high,
            "by_submitter": by_submitter,
            **{f"rates_without_a_{part}": rates for part, rates in left_out.items()},
            **{
                shape: {"found": one.found, "runs": one.runs, "false": one.false}
                for shape, one in counts.items()
            },
        }
        shown.add_row(
            judge,
            f"{len(false)} + {len(told) - len(false)} slow ({low:.1%} to {high:.1%})",
            *(f"{one.found} / {one.runs}, {one.false}" for one in counts.values()),
        )
    Console(width=180).print(shown)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
