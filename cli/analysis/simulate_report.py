"""HTML report of `pacekeeper simulate`: goodput, throughput over time, use of time."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pacekeeper.cli.analysis.html import PAGE_STYLE
from pacekeeper.cli.analysis.simulate_figures import (
    policy_colour,
    throughput_picture,
    time_use_picture,
)
from pacekeeper.cli.analysis.simulate_text import (
    COLUMNS,
    share_text,
    shown_uses,
    simulation_title,
    summary_cells,
    time_unit,
)
from pacekeeper.core.errors import HostError
from pacekeeper.simulator.engine.event_loop import SimulationResult
from pacekeeper.simulator.engine.statistics import Summary
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.scenario.loader import Scenario

MAX_REACTIONS = 60  # per policy on the page; --json has all


def check_path(path: Path) -> None:
    """Check that a report can be written.

    Raises:
        HostError: the path is a directory, or its parent does not exist.
    """
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"no directory {path.parent}"
        raise HostError(f"report {path}: {what}", remedy="choose another file")


def write_report(
    path: Path,
    known: Scenario,
    found: Mapping[str, Sequence[SimulationResult]],
    rows: Sequence[Summary],
) -> None:
    """Write the report as one file.

    Raises:
        HostError: the file cannot be written.
    """
    outcomes = next(iter(found.values()))
    notes = () if known.recorded is None else known.recorded.notes
    page = _PAGE.format(
        style=PAGE_STYLE,
        title=html.escape(simulation_title(known, found)),
        played=html.escape(_scenario_line(known, outcomes[0].seed)),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        goodput=_table(
            COLUMNS, [_with_colour(at, summary_cells(row)) for at, row in enumerate(rows)]
        ),
        rate=throughput_picture(known, found),
        spent=time_use_picture(rows),
        parts=_table(
            ("", *(row.policy for row in rows)),
            [
                tuple(map(html.escape, (str(use), *(share_text(row.spent[use]) for row in rows))))
                for use in shown_uses(rows)
            ],
        ),
        first=outcomes[0].seed,
        answers="".join(_reactions(name, of_policy[0]) for name, of_policy in found.items()),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"report {path}: {error.strerror}", remedy="choose another file") from None


def _scenario_line(known: Scenario, seed: int) -> str:
    """Return nodes and job in one line."""
    history = known.history(seed)
    numbers = [number for _, number in history.num_there()] or [0]
    least, most = min(numbers), max(numbers)
    nodes = f"{most} nodes" if least == most else f"{least} to {most} nodes"
    return f"{history.name}: {nodes}. {_job(known.job)}"


def _job(job: JobModel | PipelineJob) -> str:
    match job:
        case JobModel():
            return (
                f"A job of {job.num_layers} layers of {job.num_experts} experts, "
                f"{job.samples_per_node} samples of {job.tokens_per_sample} tokens on each node in "
                f"steps of {job.balanced_step_s:g} s."
            )
        case PipelineJob():
            pipelines = job.baseline.pipelines
            cells = pipelines[0].cells
            return (
                f"A node is one device. A job of {job.num_layers} layers in {len(pipelines)} "
                f"pipelines of {len(cells)} stages, {len(cells[0].ranks)} devices each, with "
                f"{len(pipelines[0].micro_batches)} micro-batches in steps of "
                f"{job.baseline_step_s:.3g} s."
            )


def _with_colour(at: int, cells: Sequence[str]) -> tuple[str, ...]:
    """Return the cells of a row with the colour of its policy."""
    name, *rest = (html.escape(cell) for cell in cells)
    rest = [cell.replace("+-", "&plusmn;") for cell in rest]
    return f"<i style='background:{policy_colour(at)}'></i>{name}", *rest


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Return an HTML table of markup cells; kind "numbers" right-aligns all but the first."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{head}</tr>{body}</table>"


def _reactions(name: str, outcome: SimulationResult) -> str:
    unit_s, unit = time_unit(outcome.duration_s)
    rows = [
        (
            f"{decision.at_s / unit_s:.2f}",
            html.escape(str(decision.cause)),
            str(decision.num_nodes),
            html.escape(decision.reason),
        )
        for decision in outcome.decisions[:MAX_REACTIONS]
    ]
    left = len(outcome.decisions) - MAX_REACTIONS
    more = f"<p>And {left} more (all with <code>--json</code>).</p>" if left > 0 else ""
    table = _table((unit, "cause", "nodes", "reason"), rows, "words")
    return (
        f"<details><summary>{html.escape(name)}: {len(outcome.decisions)} decisions</summary>"
        f"{table}{more}</details>"
    )


_PAGE: Any = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
{style}
td {{ font-variant-numeric: tabular-nums; }}
.numbers th + th, .numbers td + td {{ text-align: right; padding-left: 1em; }}
.numbers td + td {{ white-space: nowrap; }}
i {{ display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }}
details {{ margin: .4em 0; }} summary {{ cursor: pointer; }}
</style></head><body><h1>{title}</h1><p>{played}</p>{notes}
<h2>Goodput</h2><p>Useful samples per second of the whole time; mean and 95 % interval over seeds.
"vs first": relative to the first policy, seed by seed. "of limit": relative to all present nodes
computing at their speeds all the time.</p>
{goodput}
<h2>Throughput over time</h2><p>Top: samples trained in each window, including those lost later;
grey: the limit. Middle: useful samples; the band spans all seeds. Bottom: nodes.</p>
<img alt="Throughput over time" src="{rate}">
<h2>Use of time</h2><img alt="Use of time" src="{spent}">{parts}
<h2>Decisions of each policy, seed {first}</h2>{answers}</body></html>
"""
