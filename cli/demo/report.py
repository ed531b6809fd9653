"""Report of the demo: an HTML page with plots, a PNG for the README, and the table of figures."""

import html
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pacekeeper.cli.analysis.html import PAGE_STYLE, inline_png
from pacekeeper.cli.demo.metrics import (
    MAX_OVERRUN_SHARE,
    Outcome,
    Phases,
    SpeedFigures,
    drawn_rates,
)
from pacekeeper.cli.demo.recorder import DemoEvent, StepView
from pacekeeper.cli.demo.script import ScriptRunner
from pacekeeper.core.layout.layout import Layout
from pacekeeper.core.text import format_s

# Colour-blind safe (Okabe and Ito); ranks keep their colour through all plots.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
CLOCKS = {
    "emulated": "clock: emulated accelerator: real arithmetic, after which each rank waits until "
    "the time of a GPU's kernels, at the shapes of a larger model, has passed",
    "cpu": "clock: CPU time of the ranks; no throughput limit is computed",
}
_LABEL_SHARE = 0.08  # of the time axis: width of the longest label of an event
_MARKS = {
    "fault": ("#D55E00", "fault"),
    "finding": ("#B8860B", "finding"),
    "plan": ("#0072B2", "plan"),
    "lift": ("#009E73", "fault ends"),
    "kill": ("#000000", "kill"),
}


