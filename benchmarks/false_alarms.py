"""How often is a healthy job called slow from its step times, and is a real slowdown still found?

Data: `nanogpt_h100_steps` (healthy runs; runs of a record are replicates, most records change their
work on the way) and, where it is there, `smartmoe_ranktimes` (healthy, routing makes the noise).
Judged with three kinds of knowledge, beside the rules of others on the same step times. A schedule
is not part of the data: it is taken from where the pace of the *other* runs with as many steps
jumps, without their times. Runs without others have no replicates and no schedule and are judged
with nothing. Slowdowns are spliced in: the real times of some steps, stretched, and rounded to the
clock again.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.job_rules import JOB_RULES, NO_RANK_RULES, SKIPPED_STEPS, alarms_of
from benchmarks.step_runs import (
    Run,
    durations,
    last_step,
    nanogpt_runs,
    smartmoe_runs,
    spliced,
    with_durations,
)
from pacekeeper.core.incidents.findings import Finding
from pacekeeper.predictor.cost.features import Array
from pacekeeper.predictor.job_level.online import JobLevelState, JobStep, update_job_level
from pacekeeper.predictor.recorded.anomalies import Anomaly

KNOWLEDGE = ("replicates", "schedule", "nothing")
SPLICES = ((1.10, 100), (1.05, 100), (1.20, 100), (1.10, 50), (1.10, 300))
DELAY_STRIDE_STEPS = 10
DELAY_EVERY = 16
RULES_EVERY = 8  # of the runs that the rules of others get a slowdown in
TABLE_WIDTH = 120
MAX_FLAGGED, MIN_RECALL = 0.01, 0.90  # the bars, whatever is given


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came out for one kind of knowledge or one rule."""

    runs: int = 0
    steps: int = 0
    flagged: int = 0
    alarms: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, run: Run, alarms: int) -> None:
        self.runs += 1
        self.steps += run.num_steps
        self.flagged += alarms > 0
        self.alarms += alarms
        if alarms:
            self.names.append(run.name)

    def as_dict(self) -> dict[str, Any]:
        return {
            "runs": self.runs,
            "flagged": self.flagged,
            "flagged_ratio": self.flagged / max(self.runs, 1),
            "alarms": self.alarms,
            "alarms_per_10000_steps": 1e4 * self.alarms / max(self.steps, 1),
            "flagged_names": self.names[:20],
        }


def healthy(runs: Iterable[Run], kinds: Sequence[str]) -> dict[str, Tally]:
    tallies = {name: Tally() for name in (*kinds, *JOB_RULES)}
    for run in runs:
        for knowledge in kinds:
            if run.can(knowledge):
                tallies[knowledge].add(run, len(run.judged(knowledge)))
        for name, rule in JOB_RULES.items():
            alarms = alarms_of(rule, run, durations(run.trace))
            if alarms is not None:
                tallies[name].add(run, len(alarms))
    return tallies


def recall_of_rules(runs: Sequence[Run], *, seed: int) -> dict[str, float]:
    """Of slowdowns as the first of SPLICES: those with an alarm that begins within them or up to 50
    steps later, whatever it was for.
    """
    random = np.random.default_rng(seed)
    slowdown, num_steps = SPLICES[0]
    found: dict[str, list[bool]] = {name: [] for name in JOB_RULES}
    for run in runs:
        begin = int(random.integers(SKIPPED_STEPS, run.num_steps - num_steps + 1))
        took_s = spliced(run.trace, begin, num_steps, slowdown)
        for name, rule in JOB_RULES.items():
            alarms = alarms_of(rule, run, took_s)
            if alarms is not None:
                found[name].append(
                    any(begin <= first < begin + num_steps + 50 for first, _ in alarms)
                )
    return {name: sum(each) / len(each) for name, each in found.items() if each}


def hit(anomalies: Sequence[Anomaly], first: int, last: int, end: int) -> Anomaly | None:
    """The trouble that covers at least half of the steps first to last."""
    for one in anomalies:
        until = end if one.last_step is None else one.last_step
        if min(until, last) - max(one.first_step, first) + 1 >= 0.5 * (last - first + 1):
            return one
    return None


def delay_steps(run: Run, knowledge: str, took_s: Array, begin: int, num_steps: int) -> int | None:
    """Steps after the onset until the record so far is called slow there; None if not in time."""
    steps = run.trace.steps
    assert steps is not None
    first = int(steps.step[begin])
    for seen in range(DELAY_STRIDE_STEPS, num_steps + 51, DELAY_STRIDE_STEPS):
        if begin + seen > took_s.size:
            return None
        so_far = with_durations(run.trace, took_s[: begin + seen])
        if hit(
            run.judged(knowledge, so_far),
            first,
            first + min(seen, num_steps) - 1,
            last_step(so_far),
        ):
            return seen
    return None


