"""Which slow ranks does the live path name, how soon, and whom falsely, on recorded noise?

`python -m benchmarks.detect_live`; some minutes. Recorded times of healthy jobs become the records
that agents send, and go through `machine.advance` report by report, step by step; a stage is a
role. The work that a record tells: as the record of the run explains it (ByteDance: what documents
cost is not recorded, so the tokens told of a micro-batch stand for what its other stages needed),
the same in every step (SmartMoE). A rank's times are multiplied from a random step on, after the
first `--healthy` steps; "found": incidents opened on it within so many slow steps; "false":
incidents on another rank, and, per data set, those of the whole run without a slowdown. Others'
rules judge the same times, and are given what healthy steps take. Of a rank that is slow now and
then only every third step is slowed. "healthy as slow": bouts of the
ranks' own noise whose mean over as many steps reaches what 95 % of such slowdowns reach; whatever
finds these by a threshold accuses those.

`--rates`; a quarter of an hour: false alarms raised over asked for, on healthy residuals resampled
in blocks of steps, by the charts and by the rule for ranks that are slow now and then. The sum
holds within a factor of two; of a short record it may be less.

Prints a table, last one line of JSON.
"""

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rank_traces import RULES, share
from pacekeeper.controller.machine.machine import advance
from pacekeeper.controller.state.events import NodeAttached, NodeReported
from pacekeeper.controller.state.state import State
from pacekeeper.core.config.controller import ControllerConfig
from pacekeeper.core.config.policy import PolicyConfig
from pacekeeper.core.incidents.findings import FindingKind
from pacekeeper.core.telemetry.attachment import Attachment
from pacekeeper.core.telemetry.node_report import JobReport, NodeReport
from pacekeeper.core.telemetry.records import MicroBatchRecord, Record, StepRecord
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.alarms import update_alarms
from pacekeeper.predictor.detector.cusum import Charts
from pacekeeper.predictor.detector.intermittent import repeatedly_slow, runs_beyond_chance
from pacekeeper.predictor.detector.model_training import REFIT_PERIOD_STEPS
from pacekeeper.predictor.detector.state import Evidence
from pacekeeper.predictor.detector.thresholds import StepNoise, Thresholds, chart_rules
from pacekeeper.predictor.detector.update import WANDER
from pacekeeper.predictor.recorded.residuals import TraceTimes, residuals_of, times_of
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.predictor.stats.cusum_design import samples_between_alarms
from pacekeeper.predictor.stats.robust import robust_scale
from pacekeeper.simulator.readers.bytedance import read_bytedance
from pacekeeper.simulator.readers.smartmoe import read_smartmoe

JOB = "recorded"
OURS = "pacekeeper live"
RANKS_PER_NODE = 8
FOUND = 0.95
TOKENS_PER_S = 1e6  # of the work told: a micro-batch of a second has a million tokens
ASKED = (1.0, 10.0, 100.0)  # false alarms a job-day
BLOCKS = (8, 32)  # steps of residuals that are resampled together
RATE_WITHIN = 2.0
SETTLED_STEPS = 3  # of a recorded run, from which on its noise is a job's
LEAST_BLOCKS = 3  # of a recorded run: shorter ones say nothing of noise that lasts for a block
LONG_STEPS = 100  # of fewer there are few different blocks: heights that no threshold lies between
COLUMNS = {1.0: 4_096, 10.0: 512, 100.0: 64}  # ranks folded at once, by the rate asked for
CONFIG = ControllerConfig(policy=PolicyConfig(mode="observe"))


@dataclass(frozen=True, slots=True)
class Case:
    """A slowdown in one of `every` steps, FOUND of which must be found `within` so many steps."""

    factor: float
    every: int
    within: int

    @property
    def name(self) -> str:
        return f"x{self.factor:g}" + (f" in 1 of {self.every}" if self.every > 1 else "")

    def factors(self) -> Array:
        """Of each step within which it must be found [within]."""
        is_slow = np.arange(self.within) % self.every == 0
        return np.where(is_slow, self.factor, 1.0)


