"""How near to the least possible delay do the charts come, at the rate of false alarms asked for?

`python -m benchmarks.detection_bound`; a few minutes. Efficiency = delay of CUSUM with the true
likelihood ratio, at the rate that ours was measured to have, over our delay; a delay of 1 is an
alarm on the first slow sample. Charts start at zero (Lorden's worst case); delays from the steady
state stand beside. Rates: counted for 1e4 samples between alarms; for 1e6 by importance sampling.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf, sqrt
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import norm, t

from benchmarks import cusum_bank
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.detector import cusum
from pacekeeper.predictor.detector.thresholds import Thresholds, chart_rules
from pacekeeper.predictor.stats.cusum_design import (
    ChartRule,
    ResidualDistribution,
    mean_run_length,
    threshold,
    whitened_shift,
)

LEAST_DELAY = 2.0  # one sample never decides
SHIFTS, ASKED = (1, 2, 3, 4, 5), (1e4, 1e6)
BAR_GAUSSIAN, BAR_HEAVY, BAR_RATE = 0.8, 0.5, 2.0
HISTORY = (5_000, 200)  # healthy samples and ranks whose excursions make the thresholds
COUNTED_RANKS, COUNTED_BATCH = 4_000, 100
WARM_SAMPLES, MOST_SAMPLES = 200, 3_000
TILTS = (1, 2, 3, 4, 5, 8)  # shifts in sigma that importance sampling looks for alarms with
T3_SCALE = float(t.ppf(0.75, 3)) * 1.4826  # the robust sigma of Student's t with 3 degrees
SPIKE_RATE, SPIKE = 0.005, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Healthy residuals: AR(1) of independent ones with `density` and `draw`; robust sigma 1."""

    name: str
    density: Callable[[Array], Array]
    draw: Callable[[np.random.Generator, tuple[int, ...]], Array]
    correlation: float = 0.0

    def next(self, last: Array, innovation: Array) -> Array:
        own = sqrt(1.0 - self.correlation**2)
        return self.correlation * last + own * innovation


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.standard_normal(shape)


