"""Verdicts for people, in the terminal: a finding and what speaks for it in a few lines."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from pacekeeper.predictor.offline.anomalies import Trouble, Verdict, WhatIf
from pacekeeper.predictor.offline.trace import Trace

MOST_FINDINGS = 40  # of one run shown to people; programs get all
MOST_NOTES = 8
MOST_RUNS = 20  # with findings


def print_verdicts(verdicts: Sequence[tuple[Trace, Verdict]]) -> None:
    """What was read, what was found, what it cost; of many runs those with findings."""
    console = Console(highlight=False, soft_wrap=True)
    if len(verdicts) == 1:
        _print_one(console, *verdicts[0])
        return
    found = [(trace, verdict) for trace, verdict in verdicts if verdict.troubles]
    for trace, verdict in found[:MOST_RUNS]:
        _print_one(console, trace, verdict)
    if len(found) > MOST_RUNS:
        console.print(f"and {len(found) - MOST_RUNS} more runs with findings: see --json")
    console.print(
        f"{len(verdicts)} runs, each judged by itself; nothing was found in "
        f"{len(verdicts) - len(found)}; --run N shows one"
    )


def _print_one(console: Console, trace: Trace, verdict: Verdict) -> None:
    console.print(f"[bold]{escape(trace.name)}[/]  {escape(trace.source)}  {size_of(trace)}")
    for note in verdict.notes[:MOST_NOTES]:
        _say(console, note, indent="", style="dim")
    if len(verdict.notes) > MOST_NOTES:
        console.print(f"[dim]and {len(verdict.notes) - MOST_NOTES} more notes: see --json[/]")
    for trouble in verdict.troubles[:MOST_FINDINGS]:
        kind, rank, stage, slowdown, steps, tier, reason = row_of(trouble)
        whose = (f"  rank {rank}" if rank else "") + (f"  stage {stage}" if stage else "")
        console.print(f"[bold]{escape(kind)}[/]{whose}  {slowdown}  steps {steps}  {tier}")
        _say(console, reason, indent="    ")
    if len(verdict.troubles) > MOST_FINDINGS:
        console.print(f"and {len(verdict.troubles) - MOST_FINDINGS} more findings: see --json")
    if not verdict.troubles:
        console.print("nothing was found")
    if verdict.what_if is not None:
        for line in lines_of(verdict.what_if):
            _say(console, line, indent="")


def _say(console: Console, text: str, *, indent: str, style: str = "") -> None:
    """One line for programs that read along, lines of its width for a terminal."""
    width = console.width if console.is_terminal else 1 << 20
    for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent):
        console.print(escape(line), style=style)


def size_of(trace: Trace) -> str:
    """How much was recorded."""
    parts = []
    if trace.workers:
        stages = len({worker.stage for worker in trace.workers})
        parts.append(f"{len(trace.workers)} ranks" + (f" in {stages} stages" if stages > 1 else ""))
    tables = (trace.compute, trace.steps, trace.transfers, trace.waits)
    table = next((t for t in tables if t is not None), None)
    if table is not None:
        parts.append(f"{len(set(table.step.tolist()))} steps")
    return ", ".join(parts) or "nothing that can be judged"


def row_of(trouble: Trouble) -> tuple[str, ...]:
    """A finding in words, column by column."""
    last = "the end" if trouble.last_step is None else str(trouble.last_step)
    return (
        str(trouble.kind),
        "" if trouble.rank is None else str(trouble.rank),
        "" if trouble.stage is None else str(trouble.stage),
        f"x{trouble.slowdown:.3f} ({trouble.low:.3f} to {trouble.high:.3f})",
        f"{trouble.first_step} to {last}",
        str(trouble.tier),
        trouble.reason + (f"; {trouble.cause}" if trouble.cause else ""),
    )


def lines_of(what_if: WhatIf) -> list[str]:
    """The cost of all that, in words."""
    lines = [
        f"with everything even, steps would be {what_if.slowdown:.3f} times shorter (S)",
        f"of that, the worst 3 % of ranks: {what_if.worst_workers_share:.1%}, "
        f"the last stage: {what_if.last_stage_share:.1%}",
    ]
    for name, part in (
        ("stage", what_if.by_stage), ("kind of operation", what_if.by_op), ("rank", what_if.by_rank)
    ):  # fmt: skip
        worst = sorted(part.items(), key=lambda item: -item[1])[:4]
        if worst:
            told = ", ".join(f"{key} {value:.3f}" for key, value in worst)
            lines.append(f"S of one {name} alone, the largest: {told}")
    return lines