CASES = (
    *(Case(1.03, 1, 4), Case(1.05, 1, 2), Case(1.1, 1, 2), Case(1.2, 1, 2)),
    *(Case(1.2, 3, 20), Case(1.5, 3, 20)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """Times of a healthy run, as ranks would tell them.

    Attributes:
        stage: of each rank.
        observed_s, expected_s: [steps, micro-batches, ranks]; NaN: not run. Expected: what is told
            as tokens.
    """

    name: str
    stage: tuple[int, ...]
    observed_s: Array
    expected_s: Array

    @property
    def num_steps(self) -> int:
        return len(self.observed_s)

    @property
    def num_ranks(self) -> int:
        return len(self.stage)


def recorded_job(name: str, trace: Trace, *, is_work_told: bool) -> RecordedJob:
    """The job of a trace; where its work is not told, all micro-batches of a stage have as much."""
    times = times_of(trace)
    observed_s = _by_microbatch(times, np.exp(times.log_s))
    if is_work_told:
        whole, *_ = residuals_of(times, np.zeros((len(times.steps), len(times.rank_of))))
        told = _cube(times, np.exp(-(whole.samples + whole.shared[times.step_of])))
        expected_s = observed_s * told
    else:
        expected_s = np.ones_like(observed_s)
    return RecordedJob(
        name=name, stage=tuple(times.stage.tolist()), observed_s=observed_s, expected_s=expected_s
    )


def _by_microbatch(times: TraceTimes, seconds: Array) -> Array:
    """Add up the chunks of a micro-batch: [times, columns] -> [steps, micro-batches, ranks]."""
    summed = np.zeros((len(seconds), len(times.ranks)))
    np.add.at(summed.T, times.rank_of, seconds.T)
    return _cube(times, summed)


def _cube(times: TraceTimes, table: Array) -> Array:
    most = int(np.bincount(times.step_of).max())
    cube = np.full((len(times.steps), most, table.shape[1]), np.nan)
    for step in range(len(times.steps)):
        own = table[times.step_of == step]
        cube[step, : len(own)] = own
    return cube


class Player:
    """A controller that is sent the reports of a job's nodes; a value: `state` can be kept."""

    def __init__(self, job: RecordedJob) -> None:
        self.job = job
        self.now_s = 100.0
        self.state = State()
        self.nodes = [
            range(first, min(first + RANKS_PER_NODE, job.num_ranks))
            for first in range(0, job.num_ranks, RANKS_PER_NODE)
        ]
        for node, ranks in enumerate(self.nodes):
            self._advance(
                NodeAttached(node=f"node-{node}", product_version="0", agent_incarnation="a")
            )
            attached = tuple(
                Attachment(
                    job=JOB, rank=rank, world_size=job.num_ranks, pid=1000 + rank,
                    role=f"stage {job.stage[rank]}",
                )
                for rank in ranks
            )  # fmt: skip
            self._report(node, JobReport(job=JOB, attached=attached))

    def step(self, number: int, observed_s: Array, expected_s: Array) -> set[int]:
        """Send one step [micro-batches, ranks]; the ranks with an open incident after it."""
        self.now_s += float(np.nansum(observed_s, axis=0).max())
        for node, ranks in enumerate(self.nodes):
            records = tuple(
                record
                for rank in ranks
                for record in _records(number, rank, observed_s, expected_s)
            )
            self._report(node, JobReport(job=JOB, records=records))
        job = self.state.jobs[JOB]
        assert job.progress.step == number, "a step is judged with its last record"
        return {
            incident.finding.rank
            for incident in job.open_incidents
            if incident.finding.kind is FindingKind.DEVICE and incident.finding.rank is not None
        }

    def _report(self, node: int, part: JobReport) -> None:
        report = NodeReport(sequence=1, sent_mono_s=self.now_s, jobs=(part,))
        self._advance(NodeReported(node=f"node-{node}", agent_incarnation="a", report=report))

    def _advance(self, event: NodeAttached | NodeReported) -> None:
        self.state, _ = advance(self.state, event, config=CONFIG, now_s=self.now_s)


def _records(step: int, rank: int, observed_s: Array, expected_s: Array) -> Iterator[Record]:
    for micro_batch in np.flatnonzero(np.isfinite(observed_s[:, rank])).tolist():
        yield MicroBatchRecord(
            rank=rank,
            step=step,
            micro_batch=micro_batch,
            generation=0,
            compute_s=float(observed_s[micro_batch, rank]),
            tokens=round(float(expected_s[micro_batch, rank]) * TOKENS_PER_S),
        )
    duration_s = float(np.nansum(observed_s, axis=0).max())
    yield StepRecord(rank=rank, step=step, generation=0, duration_s=duration_s, tokens=1_000)


def healthy_run(job: RecordedJob) -> tuple[list[State], set[int]]:
    """The states before each step of the run as recorded, and whom it accused on the way."""
    player, states, accused = Player(job), list[State](), set[int]()
    for step in range(job.num_steps):
        states.append(player.state)
        accused |= player.step(step, job.observed_s[step], job.expected_s[step])
    return states, accused


def injected(
    job: RecordedJob, states: Sequence[State], case: Case, trials: int, healthy: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Slow a random rank from a random step on: what each rule finds, how soon, and whom else."""
    rng, within = np.random.default_rng(seed), case.within
    delays: dict[str, list[float]] = {rule: [] for rule in (OURS, *RULES)}
    false = dict.fromkeys(delays, 0)
    player = Player(job)
    for _ in range(trials):
        rank = int(rng.integers(job.num_ranks))
        onset = int(rng.integers(healthy, job.num_steps - within + 1))
        player.state = states[onset]
        before = {i.finding.rank for i in states[onset].jobs[JOB].open_incidents}
        delay, others = np.inf, set[int]()
        for step, factor in zip(range(onset, onset + within), case.factors(), strict=True):
            slow_s = job.observed_s[step].copy()
            slow_s[:, rank] *= factor
            named = player.step(step, slow_s, job.expected_s[step])
            others |= named - {rank} - before
            if rank in named and not np.isfinite(delay):
                delay = step - onset + 1
        delays[OURS].append(delay)
        false[OURS] += len(others)
        for name, flags in _flags(job, rank, onset, case).items():
            hit = np.flatnonzero(flags[onset:, rank])
            delays[name].append(hit[0] + 1 if len(hit) else np.inf)
            false[name] += int(np.delete(flags.any(axis=0), rank).sum())
    return {
        name: {
            "found": share([bool(np.isfinite(delay)) for delay in waits]),
            "delay": float(np.median(waits)) if np.isfinite(np.median(waits)) else None,
            "false": false[name],
        }
        for name, waits in delays.items()
    }


def _flags(job: RecordedJob, rank: int, onset: int, case: Case) -> Mapping[str, Any]:
    """What the rules of others say of the same steps [steps, ranks]."""
    healthy_s = np.nansum(job.observed_s[: onset + case.within], axis=1)
    times_s = healthy_s.copy()
    times_s[onset:, rank] *= case.factors()
    stages, expected_s = list(job.stage), healthy_s.max(axis=1)
    return {
        name: rule.flags(times_s, stages, expected_s=expected_s) for name, rule in RULES.items()
    }


def healthy_as_slow(job: RecordedJob, case: Case) -> int:
    """How many separate bouts of healthy noise reach what FOUND of the slowdowns reach."""
    windows = np.lib.stride_tricks.sliding_window_view(residuals_of_ranks(job), case.within, axis=0)
    means = windows[..., :: case.every].mean(axis=-1)
    is_alike = means >= np.quantile(means, 1.0 - FOUND) + np.log(case.factor)
    return int(is_alike[0].sum() + (is_alike[1:] & ~is_alike[:-1]).sum())


def show_injected(
    console: Console, jobs: Sequence[RecordedJob], options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, int]]:
    table = Table(title="slowdowns found live (median delay; false accusations)")
    for column in ("data", "factor", "within steps", "healthy as slow", OURS, *RULES):
        table.add_column(column, justify="right")
    rows: dict[str, Any] = {}
    clean = dict[str, int]()
    for job in jobs:
        states, accused = healthy_run(job)
        clean[job.name] = len(accused)
        rows[job.name] = {}
        for case in CASES:
            if options.healthy + case.within > job.num_steps:
                continue
            found = injected(job, states, case, options.trials, options.healthy, options.seed)
            alike = healthy_as_slow(job, case)
            rows[job.name][case.name] = {**found, "healthy_as_slow": alike}
            cells = (
                f"{row['found']:.0%} ({row['delay'] or '-'}; {row['false']})"
                for row in found.values()
            )
            table.add_row(job.name, case.name, str(case.within), str(alike), *cells)
    console.print(table)
    console.print(f"accused in healthy runs: {clean}")
    return rows, clean


def residuals_of_ranks(job: RecordedJob) -> Array:
    """Log of each rank's time over its work in a step, beside its stage and its own middle [steps,
    ranks].
    """
    told_s = job.observed_s, np.where(np.isfinite(job.observed_s), job.expected_s, np.nan)
    observed_s, expected_s = (np.nansum(times[SETTLED_STEPS:], axis=1) for times in told_s)
    log_s = np.log(observed_s / expected_s)
    for stage in set(job.stage):
        own = np.array(job.stage) == stage
        log_s[:, own] -= np.median(log_s[:, own], axis=1, keepdims=True)
    residuals: Array = log_s - np.median(log_s, axis=0)
    return residuals


def alarm_rates(
    job: RecordedJob, asked: float, block_steps: int, expected: int, seed: int
) -> tuple[float, float]:
    """False alarms of the charts, and of the rule for ranks that are slow now and then, each over
    those asked for, until `expected` were asked for.

    The ranks' residuals are resampled in blocks of steps and folded through both from a job's first
    step on, `COLUMNS` at once, each as many as a job's ranks beside each other. A finding of a
    chart ends at once, one of the other rule when the detector closes it. A sample has the rate
    that it has in a job of as many ranks and steps a day as the recorded one.
    """
    rng, residuals = np.random.default_rng(seed), residuals_of_ranks(job)
    step_s = float(np.median(np.nansum(job.observed_s[SETTLED_STEPS:], axis=1).max(axis=1)))
    between = samples_between_alarms(
        asked, num_ranks=job.num_ranks, samples_per_rank_s=1.0 / step_s
    )
    sigma = robust_scale(residuals)
    noise = StepNoise(sigma=sigma, freedom=np.inf)
    columns = COLUMNS[asked]
    refit_steps = max(1, REFIT_PERIOD_STEPS * job.num_ranks // columns)
    charts = cusum.with_ranks(cusum.no_charts(), range(columns))
    doubt, slow = np.full(columns, WANDER), dict[int, float]()
    num_crossed, num_repeated, num_steps = 0, 0, ceil(expected * between / columns)
    for step in range(num_steps):
        if step % block_steps == 0:
            rank = rng.integers(residuals.shape[1], size=columns)
            first = rng.integers(len(residuals) - block_steps + 1, size=columns)
        if step % refit_steps == 0:
            limits = Thresholds(rules=chart_rules(between, charts.excursions), between=between)
        is_open = np.zeros(columns, dtype=np.bool_)
        is_open[list(slow)] = True
        charts = cusum.advance(
            limits,
            charts,
            step=step,
            log_ratio=residuals[first + step % block_steps, rank],
            doubt=doubt,
            sigma=sigma,
            is_open=is_open,
        )
        if slow:
            evidence = Evidence(charts=charts, limits=limits, noise=noise, slow=slow)
            evidence, _, _ = update_alarms(CONFIG.detector, evidence)
            charts, slow = evidence.charts, dict(evidence.slow)
        found = np.flatnonzero(cusum.suspicion(limits, charts) >= 1.0)
        repeated = slow_now_and_then(charts, sigma, between, job.num_ranks, slow)
        if len(found):
            charts = cusum.recovered(charts, found.tolist())
            levels = charts.levels.copy()
            levels[:, found] = 0.0
            charts = replace(charts, levels=levels)
        num_crossed += len(found)
        num_repeated += len(repeated.keys() - {*found.tolist()})
        slow |= repeated
    alarms_asked = num_steps * columns / between
    return num_crossed / alarms_asked, num_repeated / alarms_asked


def slow_now_and_then(
    charts: Charts, sigma: float, between: float, num_ranks: int, slow: Collection[int]
) -> dict[int, float]:
    """The slowdowns of the columns that are named as slow now and then, each beside its job's."""
    found, is_healthy = dict[int, float](), np.ones(len(charts.ranks), dtype=np.bool_)
    is_healthy[list(slow)] = False
    sigmas = np.full(len(charts.ranks), sigma)
    suspects = repeatedly_slow(
        charts.recent, doubts=charts.recent_doubt, sigmas=sigmas, is_healthy=is_healthy
    )
    for first in sorted({i - i % num_ranks for i in suspects.tolist()}):
        own = slice(first, first + num_ranks)
        runs = runs_beyond_chance(
            charts.recent[:, own],
            doubts=charts.recent_doubt[:, own],
            sigmas=sigmas[own],
            is_healthy=is_healthy[own],
            between=between,
        )
        for i, run in runs.items():
            found[first + i] = float(np.exp(charts.recent[-run:, first + i]).mean())
    return found


def show_rates(
    console: Console, jobs: Sequence[RecordedJob], options: argparse.Namespace
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, dict[str, bool]]]:
    """The rates of each job and block by the rate asked for, and whether their sums hold."""
    table = Table(
        title=f"false alarms over asked for, {options.expected} asked for: charts + now and then"
    )
    for column in ("data", "block of steps", *(f"{asked:g} a job-day" for asked in ASKED)):
        table.add_column(column, justify="right")
    rows: dict[str, dict[str, dict[str, float]]] = {}
    kept: dict[str, dict[str, bool]] = {}
    for job in jobs:
        least = 1.0 / RATE_WITHIN if job.num_steps >= LONG_STEPS else 0.0
        for block in BLOCKS:
            if LEAST_BLOCKS * block > len(residuals_of_ranks(job)):
                continue
            found = {
                f"{asked:g}": alarm_rates(job, asked, block, options.expected, options.seed)
                for asked in ASKED
            }
            name = f"{job.name}, blocks of {block}"
            rows[name] = {
                asked: {"charts": round(charts, 2), "now_and_then": round(repeated, 2)}
                for asked, (charts, repeated) in found.items()
            }
            kept[name] = {asked: least <= sum(both) <= RATE_WITHIN for asked, both in found.items()}
            cells = (f"{charts:.2f} + {repeated:.2f}" for charts, repeated in found.values())
            table.add_row(job.name, str(block), *cells)
    console.print(table)
    return rows, kept


def jobs_of(data: Path) -> list[RecordedJob]:
    """The healthy runs that a folder of data holds."""
    found = []
    for name in ("SE", "ST"):
        trace = read_bytedance(data / "bytedance_straggler" / f"trace-{name}.parquet")
        found.append(recorded_job(name, trace, is_work_told=True))
    for path in sorted((data / "smartmoe_ranktimes").glob("rank_times_*.parquet")):
        name = f"MoE {path.stem.removeprefix('rank_times_')}"
        found.append(recorded_job(name, read_smartmoe(path), is_work_told=False))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--trials", type=int, default=100, help="slowdowns per row")
    parser.add_argument("--healthy", type=int, default=8, help="least healthy steps before one")
    parser.add_argument("--only", default="", help="the data sets whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rates",
        dest="expected",
        type=int,
        nargs="?",
        const=100,
        default=0,
        help="play healthy residuals until so many false alarms were asked for (100), no more",
    )
    options = parser.parse_args()
    console = Console(width=200)
    jobs = [job for job in jobs_of(options.data) if options.only in job.name]
    if options.expected:
        rates, kept = show_rates(console, jobs, options)
        print(json.dumps({"rates": rates, "holds": kept}))
        return 0 if all(all(row.values()) for row in kept.values()) else 1
    rows, clean = show_injected(console, jobs, options)
    holds = {
        f"{name} {factor}": found[factor][OURS]["found"] >= FOUND
        for name, found in rows.items()
        for factor in found
    }
    holds["healthy"] = not any(clean.values())
    print(json.dumps({"injected": rows, "accused_healthy": clean, "holds": holds}))
    return 0 if all(holds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
