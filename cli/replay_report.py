"""A verdict for people: a few lines in the terminal, and a page with a heat map of residuals."""

import html
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from pacekeeper.cli.pictures import inline_png
from pacekeeper.core.errors import HostError
from pacekeeper.predictor.heat import Heat, heat_of
from pacekeeper.predictor.trace import Trace
from pacekeeper.predictor.verdict import Trouble, Verdict, WhatIf

MAX_ROWS = 20  # of a decomposition shown to people; programs get all


def print_verdict(trace: Trace, verdict: Verdict) -> None:
    """What was read, what was found, what it cost."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{escape(trace.name)}[/]  {escape(trace.source)}  {size_of(trace)}")
    for note in verdict.notes:
        console.print(f"[dim]{escape(note)}[/]")
    for trouble in verdict.troubles:
        kind, rank, stage, slowdown, steps, tier, reason = row_of(trouble)
        whose = (f"  rank {rank}" if rank else "") + (f"  stage {stage}" if stage else "")
        console.print(f"[bold]{escape(kind)}[/]{whose}  {slowdown}  steps {steps}  {tier}")
        console.print(f"    {escape(reason)}")
    if not verdict.troubles:
        console.print("nothing was found")
    if verdict.what_if is not None:
        for line in lines_of(verdict.what_if):
            console.print(line)


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


def write_report(path: Path, trace: Trace, verdict: Verdict) -> None:
    """One self-contained page. Raises HostError where it can not be written."""
    heat = heat_of(trace)
    body = _table(verdict) + _what_if(verdict)
    if heat is not None:
        body += f"<h2>Residuals, rank by step</h2><p>{_HEAT_WORDS}</p><img src='{_draw(heat)}'>"
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in verdict.notes)
    page = _PAGE.format(
        title=html.escape(trace.name),
        size=html.escape(f"{trace.source}: {size_of(trace)}"),
        notes=f"<ul>{notes}</ul>" if notes else "",
        body=body,
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"report {path}: {error.strerror}", remedy="name another file") from None


def _table(verdict: Verdict) -> str:
    if not verdict.troubles:
        return "<p>Nothing was found.</p>"
    heads = ("kind", "rank", "stage", "slowdown (95 %)", "steps", "tier", "reason")
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row_of(trouble)) + "</tr>"
        for trouble in verdict.troubles
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<h2>Findings</h2><table><tr>{head}</tr>{rows}</table>"


def _what_if(verdict: Verdict) -> str:
    if verdict.what_if is None:
        return ""
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in lines_of(verdict.what_if))
    return f"<h2>What if</h2>{lines}"


def _draw(heat: Heat) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    height = min(12.0, 1.6 + 0.16 * len(heat.ranks))
    figure = Figure(figsize=(11, height), layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(
        heat.log_ratio.T, aspect="auto", cmap="RdBu_r", vmin=-heat.limit, vmax=heat.limit,
        interpolation="nearest",
    )  # fmt: skip
    axis.set_xlabel("step")
    axis.set_ylabel("rank")
    for set_ticks, values in ((axis.set_xticks, heat.steps), (axis.set_yticks, heat.ranks)):
        places = range(0, len(values), max(1, len(values) // 16))
        set_ticks(list(places), [str(values[i]) for i in places])
    figure.colorbar(image, ax=axis, label="log(observed / expected)")
    return inline_png(figure, dpi=110)


_HEAT_WORDS = (
    "Each cell: how much longer a rank computed in a step than its work and its peers of the same "
    "stage say it should. A red row is a slow rank, a red spot one odd step."
)
_PAGE: Any = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }}
h1 {{ font-size: 1.5em; }} h2 {{ font-size: 1.1em; margin-top: 2em; }}
img {{ max-width: 100%; }} table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: .2em .8em .2em 0; vertical-align: top;
          border-bottom: 1px solid #eee; font-weight: normal; }}
th {{ color: #666; }}
</style></head><body><h1>{title}</h1><p>{size}</p>{notes}{body}</body></html>
"""
