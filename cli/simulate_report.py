"""A simulation as a page of its own: throughput over time, goodput, where the time went."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pacekeeper.cli.pictures import PAGE_STYLE, inline_png
from pacekeeper.cli.simulate_print import HEADS, cells_of, title_of
from pacekeeper.core.errors import HostError
from pacekeeper.simulator.scenario import Scenario
from pacekeeper.simulator.sim_policy import Use
from pacekeeper.simulator.sim_summary import Summary, rates
from pacekeeper.simulator.simulate import Outcome

NUM_WINDOWS = 160
MAX_ANSWERS = 60  # of a policy, on the page
COLOURS = {
    Use.TRAINED: "#3a7d44", Use.REDONE: "#c1440e", Use.BROKEN_OFF: "#8a5a44",
    Use.SAVED: "#5b7db1", Use.RECONFIGURED: "#e0a458", Use.RESTARTED: "#a63d40",
    Use.WAITED: "#9a9a9a",
}  # fmt: skip


def write_report(
    path: Path,
    known: Scenario,
    found: Mapping[str, Sequence[Outcome]],
    rows: Sequence[Summary],
) -> None:
    """One self-contained page. Raises HostError where it can not be written."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADS)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells_of(row)) + "</tr>"
        for row in rows
    )
    first = next(iter(found.values()))[0].seed
    notes = "" if known.recorded is None else "".join(
        f"<p>{html.escape(note)}</p>" for note in known.recorded.notes
    )  # fmt: skip
    page = _PAGE.format(
        style=PAGE_STYLE,
        title=html.escape(title_of(known, found)),
        notes=notes,
        rate=_rate_picture(known, found, first),
        first=first,
        table=f"<table><tr>{head}</tr>{body}</table>",
        spent=_spent_picture(rows),
        answers="".join(_answers(name, outcomes[0]) for name, outcomes in found.items()),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"report {path}: {error.strerror}", remedy="name another file") from None


def _figure(height: float, parts: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    return figure, figure.subplots(parts, sharex=True, squeeze=False)[:, 0]


def _rate_picture(known: Scenario, found: Mapping[str, Sequence[Outcome]], seed: int) -> str:
    figure, (rate, nodes) = _figure(5.5, 2)
    for name, outcomes in found.items():
        points = rates(outcomes[0], NUM_WINDOWS)
        rate.plot([at_s / 60.0 for at_s, _ in points], [r for _, r in points], label=name, lw=1.2)
    rate.set_ylabel("samples/s")
    rate.legend(loc="lower right", fontsize=8)
    there = known.history(seed).num_there()
    end_s = next(iter(found.values()))[0].duration_s
    times = [at_s / 60.0 for at_s, _ in there] + [end_s / 60.0]
    numbers = [number for _, number in there]
    nodes.step(times, numbers + numbers[-1:], where="post", color="#444", lw=1.2)
    nodes.set_ylim(bottom=0)
    nodes.set_ylabel("nodes of the job")
    nodes.set_xlabel("minutes")
    return inline_png(figure, dpi=110)


def _spent_picture(rows: Sequence[Summary]) -> str:
    figure, (axis,) = _figure(1.2 + 0.45 * len(rows))
    left = [0.0] * len(rows)
    places = list(range(len(rows)))
    for use, colour in COLOURS.items():
        parts = [row.spent[use] for row in rows]
        axis.barh(places, parts, left=left, color=colour, label=str(use))
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axis.set_yticks(places, [row.policy for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(0.0, 1.0)
    axis.set_xlabel("part of the time")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=len(COLOURS), fontsize=8)
    return inline_png(figure, dpi=110)


def _answers(name: str, outcome: Outcome) -> str:
    rows = "".join(
        f"<tr><td>{told.at_s / 60.0:.1f}</td><td>{told.cause}</td><td>{told.num_nodes}</td>"
        f"<td>{html.escape(told.reason)}</td></tr>"
        for told in outcome.told[:MAX_ANSWERS]
    )
    left = len(outcome.told) - MAX_ANSWERS
    more = f"<p>And {left} more: see <code>--json</code>.</p>" if left > 0 else ""
    return (
        f"<details><summary>{html.escape(name)}: {len(outcome.told)} answers</summary><table>"
        f"<tr><th>minute</th><th>cause</th><th>nodes</th><th>reason</th></tr>{rows}</table>{more}"
        "</details>"
    )


_PAGE: Any = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
{style}
</style></head><body><h1>{title}</h1>{notes}
<h2>Goodput</h2><p>Samples that count in the end, per second of the whole time; mean and 95 %
interval over seeds. "Of the first": samples over those of the first policy, seed by seed.</p>
{table}
<h2>Throughput over time, seed {first}</h2><p>What was trained, also what was lost later.</p>
<img alt="Throughput over time" src="{rate}">
<h2>Where the time went</h2><img alt="Where the time went" src="{spent}">
<h2>What each policy did, seed {first}</h2>{answers}</body></html>
"""
