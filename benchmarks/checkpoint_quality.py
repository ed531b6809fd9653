"""What going back to partial checkpoints costs in quality: a run with four deaths beside one that
goes back to whole ones, on text that nobody learns from.

Two ranks train a small Qwen3-MoE on the standard library's source, with the steps, votes,
checkpoints and restores of `pacekeeper launch`, as threads. Half of the experts have two replicas,
half one. In each quarter of a run, at a random step, one rank dies, or all do: what lived there
alone comes from the newest checkpoint. All modes of a seed begin alike, see the same samples and
lose the same ranks at the same steps: judged is the difference from `full`, whose spread over seeds
is the noise. The control, `reset`, begins lost experts anew and must be seen. `full` and `exact`
must be bit by bit the `undisturbed` run.

Second, uniform routing: lost tokens counted by real checkpoints and restores against the closed
form. Prints two tables, last one line of JSON.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from benchmarks.quality_runs import (
    CONTROL,
    EXACT,
    FULL,
    JOB,
    MODES,
    NUM_EXPERTS,
    NUM_LAYERS,
    SCRATCH,
    UNDISTURBED,
    Mode,
    Result,
    quality_job,
    run,
)
from pacekeeper.core.checkpoint.partial_experts import (
    LOST_TOKENS_LIMIT,
    expected_lost_token_ratio,
    lost_token_ratio,
)
from pacekeeper.core.config.engine import EngineConfig

SURE = 0.95
UNIFORM_DEATHS = 20
# Checkpoints between two of these deaths, at most. The first after each is full, and loses nothing
# to the next death: where deaths are frequent, that is less than the closed form says.
LIFE = 160
TOKENS = 2048  # in a period and layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of a mode's runs, beside those of `full` with the same seeds. `half_width` of the interval
    that holds the mean difference, `SURE` sure; `after`: the mean difference just after restores.
    """

    name: str
    loss: float
    difference: float
    half_width: float
    after: float
    plts: tuple[float, ...]
    saved: float
    num_saved: tuple[int, ...]
    is_same: bool

    def is_within(self, noise: float) -> bool:
        """Is all of the interval within the spread of seeds?"""
        return abs(self.difference) + self.half_width <= noise


def judge(name: str, found: Sequence[Result], full: Sequence[Result]) -> Verdict:
    """`found` and `full`: by seed, two at least."""
    apart = [one.loss - other.loss for one, other in zip(found, full, strict=True)]
    wide = float(student.ppf((1 + SURE) / 2, len(apart) - 1)) * stdev(apart) / len(apart) ** 0.5
    jumps = [
        a - b
        for one, other in zip(found, full, strict=True)
        for a, b in zip(one.after, other.after, strict=False)
    ]
    return Verdict(
        name=name,
        loss=fmean(one.loss for one in found),
        difference=fmean(apart),
        half_width=wide,
        after=fmean(jumps) if jumps else 0.0,
        plts=tuple(one.plt for one in found),
        saved=fmean(one.saved_bytes for one in found) / fmean(one.saved_bytes for one in full),
        num_saved=tuple(one.num_saved for one in found),
        is_same=all(a.digest == b.digest for a, b in zip(found, full, strict=True)),
    )


def uniform(num_saved: int, num_deaths: int) -> tuple[float, float]:
    """PLT of a run whose tokens choose experts by even chance: as counted by its checkpoints and
    restores, and by the closed form. Everything comes from storage at each death.
    """
    from support.trainees import TINY, Lone

    draw = np.random.default_rng(0)
    config = replace(
        TINY,
        experts_per_checkpoint=num_saved,
        lost_tokens_limit=0.0,
        checkpoint_period_steps=JOB["checkpoint_period_steps"],
    )
    even = [1.0 / NUM_EXPERTS] * NUM_EXPERTS
    with tempfile.TemporaryDirectory(prefix="pacekeeper-uniform-", dir=SCRATCH) as folder:
        lone = Lone(Path(folder), config, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS)

        def go_on() -> None:
            counts = draw.multinomial(TOKENS, even, size=NUM_LAYERS).tolist()
            lone.checkpoints.partial.count(dict(enumerate(counts)))
            lone.step += config.checkpoint_period_steps

        for _ in range(num_deaths):
            for _ in range(draw.integers(1, LIFE + 1)):
                go_on()
                lone.save()
            go_on()  # what nobody saved is done again: no token of it is lost
            lone.restore()
        account = lone.checkpoints.partial.account
        planned = expected_lost_token_ratio(
            num_faults=num_deaths,
            period_steps=config.checkpoint_period_steps,
            total_steps=lone.step,
            num_experts=NUM_EXPERTS,
            num_saved=num_saved,
        )
    return lost_token_ratio(account.lost, [sum(counts) for counts in account.routed]), planned


