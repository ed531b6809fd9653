"""A simulation as a page of its own: goodput, throughput over time, where the time went."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pacekeeper.cli.analysis.html import PAGE_STYLE
from pacekeeper.cli.analysis.simulate_figures import colour_of, rate_picture, spent_picture
from pacekeeper.cli.analysis.simulate_text import (
    HEADS,
    cells_of,
    part_of,
    title_of,
    unit_of,
    uses_of,
)
from pacekeeper.core.errors import HostError
from pacekeeper.simulator.engine.event_loop import Outcome
from pacekeeper.simulator.engine.statistics import Summary
from pacekeeper.simulator.jobs.data_parallel import JobModel
from pacekeeper.simulator.jobs.pipeline import PipelineJob
from pacekeeper.simulator.scenario.loader import Scenario

MAX_ANSWERS = 60  # of a policy, on the page


def check_path(path: Path) -> None:
    """Raises HostError where a page can not be written, as far as can be seen without a try."""
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise HostError(f"report {path}: {what}", remedy="name another file")


def write_report(
    path: Path,
    known: Scenario,
    found: Mapping[str, Sequence[Outcome]],
    rows: Sequence[Summary],
) -> None:
    """One self-contained page. Raises HostError where it can not be written."""
    outcomes = next(iter(found.values()))
    notes = () if known.recorded is None else known.recorded.notes
    page = _PAGE.format(
        style=PAGE_STYLE,
        title=html.escape(title_of(known, found)),
        played=html.escape(_played(known, outcomes[0].seed)),
        notes="".join(f"<p>{html.escape(note)}</p>" for note in notes),
        goodput=_table(HEADS, [_with_colour(at, cells_of(row)) for at, row in enumerate(rows)]),
        rate=rate_picture(known, found),
        spent=spent_picture(rows),
        parts=_table(
            ("", *(row.policy for row in rows)),
            [
                tuple(map(html.escape, (str(use), *(part_of(row.spent[use]) for row in rows))))
                for use in uses_of(rows)
            ],
        ),
        first=outcomes[0].seed,
        answers="".join(_answers(name, of_policy[0]) for name, of_policy in found.items()),
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"report {path}: {error.strerror}", remedy="name another file") from None


def _played(known: Scenario, seed: int) -> str:
    """The job and its nodes in one line."""
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
            pipelines = job.home.pipelines
            cells = pipelines[0].cells
            return (
                f"A node is one device. A job of {job.num_layers} layers in {len(pipelines)} "
                f"pipelines of {len(cells)} stages, {len(cells[0].ranks)} devices each, with "
                f"{len(pipelines[0].micro_batches)} micro-batches in steps of "
                f"{job.home_step_s:.3g} s."
            )


def _with_colour(at: int, cells: Sequence[str]) -> tuple[str, ...]:
    """The policy's name with the colour that it has in the pictures."""
    name, *rest = (html.escape(cell) for cell in cells)
    rest = [cell.replace("+-", "&plusmn;") for cell in rest]
    return f"<i style='background:{colour_of(at)}'></i>{name}", *rest


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    """Cells are markup already. Of "numbers" all but the first column are to be compared."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table class='{kind}'><tr>{head}</tr>{body}</table>"


def _answers(name: str, outcome: Outcome) -> str:
    unit_s, unit = unit_of(outcome.duration_s)
    rows = [
        (
            f"{told.at_s / unit_s:.2f}",
            html.escape(str(told.cause)),
            str(told.num_nodes),
            html.escape(told.reason),
        )
        for told in outcome.told[:MAX_ANSWERS]
    ]
    left = len(outcome.told) - MAX_ANSWERS
    more = f"<p>And {left} more: see <code>--json</code>.</p>" if left > 0 else ""
    table = _table((unit, "cause", "nodes", "reason"), rows, "words")
    return (
        f"<details><summary>{html.escape(name)}: {len(outcome.told)} answers</summary>"
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
<h2>Goodput</h2><p>Samples that count in the end, per second of the whole time; mean and 95 %
interval over seeds. "Of the first": over those of the first policy, seed by seed. "Of the limit":
over those of all nodes that are there, at the speeds they have, at full pace all the time.</p>
{goodput}
<h2>Throughput over time</h2><p>Above: what was trained in each window, also what was lost later;
grey: the limit. Below it: the samples that still counted at each moment; the band holds all
seeds.</p>
<img alt="Throughput over time" src="{rate}">
<h2>Where the time went</h2><img alt="Where the time went" src="{spent}">{parts}
<h2>What each policy did, seed {first}</h2>{answers}</body></html>
"""
