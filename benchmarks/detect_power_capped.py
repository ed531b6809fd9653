"""Is a GPU found whose power is capped, which one, and how soon?

`python -m benchmarks.detect_power_capped`; some minutes. Measured runs are joined to an onset (see
simulator/readers/perseus.py): full power, then a setting with a cap for each GPU, of which ten
iterations are seen. "one": one GPU follows the setting, the others stay at full power as measured
in another run. "several": the whole setting, if it leaves somebody at full power; if it leaves
nobody, the slowdown is nobody's in particular and not judged here. Who is found at 300 W is accused
wrongly. "effective": found of those that the cap slowed by 1.5 % or more. Each GPU here has a stage
of its own: rules that only compare peers can find nothing.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.rank_traces import OURS, RULES, accused, compute, matrix, share, steps_of, until
from pacekeeper.predictor.recorded.trace import Trace
from pacekeeper.simulator.readers.perseus import FULL_POWER_W, CappedRun, joined, read_perseus

SEEN = 10  # iterations after the onset
BARS = {275: 0.70, 250: 0.95}  # and all of those below
EFFECTIVE, CLEAR = 1.015, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A joined trace, cut at the last step seen, and the same at full power throughout."""

    kind: str
    trace: Trace
    healthy: Trace
    onset: int
    cap_w: Mapping[int, int]


def cases(
    runs: tuple[CappedRun, ...], every: int, healthy_iterations: int | None
) -> Iterator[Case]:
    """All onsets of a file, after so many iterations of history (None: all that were recorded);
    below 250 W only every so many of the single ones.
    """
    for job in sorted({run.job for run in runs}, key=str):
        own = [run for run in runs if run.job == job]
        healthy = [run for run in own if run.is_healthy]
        lengths = [len(steps_of(run.trace)) for run in healthy]
        for run in own:
            if run.scheduler != "zeus_local":
                continue
            if max(run.cap_w.values()) >= FULL_POWER_W:
                trace = joined(healthy, run, healthy_iterations=healthy_iterations)
                yield _case("several", trace, sum(lengths), run.cap_w)
            for rank, cap in run.cap_w.items():
                if cap < FULL_POWER_W and (cap >= 250 or (run.setting + rank) % every == 0):
                    trace = joined(
                        healthy, run, victims=[rank], healthy_iterations=healthy_iterations
                    )
                    caps = dict.fromkeys(run.cap_w, FULL_POWER_W) | {rank: cap}
                    yield _case("one", trace, sum(lengths[:-1]), caps)


def _case(kind: str, trace: Trace, onset: int, cap_w: Mapping[int, int]) -> Case:
    seen = until(trace, onset + SEEN - 1)
    return Case(kind=kind, trace=seen, healthy=_healthy(seen, onset), onset=onset, cap_w=cap_w)


def _healthy(trace: Trace, onset: int) -> Trace:
    """Every step of a rank takes its median before the onset: there the work is always the same."""
    table = compute(trace)
    compute_s = table.compute_s.copy()
    for rank in np.unique(table.rank):
        for chunk in np.unique(table.chunk):
            own = (table.rank == rank) & (table.chunk == chunk)
            compute_s[own] = np.median(compute_s[own & (table.step < onset)])
    return replace(trace, compute=replace(table, compute_s=compute_s))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--every", type=int, default=4, help="of the onsets below 250 W")
    parser.add_argument(
        "--healthy", type=int, default=None, help="iterations of history (all that were recorded)"
    )
    options = parser.parse_args()
    rows: dict[tuple[str, str, int], list[tuple[bool, bool]]] = defaultdict(list)
    delays: dict[int, list[int]] = defaultdict(list)
    clear: dict[str, list[bool]] = defaultdict(list)
    for path in sorted((options.data / "perseus_power_capped").glob("rank_iterations_*.parquet")):
        for case in cases(read_perseus(path), options.every, options.healthy):
            times_s, _, ranks = matrix(case.trace)
            before = int((steps_of(case.trace) < case.onset).sum())
            healthy_s = np.median(times_s[:before], axis=0)
            slowdown = np.median(times_s[before:], axis=0) / healthy_s
            for rule in (OURS, *RULES):
                named = accused(case.trace, rule, healthy=case.healthy)
                for rank, cap in case.cap_w.items():
                    measured = float(slowdown[ranks.index(rank)])
                    rows[rule, case.kind, cap].append((rank in named, measured >= EFFECTIVE))
                    if rule == OURS and measured >= CLEAR:
                        clear[case.kind].append(rank in named)
            if case.kind == "one":
                rank, cap = min(case.cap_w.items(), key=lambda item: item[1])
                delays[cap].append(_delay(case, rank))

    table = Table(title=f"found within {SEEN} iterations")
    for column in ("onset", "cap W", "GPUs", "bar", OURS, "effective", "delay p50/p95", *RULES):
        table.add_column(column, justify="right")
    figures, holds = [], {}
    for kind, cap in sorted({(kind, cap) for _, kind, cap in rows}, key=lambda i: (i[0], -i[1])):
        is_capped = cap < FULL_POWER_W
        found = {rule: share([hit for hit, _ in rows[rule, kind, cap]]) for rule in (OURS, *RULES)}
        count = len(rows[OURS, kind, cap])
        effective = share([hit for hit, is_real in rows[OURS, kind, cap] if is_real])
        bar = BARS.get(cap, 1.0) if is_capped else 0.0
        holds[f"{kind} {cap}"] = found[OURS] >= bar if is_capped else found[OURS] == 0.0
        waits = delays[cap] if kind == "one" and is_capped else []
        figures.append(
            {"onset": kind, "cap_w": cap, "gpus": count, "found": found,
             "effective": effective if is_capped else None,
             "delay_p50": float(np.median(waits)) if waits else None}
        )  # fmt: skip
        table.add_row(
            kind, str(cap), str(count), f"{bar:.0%}", f"{found[OURS]:.1%}",
            f"{effective:.1%}" if is_capped else "",
            f"{np.median(waits):.0f}/{np.quantile(waits, 0.95):.0f}" if waits else "",
            *(f"{found[rule]:.0%}" for rule in RULES),
        )  # fmt: skip
    Console(width=150).print(table)
    clearly = {kind: {"gpus": len(hits), "found": share(hits)} for kind, hits in clear.items()}
    print(f"of those measured at x{CLEAR} and more: {clearly}")
    print(json.dumps({"rows": figures, "clear": clearly, "holds": holds}))
    return 0 if all(holds.values()) else 1


def _delay(case: Case, rank: int) -> int:
    """Iterations after which the rank is named, the first slow one counted; SEEN + 1: not named.

    Doubling, then halving the distance: a rank once named stays named in practice.
    """
    low, high = 0, SEEN + 1
    while high - low > 1:
        middle = (low + high) // 2
        named = accused(until(case.trace, case.onset + middle - 1))
        low, high = (low, middle) if rank in named else (middle, high)
    return high


if __name__ == "__main__":
    sys.exit(main())
