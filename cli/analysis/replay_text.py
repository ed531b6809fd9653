"""Text of `pacekeeper replay`: findings with their evidence, and their cost."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from pacekeeper.predictor.recorded.anomalies import Anomaly, TraceReport, WhatIf
from pacekeeper.predictor.recorded.trace import Trace

MAX_FINDINGS = 40  # per run; --json has all
MAX_NOTES = 8
MAX_RUNS = 20  # with findings


def print_verdicts(verdicts: Sequence[tuple[Trace, TraceReport]]) -> None:
    """Print the verdicts; of several runs only those with findings."""
    console = Console(highlight=False, soft_wrap=True)
    if len(verdicts) == 1:
        _print_one(console, *verdicts[0])
        return
    found = [(trace, verdict) for trace, verdict in verdicts if verdict.anomalies]
    for trace, verdict in found[:MAX_RUNS]:
        _print_one(console, trace, verdict)
    if len(found) > MAX_RUNS:
        console.print(f"and {len(found) - MAX_RUNS} more runs with findings (all with --json)")
    console.print(
        f"{len(verdicts)} runs, judged separately; {len(verdicts) - len(found)} without findings; "
        "--run N shows one"
    )


def _print_one(console: Console, trace: Trace, verdict: TraceReport) -> None:
    console.print(f"[bold]{escape(trace.name)}[/]  {escape(trace.source)}  {trace_size(trace)}")
    for note in verdict.notes[:MAX_NOTES]:
        _print_wrapped(console, note, indent="", style="dim")
    if len(verdict.notes) > MAX_NOTES:
        console.print(f"[dim]and {len(verdict.notes) - MAX_NOTES} more notes (all with --json)[/]")
    for anomaly in verdict.anomalies[:MAX_FINDINGS]:
        kind, rank, stage, slowdown, steps, tier, reason = finding_row(anomaly)
        place = (f"  rank {rank}" if rank else "") + (f"  stage {stage}" if stage else "")
        console.print(f"[bold]{escape(kind)}[/]{place}  {slowdown}  steps {steps}  {tier}")
        _print_wrapped(console, reason, indent="    ")
    if len(verdict.anomalies) > MAX_FINDINGS:
        console.print(
            f"and {len(verdict.anomalies) - MAX_FINDINGS} more findings (all with --json)"
        )
    if not verdict.anomalies:
        console.print("no findings")
    if verdict.what_if is not None:
        for line in what_if_lines(verdict.what_if):
            _print_wrapped(console, line, indent="")


def _print_wrapped(console: Console, text: str, *, indent: str, style: str = "") -> None:
    """Print text wrapped to the terminal, or as one line if the output is not a terminal."""
    width = console.width if console.is_terminal else 1 << 20
    for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent):
        console.print(escape(line), style=style)


def trace_size(trace: Trace) -> str:
    """Return the number of ranks, stages and steps as text."""
    parts = []
    if trace.workers:
        stages = len({worker.stage for worker in trace.workers})
        parts.append(f"{len(trace.workers)} ranks" + (f" in {stages} stages" if stages > 1 else ""))
    tables = (trace.compute, trace.steps, trace.transfers, trace.waits)
    table = next((t for t in tables if t is not None), None)
    if table is not None:
        parts.append(f"{len(set(table.step.tolist()))} steps")
    return ", ".join(parts) or "no records that can be judged"


def finding_row(anomaly: Anomaly) -> tuple[str, ...]:
    """Return the columns of one finding."""
    last = "the end" if anomaly.last_step is None else str(anomaly.last_step)
    return (
        str(anomaly.kind),
        "" if anomaly.rank is None else str(anomaly.rank),
        "" if anomaly.stage is None else str(anomaly.stage),
        f"x{anomaly.slowdown:.3f} ({anomaly.low:.3f} to {anomaly.high:.3f})",
        f"{anomaly.first_step} to {last}",
        str(anomaly.tier),
        anomaly.reason + (f"; {anomaly.cause}" if anomaly.cause else ""),
    )


def what_if_lines(what_if: WhatIf) -> list[str]:
    """Return the simulated cost of slow and uneven ranks, line by line."""
    lines = [
        f"without slow or uneven ranks, steps would be {what_if.slowdown:.3f} times shorter (S)",
        f"of that, the worst 3 % of ranks: {what_if.worst_workers_share:.1%}, "
        f"the last stage: {what_if.last_stage_share:.1%}",
    ]
    for name, part in (
        ("stage", what_if.by_stage), ("kind of operation", what_if.by_op), ("rank", what_if.by_rank)
    ):  # fmt: skip
        worst = sorted(part.items(), key=lambda item: -item[1])[:4]
        if worst:
            listed = ", ".join(f"{key} {value:.3f}" for key, value in worst)
            lines.append(f"largest S by {name}: {listed}")
    return lines