def show(verdicts: Sequence[Verdict], noise: float) -> Table:
    """One line per mode; losses in thousandths where they are differences."""
    table = Table(title=f"seeds are {1e3 * noise:.1f} thousandths apart (standard deviation)")
    for column in ("mode", "bytes %", "experts", "PLT %", "largest", "loss", "minus full, / 1000",
                   "after a restore", "within noise"):  # fmt: skip
        table.add_column(column, justify="left" if column == "mode" else "right")
    for one in verdicts:
        table.add_row(
            one.name,
            f"{100 * one.saved:.0f}",
            "-".join(str(n) for n in sorted({min(one.num_saved), max(one.num_saved)})),
            f"{100 * fmean(one.plts):.2f}",
            f"{100 * max(one.plts):.2f}",
            f"{one.loss:.4f}",
            f"{1e3 * one.difference:+.2f} +- {1e3 * one.half_width:.2f}",
            f"{1e3 * one.after:+.1f}",
            "bit by bit" if one.is_same else "yes" if one.is_within(noise) else "no",
        )
    return table


def uniform_ratios(num_deaths: int, console: Console) -> dict[int, float]:
    """Counted PLT over that of the closed form, by experts saved; shown as a table."""
    table = Table(title=f"uniform routing, {NUM_EXPERTS} experts, {num_deaths} deaths each")
    for column in ("saved", "counted PLT %", "closed form %", "ratio"):
        table.add_column(column, justify="right")
    found = {}
    for num_saved in (1, 2, 3, 4):
        counted, planned = uniform(num_saved, num_deaths)
        found[num_saved] = ratio = counted / planned
        table.add_row(
            str(num_saved), f"{100 * counted:.3f}", f"{100 * planned:.3f}", f"{ratio:.3f}"
        )
    console.print(table)
    return found


def collect(
    modes: Sequence[Mode], seeds: Sequence[int], base: EngineConfig
) -> dict[str, list[Result]]:
    """The runs of each mode, by seed; a line is printed for each."""
    found: dict[str, list[Result]] = {mode.name: [] for mode in modes}
    for seed in seeds:
        for mode in modes:
            began_s = time.monotonic()
            one = run(mode, base, seed)
            found[mode.name].append(one)
            took_s = time.monotonic() - began_s
            print(
                f"seed={seed} mode={mode.name} loss={one.loss:.4f} plt={one.plt:.4f} "
                f"took {took_s:.0f} s",
                flush=True,
            )
    return found


def is_kept(verdicts: Sequence[Verdict], noise: float) -> bool:
    """Where few tokens are lost the noise of seeds hides it, the control is seen, and what is exact
    is the same bit by bit.
    """
    exact = (UNDISTURBED.name, EXACT.name)
    return all(one.is_same for one in verdicts if one.name in exact) and all(
        one.is_within(noise) != (one.name == CONTROL.name)
        for one in verdicts
        if one.name == CONTROL.name or max(one.plts) <= LOST_TOKENS_LIMIT
    )


def main() -> int:
    """1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="not used: all data is made here")
    parser.add_argument("--seeds", type=int, default=5)
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="*", choices=names, help="these only, beside full")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of two runs: judges nothing"
    )
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: expected at least 2: their spread is the noise")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    logging.disable(logging.WARNING)  # each restore with loss says so
    num_steps = JOB["steps"] // 4 if options.quick else JOB["steps"]
    seeds = range(2 if options.quick else options.seeds)
    modes = [m for m in MODES if m is FULL or not options.modes or m.name in options.modes]
    with tempfile.TemporaryDirectory(prefix="pacekeeper-quality-", dir=SCRATCH) as folder:
        found = collect(modes, seeds, quality_job(Path(folder), steps=num_steps))
    noise = stdev(one.loss for one in found[FULL.name])
    verdicts = [judge(name, runs, found[FULL.name]) for name, runs in found.items()]
    console = Console(width=120)
    console.print(show(verdicts, noise))
    result: dict[str, object] = {"seeds": len(seeds), "steps": num_steps, "noise": round(noise, 5)}
    for one in verdicts:
        result |= {
            f"{one.name}_loss": round(one.loss, 5),
            f"{one.name}_difference": round(one.difference, 5),
            f"{one.name}_half_width": round(one.half_width, 5),
            f"{one.name}_plt": round(fmean(one.plts), 5),
            f"{one.name}_is_within": one.is_within(noise),
            f"{one.name}_is_same": one.is_same,
        }
    ratios = uniform_ratios(4 if options.quick else UNIFORM_DEATHS, console)
    result |= {f"uniform_ratio_{n}": round(ratio, 4) for n, ratio in ratios.items()}
    is_good = is_kept(verdicts, noise) and all(abs(r - 1.0) <= 0.1 for r in ratios.values())
    print(json.dumps(result | {"is_kept": is_good}))
    return 0 if is_good or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