def recall(
    runs: Sequence[Run], knowledge: str, slowdown: float, num_steps: int, *, seed: int
) -> dict[str, Any]:
    """One splice per run at a random place; the delay is measured in each DELAY_EVERY-th run."""
    random = np.random.default_rng(seed)
    onset_errors, size_errors, waited, extra, asked = [], [], [], 0, 0
    by_record: dict[str, list[bool]] = defaultdict(list)
    for number, run in enumerate(runs):
        begin = int(random.integers(SKIPPED_STEPS, run.num_steps - num_steps + 1))
        if not run.can(knowledge):
            continue
        asked += 1
        took_s = spliced(run.trace, begin, num_steps, slowdown)
        anomalies = run.judged(knowledge, with_durations(run.trace, took_s))
        steps = run.trace.steps
        assert steps is not None
        first, last = int(steps.step[begin]), int(steps.step[begin + num_steps - 1])
        found = hit(anomalies, first, last, last_step(run.trace))
        extra += len(anomalies) - (found is not None)
        by_record[run.record].append(found is not None)
        if found is not None:
            onset_errors.append(abs(found.first_step - first))
            size_errors.append(abs(found.slowdown - slowdown))
            if number % DELAY_EVERY == 0:
                seen = delay_steps(run, knowledge, took_s, begin, num_steps)
                waited.append(np.inf if seen is None else seen)
    return {
        "slowdown": slowdown,
        "num_steps": num_steps,
        "runs": asked,
        "recall": len(onset_errors) / max(asked, 1),
        "recall_worst_record": min(
            (sum(found) / len(found) for found in by_record.values()), default=None
        ),
        "onset_error_steps": quantiles(onset_errors),
        "slowdown_error": quantiles(size_errors),
        "delay_steps": quantiles(waited),
        "other_troubles": extra,
    }


def quantiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Median and 95th percentile; order statistics, so that inf stays inf."""
    if not values:
        return None
    at = np.quantile(values, (0.5, 0.95), method="higher")
    return float(at[0]), float(at[1])


def online(runs: Sequence[Run], knowledge: str, *, every: int) -> Tally:
    """The same runs asked while they run: a run counts if it is ever called slow."""
    tally = Tally()
    for run in runs:
        if run.can(knowledge):
            took_s = durations(run.trace)
            asked = (
                len(run.judged(knowledge, with_durations(run.trace, took_s[:seen])))
                for seen in range(100, run.num_steps, every)
            )
            tally.add(run, max(asked, default=0))
    return tally


def alive(runs: Sequence[Run], *, seed: int) -> dict[str, Any]:
    """The runs as jobs that are watched while they train, nothing told but their step times: what
    is ever said of them, and whether a slowdown as the first of SPLICES is, by their end.
    """
    random = np.random.default_rng(seed)
    slowdown, num_steps = SPLICES[0]
    tally, found = Tally(), []
    for run in runs:
        tally.add(run, len(_said(run, durations(run.trace))))
        begin = int(random.integers(SKIPPED_STEPS, run.num_steps - num_steps + 1))
        said = _said(run, spliced(run.trace, begin, num_steps, slowdown))
        assert run.trace.steps is not None
        first = int(run.trace.steps.step[begin])
        found.append(any(abs(one.onset_step - first) <= num_steps // 2 for one in said))
    return tally.as_dict() | {"recall": sum(found) / max(len(found), 1)}


def _said(run: Run, took_s: Array) -> list[Finding]:
    pace, found = JobLevelState(), []
    assert run.trace.steps is not None
    for step, duration_s in zip(run.trace.steps.step.tolist(), took_s.tolist(), strict=True):
        told = JobStep(step=step, generation=0, duration_s=duration_s, tokens=0, sum_len_squared=0)
        pace, news = update_job_level(pace, told)
        found += [news.found] if news.found is not None else []
    return found


def tables(result: dict[str, Any]) -> list[Table]:
    shown = []
    for source in result["healthy"]:
        table = Table(title=f"healthy runs, and x1.10 for 100 steps in them: {source}")
        for column in (
            "knowledge or rule",
            "runs",
            "flagged",
            "share",
            "alarms",
            "per 10,000 steps",
            "x1.10 found",
        ):
            table.add_column(column, justify="left" if "rule" in column else "right")
        for name, told in result["healthy"][source].items():
            if told["runs"]:
                ours = name in KNOWLEDGE
                found = told.get("found_x1.10_100_steps")
                table.add_row(
                    f"pacekeeper, given {name}" if ours else name, str(told["runs"]),
                    str(told["flagged"]), f"{told['flagged_ratio']:.1%}", str(told["alarms"]),
                    f"{told['alarms_per_10000_steps']:.2f}",
                    "" if found is None else f"{found:.1%}",
                )  # fmt: skip
        for name in NO_RANK_RULES:
            table.add_row(name, "0", *["compares ranks"], *[""] * 4)
        shown.append(table)
    table = Table(title="spliced slowdowns (p50 / p95)")
    for column in ("knowledge", "splice", "runs", "found", "onset error", "size error", "delay"):
        table.add_column(column, justify="right", no_wrap=True)

    def pair(values: tuple[float, float] | None, form: str) -> str:
        return "-" if values is None else " / ".join(format(value, form) for value in values)

    for knowledge, rows in result["splices"].items():
        for row in rows:
            table.add_row(
                knowledge, f"x{row['slowdown']:.2f}, {row['num_steps']} steps", str(row["runs"]),
                f"{row['recall']:.1%}", pair(row["onset_error_steps"], ".0f"),
                pair(row["slowdown_error"], ".3f"), pair(row["delay_steps"], ".0f"),
            )  # fmt: skip
    beside = Table(title="does it rest on luck?")
    for column in ("check", "runs", "flagged", "per 10,000 steps", "x1.10, 100 steps found"):
        beside.add_column(column, justify="left" if column == "check" else "right")
    for name, told in result["checks"].items():
        beside.add_row(
            name, str(told["runs"]), str(told["flagged"]),
            f"{told['alarms_per_10000_steps']:.2f}",
            f"{told['recall']:.1%}" if "recall" in told else "",
        )  # fmt: skip
    return [*shown, table, beside]


def fewer(runs: Sequence[Run], num: int, random: np.random.Generator) -> list[Run]:
    """The runs with at most `num` replicates each, drawn at random."""
    drawn = []
    for run in runs:
        kept = random.permutation(len(run.replicates))[:num]
        drawn.append(replace(run, replicates=tuple(run.replicates[i] for i in kept)))
    return drawn


def checks(runs: Sequence[Run], seed: int) -> dict[str, Any]:
    """Does the result rest on all replicates, on one record, on asking once at the end?"""
    random = np.random.default_rng(seed)
    result: dict[str, Any] = {}
    for num in (1, 2, 4):
        some = fewer(runs, num, random)
        row = recall(some[::8], "replicates", *SPLICES[0], seed=seed)
        told = healthy(some, ("replicates",))["replicates"].as_dict()
        result[f"{num} replicates at most"] = told | {"recall": row["recall"]}
    for half in (0, 1):
        chosen = {run.trace.name for run in random.permutation(np.array(runs, dtype=object))[::2]}
        some = [
            replace(run, replicates=tuple(o for o in run.replicates if o.name in chosen))
            for run in runs
            if run.trace.name in chosen
        ]
        row = recall(some[::4], "replicates", *SPLICES[0], seed=seed)
        told = healthy(some, ("replicates",))["replicates"].as_dict()
        result[f"random half {half + 1}"] = told | {"recall": row["recall"]}
    for knowledge in KNOWLEDGE:
        told = online(runs[::16], knowledge, every=50).as_dict()
        result[f"asked every 50 steps: {knowledge}"] = told
    result["live, nothing known"] = alive(runs[::16], seed=seed)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seed", type=int, default=0, help="of the places of the splices")
    parser.add_argument("--every", type=int, default=1, help="of the runs: each n-th only")
    options = parser.parse_args()
    runs = nanogpt_runs(options.data / "nanogpt_h100_steps")[:: options.every]
    sources = {"nanogpt_h100_steps": runs}
    if (options.data / "smartmoe_ranktimes" / "iteration_ms.csv.gz").exists():
        sources["smartmoe_ranktimes"] = smartmoe_runs(options.data / "smartmoe_ranktimes")
    result: dict[str, Any] = {
        "healthy": {
            source: {name: tally.as_dict() for name, tally in healthy(some, KNOWLEDGE).items()}
            for source, some in sources.items()
        },
        "splices": {
            knowledge: [
                recall(runs if i == 0 else runs[::4], knowledge, *splice, seed=options.seed)
                for i, splice in enumerate(SPLICES)
            ]
            for knowledge in KNOWLEDGE
        },
        "checks": checks(runs, options.seed),
    }
    beside = recall_of_rules(runs[::RULES_EVERY], seed=options.seed)
    ours = {name: rows[0]["recall"] for name, rows in result["splices"].items()}
    for name, ratio in (beside | ours).items():
        result["healthy"]["nanogpt_h100_steps"][name]["found_x1.10_100_steps"] = ratio
    for table in tables(result):
        Console(width=TABLE_WIDTH).print(table)
    print(json.dumps(result))
    told = result["healthy"]["nanogpt_h100_steps"]
    holds = all(
        told[knowledge]["flagged_ratio"] < MAX_FLAGGED
        and result["splices"][knowledge][0]["recall"] >= MIN_RECALL
        for knowledge in KNOWLEDGE
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
