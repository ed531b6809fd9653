"""HTML report of `pacekeeper replay`: findings, their cost, and a heat map of residuals."""

import html
from pathlib import Path
from typing import Any

from pacekeeper.cli.analysis.heatmap import Heatmap, heatmap_of, reduced
from pacekeeper.cli.analysis.html import PAGE_STYLE, inline_png
from pacekeeper.cli.analysis.replay_text import finding_row, trace_size, what_if_lines
from pacekeeper.core.errors import HostError
from pacekeeper.predictor.recorded.anomalies import TraceReport
from pacekeeper.predictor.recorded.trace import Trace

MAX_STEPS, MAX_RANKS = 256, 128  # cells of the heat map
NUM_COLOURS = 33  # odd: the middle is white
MAX_FINDINGS, MAX_NOTES = 200, 50  # on a page; --json has all


def write_report(path: Path, trace: Trace, verdict: TraceReport) -> None:
    """Write the report as one file.

    Raises:
        HostError: the file cannot be written.
    """
    heat = heatmap_of(trace)
    body = _table(verdict) + _what_if(verdict)
    if heat is not None:
        heat = reduced(heat, max_steps=MAX_STEPS, max_ranks=MAX_RANKS)
        body += (
            f"<h2>Residuals, rank by step</h2><p>{_HEATMAP_NOTE}{_reduction_note(heat)}</p>"
            f"<img alt='Residuals, rank by step' src='{_draw(heat)}'>"
        )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in verdict.notes[:MAX_NOTES])
    page = _PAGE.format(
        style=PAGE_STYLE,
        title=html.escape(trace.name),
        size=html.escape(f"{trace.source}: {trace_size(trace)}"),
        notes=f"<ul>{notes}</ul>" if notes else "",
        body=body,
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"report {path}: {error.strerror}", remedy="choose another file") from None


def _table(verdict: TraceReport) -> str:
    if not verdict.anomalies:
        return "<p>No findings.</p>"
    heads = ("kind", "rank", "stage", "slowdown (95 %)", "steps", "tier", "reason")
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in finding_row(anomaly)) + "</tr>"
        for anomaly in verdict.anomalies[:MAX_FINDINGS]
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    left = len(verdict.anomalies) - MAX_FINDINGS
    more = f"<p>And {left} more (all with <code>--json</code>).</p>" if left > 0 else ""
    return f"<h2>Findings</h2><table><tr>{head}</tr>{rows}</table>{more}"


def _reduction_note(heat: Heatmap) -> str:
    if heat.steps_per_cell == heat.ranks_per_cell == 1:
        return ""
    return (
        f" Reduced: a cell is the median of {heat.steps_per_cell} steps and, of "
        f"{heat.ranks_per_cell} neighbouring ranks, the one farthest from 0."
    )


def _what_if(verdict: TraceReport) -> str:
    if verdict.what_if is None:
        return ""
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in what_if_lines(verdict.what_if))
    return f"<h2>What if</h2>{lines}"


def _draw(heat: Heatmap) -> str:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    height = min(9.0, 1.6 + 0.16 * len(heat.ranks))
    figure = Figure(figsize=(11, height), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["RdBu_r"].resampled(NUM_COLOURS)
    image = axis.imshow(
        heat.log_ratio.T, aspect="auto", cmap=colours, vmin=-heat.limit, vmax=heat.limit,
        interpolation="nearest",
    )  # fmt: skip
    axis.set_xlabel("step")
    axis.set_ylabel("rank")
    for set_ticks, values in ((axis.set_xticks, heat.steps), (axis.set_yticks, heat.ranks)):
        places = range(0, len(values), max(1, len(values) // 16))
        set_ticks(list(places), [str(values[i]) for i in places])
    figure.colorbar(image, ax=axis, label="log(observed / expected)")
    return inline_png(figure, dpi=110)


_HEATMAP_NOTE = (
    "Each cell: compute time of a rank in a step relative to the time expected from its work and "
    "its peers of the same stage. A red row is a slow rank, a red spot a single slow step."
)
_PAGE: Any = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
{style}
</style></head><body><h1>{title}</h1><p>{size}</p>{notes}{body}</body></html>
"""