def _t3(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.standard_t(3, shape) / T3_SCALE


def _spikes(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return random.standard_normal(shape) + SPIKE * (random.random(shape) < SPIKE_RATE)


def _normal_density(x: Array) -> Array:
    density: Array = np.maximum(norm.pdf(x), 1e-250)
    return density


def _t3_density(x: Array) -> Array:
    density: Array = T3_SCALE * t.pdf(x * T3_SCALE, 3)
    return density


def _spike_density(x: Array) -> Array:
    return (1.0 - SPIKE_RATE) * _normal_density(x) + SPIKE_RATE * _normal_density(x - SPIKE)


NOISES = (
    Noise(name="gaussian", density=_normal_density, draw=_normal),
    Noise(name="student t3", density=_t3_density, draw=_t3),
    Noise(name="0.5 % spikes of 8", density=_spike_density, draw=_spikes),
    Noise(name="AR 0.2", density=_normal_density, draw=_normal, correlation=0.2),
    Noise(name="AR 0.2 of t3", density=_t3_density, draw=_t3, correlation=0.2),
)


def fitted(noise: Noise, asked: float, seed: int) -> tuple[ChartRule, ...]:
    """Charts for the rate asked for, from the excursions in a healthy history of this noise."""
    history = series(noise, np.random.default_rng(seed), *HISTORY)
    charts = cusum.with_ranks(cusum.no_charts(), range(history.shape[1]))
    for step, row in enumerate(history):
        limits = Thresholds(rules=chart_rules(asked, charts.excursions))
        charts = cusum.advance(
            limits,
            charts,
            step=step,
            log_ratio=row,
            doubt=np.zeros_like(row),
            sigma=1.0,
            is_open=np.zeros(len(row), dtype=np.bool_),
        )
    return chart_rules(asked, charts.excursions)


def series(noise: Noise, random: np.random.Generator, num_samples: int, num_ranks: int) -> Array:
    """Healthy residuals [samples, ranks]."""
    values = noise.draw(random, (num_samples, num_ranks))
    if noise.correlation:
        for i in range(1, num_samples):
            values[i] = noise.next(values[i - 1], values[i])
    return values


def counted(
    noise: Noise, rules: tuple[ChartRule, ...], asked: float, seed: int, alarms: int
) -> float:
    """Samples between two false alarms, counted until there were about so many alarms."""
    random = np.random.default_rng(seed)
    bank = cusum_bank.begin(rules, COUNTED_RANKS)
    num_alarms, num_samples, last = 0, 0, noise.draw(random, (COUNTED_RANKS,))
    while num_samples < alarms * asked:
        batch = noise.draw(random, (COUNTED_BATCH, COUNTED_RANKS))
        if noise.correlation:
            for row in batch:
                row[:] = last = noise.next(last, row)
        bank, crossed = cusum_bank.fold(rules, bank, batch)
        num_alarms, num_samples = num_alarms + int(crossed.sum()), num_samples + crossed.size
    return num_samples / max(1, num_alarms)


def by_importance(
    noise: Noise,
    rules: tuple[ChartRule, ...],
    seed: int,
    *,
    samples: int = 400,
    streams: int = 20_000,
) -> float:
    """Samples between two false alarms: samples / P(an alarm within them), few of them.

    Streams get a shift of `TILTS` (in innovations) at a random sample; each alarm counts with the
    inverse likelihood ratio of that mixture, which is a sum of Shiryaev-Roberts statistics.
    """
    random = np.random.default_rng(seed)
    tilts = np.array(TILTS, dtype=np.float64)[:, None]
    shift = random.choice(np.array(TILTS, dtype=np.float64), streams)
    onset = random.integers(1, samples + 1, streams)
    ratio, weight = np.zeros((len(tilts), streams)), np.zeros(streams)
    is_running = np.ones(streams, dtype=np.bool_)
    bank, last = cusum_bank.begin(rules, streams), noise.draw(random, (streams,))
    for i in range(1, samples + 1):
        innovation = noise.draw(random, (streams,)) + np.where(i >= onset, shift, 0.0)
        own = noise.density(innovation)
        fresh = noise.density(innovation - tilts) / own
        ratio = np.minimum((ratio + 1.0) * fresh, 1e200)  # of streams that ended long ago
        last = noise.next(last, innovation)
        bank, crossed = cusum_bank.fold(rules, bank, last[None])
        ended = is_running & crossed[0]
        weight[ended] = samples / (ratio[:, ended].mean(axis=0) + (samples - i))
        is_running &= ~ended
    return samples / float(weight.mean())


def measured_delay(
    noise: Noise,
    rules: tuple[ChartRule, ...],
    shift: float,
    seed: int,
    *,
    warm: int = 0,
    runs: int = 10_000,
) -> float:
    """Mean samples to the alarm; `warm`: healthy samples before the shift, else charts at zero."""
    random = np.random.default_rng(seed)
    last, bank = noise.draw(random, (runs,)), cusum_bank.begin(rules, runs)
    for _ in range(warm):
        last = noise.next(last, noise.draw(random, (runs,)))
        bank, _ = cusum_bank.fold(rules, bank, last[None])
    delay, is_running = np.zeros(runs), np.ones(runs, dtype=np.bool_)
    while is_running.any() and delay.max() < MOST_SAMPLES:
        delay += is_running
        last = noise.next(last, noise.draw(random, (runs,)))
        bank, crossed = cusum_bank.fold(rules, bank, last[None] + shift)
        is_running &= ~crossed[0]
    return float(delay.mean())


@cache
def _grid() -> Array:
    return np.linspace(-40.0, 60.0, 100_001)


def optimal_delay(noise: Noise, shift: float, samples: float) -> float:
    """CUSUM with the true likelihood ratio of the innovations, by the integral equation.

    Of an AR(1) process too: the first innovation, which shows more of a shift, is not made use of.
    """
    own = whitened_shift(shift, noise.correlation)
    x = _grid()
    score = np.log(noise.density(x - own) / noise.density(x))
    h = threshold(_law_of(score, noise.density(x)), k=0.0, clip=inf, samples=samples)
    slow = _law_of(score, noise.density(x - own))
    return max(LEAST_DELAY, mean_run_length(slow, k=0.0, clip=inf, h=h))


def _law_of(score: Array, weight: Array) -> ResidualDistribution:
    order = np.argsort(score, kind="stable")
    below = np.cumsum(weight[order])
    return ResidualDistribution(at=score[order], below=below / below[-1])


def row_of(noise: Noise, asked: float, seed: int, scale: float) -> dict[str, Any]:
    """All that is measured for one noise and one rate."""
    rules = fitted(noise, asked, seed)
    streams = max(1_000, int(20_000 * scale))
    by_weight = by_importance(noise, rules, seed + 1, streams=streams)
    obtained = by_weight
    if asked <= 1e5:
        obtained = counted(noise, rules, asked, seed + 2, max(100, int(1_000 * scale)))
    runs = max(1_000, int(10_000 * scale))
    delays = [measured_delay(noise, rules, d, seed + 3, runs=runs) for d in SHIFTS]
    steady = [
        measured_delay(noise, rules, d, seed + 4, runs=runs, warm=WARM_SAMPLES) for d in SHIFTS
    ]
    optimal = [optimal_delay(noise, d, obtained) for d in SHIFTS]
    names = [str(d) for d in SHIFTS]
    return {
        "noise": noise.name,
        "asked": asked,
        "obtained": round(obtained),
        "by_importance_sampling": round(by_weight),
        "charts": [(rule.k, rule.clip, round(rule.h, 3)) for rule in rules],
        "optimal": dict(zip(names, [round(v, 3) for v in optimal], strict=True)),
        "delay": dict(zip(names, [round(v, 3) for v in delays], strict=True)),
        "steady_delay": dict(zip(names, [round(v, 3) for v in steady], strict=True)),
        "efficiency": {
            name: round(best / own, 3)
            for name, best, own in zip(names, optimal, delays, strict=True)
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="../shared/data", help="not used: all data is made here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of runs")
    options = parser.parse_args()
    table = Table(title=f"four charts, {HISTORY[0] * HISTORY[1]:,} healthy samples of history")
    for column in ("noise", "asked", "obtained", "clips", "delay at 1 .. 5 sigma (optimal)"):
        table.add_column(column, justify="right")
    table.add_column("from steady state", justify="right")
    table.add_column("efficiency", justify="right")
    rows = []
    for noise in NOISES:
        for asked in ASKED:
            row = row_of(noise, asked, options.seed, options.scale)
            rows.append(row)
            table.add_row(
                noise.name, f"{asked:.0e}", f"{row['obtained']:,}",
                " ".join(f"{clip:g}" for _, clip, _ in row["charts"]),
                " ".join(f"{row['delay'][d]:.1f} ({row['optimal'][d]:.1f})" for d in row["delay"]),
                " ".join(f"{value:.1f}" for value in row["steady_delay"].values()),
                " ".join(f"{value:.2f}" for value in row["efficiency"].values()),
            )  # fmt: skip
    Console(width=150).print(table)
    worst = {
        is_gaussian: {
            str(d): min(
                row["efficiency"][str(d)]
                for row in rows
                if row["noise"].startswith("gaussian") is is_gaussian
                and (row["noise"] == "gaussian" or not is_gaussian)
            )
            for d in SHIFTS
        }
        for is_gaussian in (True, False)
    }
    off = max(max(r["obtained"] / r["asked"], r["asked"] / r["obtained"]) for r in rows)
    holds = (
        min(worst[True].values()) >= BAR_GAUSSIAN
        and min(worst[False].values()) >= BAR_HEAVY
        and off <= BAR_RATE
    )
    result = {
        "efficiency_gaussian": worst[True],
        "efficiency_heavy_tail": worst[False],
        "optimal": "CUSUM with the true likelihood ratio at the measured rate",
        "false_alarms_off_by": round(off, 3),
        "rows": rows,
        "holds": holds,
    }
    print(json.dumps(result))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
