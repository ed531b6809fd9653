"""The demo's report: one self-contained HTML page with plots, and one PNG for the README."""

import html
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pacekeeper.cli.analysis.html import PAGE_STYLE, inline_png
from pacekeeper.cli.demo.metrics import Outcome
from pacekeeper.cli.demo.recorder import Happening, StepView
from pacekeeper.cli.demo.script import Director
from pacekeeper.core.layout.layout import Layout

# Colour-blind safe (Okabe and Ito); ranks keep their colour through all plots.
RANK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
BUSY_HOST = 0.05  # share of a phase lost to overruns above which its throughput is the host's
_MARKS = {
    "fault": ("#D55E00", "fault"),
    "finding": ("#B8860B", "finding"),
    "plan": ("#0072B2", "plan"),
    "lift": ("#009E73", "lifted"),
    "kill": ("#000000", "kill"),
}


def write_report(folder: Path, outcome: Outcome, director: Director) -> dict[str, Path]:
    """Draw and write `report.html` and `demo.png` below `folder`; where they lie, by their names.

    Raises OSError.
    """
    import matplotlib

    matplotlib.use("Agg")
    page, picture = folder / "report.html", folder / "demo.png"
    overview = _overview_figure(outcome, director)
    overview.savefig(picture, dpi=110)
    sections = [
        ("Tokens per second, and what each rank took", overview),
        ("Expert placement: share of each expert's tokens by rank", _placement_figure(director)),
    ]
    body = "".join(
        f"<h2>{html.escape(title)}</h2>"
        f"<img alt='{html.escape(title)}' src='{inline_png(figure, dpi=130)}'>"
        for title, figure in sections
        if figure is not None
    )
    page.write_text(_page(outcome, director, body))
    return {"report": page, "picture": picture}