def write_report(folder: Path, outcome: Outcome, runner: ScriptRunner) -> dict[str, Path]:
    """Write `report.html` and `demo.png` below `folder`; return their paths by name.

    Raises:
        OSError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    page, picture = folder / "report.html", folder / "demo.png"
    overview = _overview_figure(outcome, runner)
    overview.savefig(picture, dpi=110)
    sections = [
        ("Tokens per second, and what each rank took", overview),
        ("Expert placement: share of each expert's tokens by rank", _placement_figure(runner)),
    ]
    body = "".join(
        f"<h2>{html.escape(title)}</h2>"
        f"<img alt='{html.escape(title)}' src='{inline_png(figure, dpi=130)}'>"
        for title, figure in sections
        if figure is not None
    )
    page.write_text(_page(outcome, runner, body))
    return {"report": page, "picture": picture}


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print the figures as a table."""
    table = Table(title="outcome", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, value in outcome_lines(outcome):
        table.add_row(name, escape(value))
    console.print(table)


def outcome_lines(outcome: Outcome) -> list[tuple[str, str]]:
    """Return (name, value) of each figure in the order of the demo."""
    detection, speed, recovery = outcome.detection, outcome.speed, outcome.recovery
    rates = speed.tokens_per_s
    lines = [
        ("slowed rank", f"rank {detection.injected_rank}, x{detection.injected_slowdown:g}"),
        (
            "detected",
            "nothing"
            if detection.found_rank is None
            else f"rank {detection.found_rank}, x{detection.found_slowdown:.2f}, after "
            f"{detection.delay_iterations} iterations; false findings: {detection.false_findings}",
        ),
        ("tokens/s healthy", _rate_text(rates.healthy)),
        ("tokens/s degraded", _rate_text(rates.degraded)),
        ("tokens/s mitigated", _rate_text(rates.mitigated)),
    ]
    if speed.fluid_limit_tokens_per_s is not None and speed.mitigated_of_fluid is not None:
        limit = f"{speed.fluid_limit_tokens_per_s:,.0f}"
        lines.append(("fluid limit", f"{limit}; reached: {speed.mitigated_of_fluid:.1%}"))
        if speed.devices_busy_healthy is not None and speed.devices_busy_mitigated is not None:
            lines.append(
                (
                    "devices busy",
                    f"healthy {speed.devices_busy_healthy:.1%}, mitigated "
                    f"{speed.devices_busy_mitigated:.1%} of their capacity; the fluid limit is "
                    "the healthy rate x mean speed and can be exceeded",
                )
            )
    elif outcome.training.clock == "cpu":
        lines.append(("fluid limit", "not computed: with --clock cpu the ranks share cores"))
    if speed.busy_phases:
        lines.append(("busy machine", busy_text(speed)))
    gap = recovery.kill_to_next_step_s
    lines += [
        ("tokens/s recovered", _rate_text(rates.recovered)),
        ("killed rank", f"rank {recovery.killed_rank}; {recovery.survivors} survivors continued"),
        ("kill to next step", "never" if gap is None else f"{format_s(gap)}"),
        ("steps lost", str(recovery.steps_lost)),
        ("tokens/s after the kill", _rate_text(rates.after_kill)),
        ("loss", f"{outcome.training.loss_first:.3f} -> {outcome.training.loss_last:.3f}"),
        ("layout generations", str(outcome.training.generations)),
        ("clock", outcome.training.clock),
    ]
    return lines


def busy_text(speed: SpeedFigures) -> str:
    """Return in one sentence why rates are left out."""
    overrun = speed.host_overrun_share or 0.0
    why = (
        f"arithmetic held up the emulated device for up to {overrun:.0%} of a phase"
        if overrun > MAX_OVERRUN_SHARE
        else "the slow rank did not slow the job"
    )
    names = [name.replace("_", " the ") for name in speed.busy_phases]
    which = "all phases" if len(names) == len(fields(Phases)) else f"phase {', '.join(names)}"
    return f"{why}, so tokens/s of {which} are left out; repeat on an idle machine"


def _rate_text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _overview_figure(outcome: Outcome, runner: ScriptRunner) -> Any:
    """Draw tokens/s with the events, compute times, and slowdown per rank over time."""
    from matplotlib.figure import Figure

    assert runner.truth is not None, "the script has run"
    logs = runner.logs()
    survivor = min(r for r in logs if r != runner.truth.killed_rank)
    steps = logs[survivor]
    start_s = steps[0].ended_s
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    times = [s.ended_s - start_s for s in steps[1:]]
    rates = drawn_rates(steps, outcome.phases, outcome.speed.busy_phases)
    top.plot(times, rates, color="#444444", lw=1.2, drawstyle="steps-post")
    drawn = [rate for rate in rates if not math.isnan(rate)]
    top.set_ylim(0, max(drawn, default=1.0) * 1.25)
    if not drawn:
        top.set_yticks([])
    top.set_ylabel("tokens/s")
    if outcome.speed.busy_phases:
        text = f"busy machine: {busy_text(outcome.speed)}"
        top.text(0.01, 0.16, text, transform=top.transAxes, color="#B00020", fontsize=9, wrap=True)
    if outcome.speed.fluid_limit_tokens_per_s is not None:
        fault_s, lift_s = _fault_window(runner)
        top.hlines(
            outcome.speed.fluid_limit_tokens_per_s, fault_s - start_s, lift_s - start_s,
            colors="#D55E00", ls=":", label="fluid limit with the slow rank",
        )  # fmt: skip
        top.legend(loc="lower left", frameon=False)
    label_s = _LABEL_SHARE * times[-1]
    for axis in (top, middle, bottom):
        _draw_events(axis, runner.recorder.events, start_s, label_s if axis is top else 0.0)
    views = [v for v in runner.recorder.steps if v.seen_s >= start_s]
    for rank in range(len(RANK_COLOURS)):
        _draw_rank(middle, bottom, views, rank, start_s)
    middle.set_ylabel("compute ms\n(dots: observed,\nlines: expected)")
    middle.set_ylim(bottom=0)
    bottom.axhline(1.0, color="#bbbbbb", lw=0.8)
    bottom.set_ylabel("slowdown\n(observed / expected)")
    bottom.set_xlabel("seconds since the first step")
    middle.legend(*bottom.get_legend_handles_labels(), loc="lower left", frameon=False, ncols=4)
    for axis in (top, middle, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    found = outcome.detection
    figure.suptitle(
        f"rank {found.injected_rank} slowed x{found.injected_slowdown:g}, then lifted; "
        f"rank {outcome.recovery.killed_rank} killed ({outcome.training.clock} clock)",
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _fault_window(runner: ScriptRunner) -> tuple[float, float]:
    assert runner.truth is not None, "the script has run"
    lifts = [h.seen_s for h in runner.recorder.events if h.kind == "lift"]
    return runner.truth.fault_s, lifts[0] if lifts else runner.truth.kill_s


def _draw_rank(middle: Any, bottom: Any, views: list[StepView], rank: int, start_s: float) -> None:
    """Draw observed and expected time and slowdown of one rank."""
    points = [(v, v.ranks.index(rank)) for v in views if rank in v.ranks]
    times = [v.seen_s - start_s for v, _ in points]
    colour = RANK_COLOURS[rank]
    middle.plot(times, [v.observed_s[i] * 1e3 for v, i in points], ".", ms=2.5, color=colour)
    middle.plot(times, [v.expected_s[i] * 1e3 for v, i in points], lw=0.9, color=colour)
    ratios = [v.observed_s[i] / v.expected_s[i] for v, i in points]
    bottom.plot(times, ratios, lw=1.0, color=colour, label=f"rank {rank}")


def _draw_events(axis: Any, events: list[DemoEvent], start_s: float, label_s: float) -> None:
    """Draw a vertical line per event; labels of `label_s` width, 0: none, are staggered."""
    level, last_s = 0, -math.inf
    for event in events:
        if event.kind not in _MARKS:
            continue
        colour, text = _MARKS[event.kind]
        at_s = event.seen_s - start_s
        axis.axvline(at_s, color=colour, lw=1.0, ls="--", alpha=0.8)
        if label_s:
            level = level + 1 if at_s - last_s < label_s else 0
            axis.annotate(
                text, (at_s, 1.0 - 0.055 * (level % 5)), xycoords=("data", "axes fraction"),
                color=colour, fontsize=9, xytext=(3, -9), textcoords="offset points",
            )  # fmt: skip
            last_s = at_s


def _placement_figure(runner: ScriptRunner) -> Any:
    """Draw the placement: one row per phase, one heat map per layer."""
    from matplotlib.figure import Figure

    moments = _layouts_by_phase(runner)
    if not moments:
        return None
    num_layers = moments[0][1].num_layers
    figure = Figure(figsize=(11, 2.1 * len(moments) + 0.6), layout="constrained")
    grid = figure.subplots(len(moments), num_layers, squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, (name, layout) in enumerate(moments):
        for layer in range(num_layers):
            axis = grid[row][layer]
            image = axis.imshow(_shares(layout, layer), vmin=0, vmax=1, cmap="Blues", aspect="auto")
            axis.set_yticks(range(len(RANK_COLOURS)))
            if row == 0:
                axis.set_title(f"layer {layer}", fontsize=10)
            if row == len(moments) - 1:
                axis.set_xlabel("expert")
        grid[row][0].set_ylabel(f"{name}\nrank")
    figure.colorbar(image, ax=grid, label="share of the expert's tokens (white: not held)")
    return figure


def _layouts_by_phase(runner: ScriptRunner) -> list[tuple[str, Layout]]:
    """Return the layouts before the fault, before its end, before the kill, and at the end."""
    schedule, steps = runner.schedule, runner.recorder.steps
    wanted = [
        ("healthy", schedule.fault_step - 1),
        ("mitigated", schedule.lift_step - 1),
        ("recovered", schedule.kill_step - 1),
        ("after the kill", schedule.steps),
    ]
    result = []
    for name, step in wanted:
        seen = [v for v in steps if v.step <= step]
        if seen and seen[-1].generation in runner.recorder.layouts:
            result.append((name, runner.recorder.layouts[seen[-1].generation][0]))
    return result


def _shares(layout: Layout, layer: int) -> list[list[float]]:
    """Return the share of each expert's tokens, [ranks, experts]; NaN if not held by the rank."""
    held = [{replica.rank: replica.share for replica in on} for on in layout.experts[layer]]
    return [[h.get(rank, math.nan) for h in held] for rank in range(len(RANK_COLOURS))]


def _page(outcome: Outcome, runner: ScriptRunner, body: str) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in outcome_lines(outcome)
    )
    rows_of_events = "".join(
        f"<tr><td>{h.step}</td><td class='{h.kind}'>{h.kind}</td>"
        f"<td>{html.escape(h.text)}</td></tr>"
        for h in runner.recorder.events
    )
    commands = html.escape("\n".join(runner.fleet.commands))
    clock = html.escape(CLOCKS[outcome.training.clock])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pacekeeper demo</title><style>
{PAGE_STYLE} pre {{ background: #f6f6f6; padding: .8em; overflow-x: auto; }}
.fault, .kill {{ color: #b00020; font-weight: 600; }}
.finding {{ color: #8a6100; font-weight: 600; }}
.plan, .regroup {{ color: #0060a0; font-weight: 600; }}
.lift, .recover {{ color: #00704a; font-weight: 600; }}
</style></head><body>
<h1>pacekeeper demo</h1><p>{clock}</p><table>{rows}</table>
{body}
<h2>Events</h2><table><tr><th>step</th><th>event</th><th>details</th></tr>{rows_of_events}</table>
<h2>Commands</h2><pre>{commands}</pre>
</body></html>
"""