def print_outcome(console: Console, outcome: Outcome) -> None:
    """The figures as a table for people."""
    table = Table(title="what happened", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary(outcome):
        table.add_row(name, escape(value))
    console.print(table)


def summary(outcome: Outcome) -> list[tuple[str, str]]:
    """(what, how much) in words, in the order of the story."""
    speed = outcome.tokens_per_s
    lines = [
        ("slowed", f"rank {outcome.injected_rank}, x{outcome.injected_slowdown:g}"),
        (
            "found",
            "nothing"
            if outcome.found_rank is None
            else f"rank {outcome.found_rank}, x{outcome.found_slowdown:.2f}, after "
            f"{outcome.delay_iterations} iterations; false findings: {outcome.false_findings}",
        ),
        ("tokens/s healthy", _figure(speed.healthy)),
        ("tokens/s degraded", _figure(speed.degraded)),
        ("tokens/s mitigated", _figure(speed.mitigated)),
    ]
    if outcome.fluid_limit_tokens_per_s is not None and outcome.mitigated_of_fluid is not None:
        limit = f"{outcome.fluid_limit_tokens_per_s:,.0f}"
        lines.append(("fluid limit", f"{limit}; {_reached(outcome)}"))
        if outcome.devices_busy_healthy is not None and outcome.devices_busy_mitigated is not None:
            lines.append(
                (
                    "devices busy",
                    f"healthy {outcome.devices_busy_healthy:.1%}, mitigated "
                    f"{outcome.devices_busy_mitigated:.1%} of what their speeds allow; the fluid "
                    "limit is the healthy rate x mean speed, and may be passed",
                )
            )
        overrun = outcome.host_overrun_share or 0.0
        if overrun > BUSY_HOST:
            lines.append(
                (
                    "a busy host",
                    f"real arithmetic held the emulated device up for {overrun:.0%} of a phase: "
                    "the fluid limit reached is this machine's, not the layout's",
                )
            )
    elif outcome.clock == "cpu":
        lines.append(("fluid limit", "not claimed: with --clock cpu ranks share these cores"))
    gap = outcome.kill_to_next_step_s
    lines += [
        ("tokens/s recovered", _figure(speed.recovered)),
        ("killed", f"rank {outcome.killed_rank}; {outcome.survivors} survivors went on"),
        ("kill to next step", "never" if gap is None else f"{gap:.2f} s"),
        ("steps lost", str(outcome.steps_lost)),
        ("tokens/s after the kill", _figure(speed.after_kill)),
        ("loss", f"{outcome.loss_first:.3f} -> {outcome.loss_last:.3f}"),
        ("layout generations", str(outcome.generations)),
        ("clock", outcome.clock),
    ]
    return lines


def _reached(outcome: Outcome) -> str:
    """What was reached of the fluid limit, or why that says nothing."""
    assert outcome.mitigated_of_fluid is not None, "asked only where it is known"
    if outcome.host_was_measured and outcome.degraded_of_fluid is not None:
        return (
            f"reached: not judged (the slow rank alone left {outcome.degraded_of_fluid:.0%} of it: "
            "the host was measured, not the devices; run it again on a quiet machine)"
        )
    return f"reached: {outcome.mitigated_of_fluid:.1%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _overview_figure(outcome: Outcome, director: Director) -> Any:
    """Above: tokens/s over time with fault, finding, plans and kill. Below: slowdown per rank."""
    from matplotlib.figure import Figure

    assert director.truth is not None, "the story was played"
    logs = director.logs()
    survivor = min(r for r in logs if r != director.truth.killed_rank)
    steps = logs[survivor]
    start_s = steps[0].ended_s
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    times = [s.ended_s - start_s for s in steps[1:]]
    rates = [s.tokens / (s.ended_s - before.ended_s) for before, s in pairwise(steps)]
    top.plot(times, rates, color="#444444", lw=1.2, drawstyle="steps-post")
    top.set_ylim(0, max(rates) * 1.25)
    top.set_ylabel("tokens/s")
    if outcome.fluid_limit_tokens_per_s is not None:
        fault_s, lift_s = _fault_window(director)
        top.hlines(
            outcome.fluid_limit_tokens_per_s, fault_s - start_s, lift_s - start_s,
            colors="#D55E00", ls=":", label="fluid limit with the slow rank",
        )  # fmt: skip
        top.legend(loc="lower left", frameon=False)
    for axis in (top, middle, bottom):
        _mark(axis, director.recorder.happenings, start_s, with_text=axis is top)
    views = [v for v in director.recorder.steps if v.seen_s >= start_s]
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
    figure.suptitle(
        f"rank {outcome.injected_rank} slowed x{outcome.injected_slowdown:g}, then lifted; "
        f"rank {outcome.killed_rank} killed ({outcome.clock} clock)",
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _fault_window(director: Director) -> tuple[float, float]:
    assert director.truth is not None, "the story was played"
    lifts = [h.seen_s for h in director.recorder.happenings if h.kind == "lift"]
    return director.truth.fault_s, lifts[0] if lifts else director.truth.kill_s


def _draw_rank(middle: Any, bottom: Any, views: list[StepView], rank: int, start_s: float) -> None:
    """One rank's observed, expected and slowdown over time, in its colour."""
    points = [(v, v.ranks.index(rank)) for v in views if rank in v.ranks]
    times = [v.seen_s - start_s for v, _ in points]
    colour = RANK_COLOURS[rank]
    middle.plot(times, [v.observed_s[i] * 1e3 for v, i in points], ".", ms=2.5, color=colour)
    middle.plot(times, [v.expected_s[i] * 1e3 for v, i in points], lw=0.9, color=colour)
    ratios = [v.observed_s[i] / v.expected_s[i] for v, i in points]
    bottom.plot(times, ratios, lw=1.0, color=colour, label=f"rank {rank}")


def _mark(axis: Any, happenings: list[Happening], start_s: float, *, with_text: bool) -> None:
    """Vertical lines where something happened; texts are staggered so that they do not collide."""
    level, last_s = 0, -math.inf
    for happening in happenings:
        if happening.kind not in _MARKS:
            continue
        colour, text = _MARKS[happening.kind]
        at_s = happening.seen_s - start_s
        axis.axvline(at_s, color=colour, lw=1.0, ls="--", alpha=0.8)
        if with_text:
            level = level + 1 if at_s - last_s < 6.0 else 0
            axis.annotate(
                text, (at_s, 1.0 - 0.055 * (level % 5)), xycoords=("data", "axes fraction"),
                color=colour, fontsize=9, xytext=(3, -9), textcoords="offset points",
            )  # fmt: skip
            last_s = at_s


def _placement_figure(director: Director) -> Any:
    """One row per moment (healthy, mitigated, after the kill), one heat map per layer."""
    from matplotlib.figure import Figure

    moments = _moments(director)
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


def _moments(director: Director) -> list[tuple[str, Layout]]:
    """The layouts in force before the fault, before the lift, before the kill, and at the end."""
    schedule, steps = director.schedule, director.recorder.steps
    wanted = [
        ("healthy", schedule.fault_step - 1),
        ("mitigated", schedule.lift_step - 1),
        ("recovered", schedule.kill_step - 1),
        ("after the kill", schedule.steps),
    ]
    result = []
    for name, step in wanted:
        seen = [v for v in steps if v.step <= step]
        if seen and seen[-1].generation in director.recorder.layouts:
            result.append((name, director.recorder.layouts[seen[-1].generation][0]))
    return result


def _shares(layout: Layout, layer: int) -> list[list[float]]:
    """[rank][expert] share of the expert's tokens; NaN where the rank does not hold the expert."""
    held = [{host.rank: host.share for host in hosts} for hosts in layout.experts[layer]]
    return [[h.get(rank, math.nan) for h in held] for rank in range(len(RANK_COLOURS))]


def _page(outcome: Outcome, director: Director, body: str) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in summary(outcome)
    )
    story = "".join(
        f"<tr><td>{h.step}</td><td class='{h.kind}'>{h.kind}</td>"
        f"<td>{html.escape(h.text)}</td></tr>"
        for h in director.recorder.happenings
    )
    commands = html.escape("\n".join(director.fleet.commands))
    clock = (
        "The ranks ran on an emulated accelerator: real arithmetic, after which each rank waits "
        "until the modelled device time (counted operations and bytes, its speed, jitter) is over."
        if outcome.clock == "emulated"
        else "The ranks reported their own thread CPU time; throughput recovery is not claimed."
    )
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
<h2>The story</h2><table><tr><th>step</th><th>what</th><th>words</th></tr>{story}</table>
<h2>The commands</h2><pre>{commands}</pre>
</body></html>
"""
