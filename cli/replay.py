"""`pacekeeper replay`: what a recorded run says - who was slow, what was uneven, what it cost."""

import json
from pathlib import Path
from typing import Any

import click

from pacekeeper.simulator.traces import Format, open_trace


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", *(form.value for form in Format)]),
    default="auto",
    show_default=True,
    help="What the files are; auto: looks inside.",
)
@click.option("--run", type=int, help="Which run of an archive of step times.")
@click.option(
    "--replicate",
    "replicates",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Another run of the same recipe, to compare step times with; may be said again.",
)
@click.option("--report", type=click.Path(path_type=Path), help="Write an HTML page here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    path: Path,
    form: str,
    run: int | None,
    replicates: tuple[Path, ...],
    report: Path | None,
    as_json: bool,
) -> None:
    """Judge a recorded run with the code that watches live ones.

    PATH is a file, or a directory with the files of one run (one per node or rank): trace files
    that `pacekeeper agent --record` keeps, and those of other tools.
    """
    from pacekeeper.predictor.replay import judge

    wanted = None if form == "auto" else Format(form)
    trace = open_trace(path, wanted, run)
    verdict = judge(trace, [open_trace(other, wanted, run) for other in replicates])
    if report is not None:
        from pacekeeper.cli.replay_report import write_report

        write_report(report, trace, verdict)
    if as_json:
        click.echo(json.dumps(document(verdict)))
    else:
        from pacekeeper.cli.replay_report import print_verdict

        print_verdict(trace, verdict)


def document(verdict: Any) -> dict[str, Any]:
    """The verdict as plain JSON values."""
    what_if = verdict.what_if
    return {
        "S": None if what_if is None else what_if.slowdown,
        "findings": [
            {
                "rank": t.rank,
                "stage": t.stage,
                "kind": str(t.kind),
                "slowdown": t.slowdown,
                "slowdown_low": t.low,
                "slowdown_high": t.high,
                "first_step": t.first_step,
                "last_step": t.last_step,
                "tier": str(t.tier),
                "reason": t.reason,
                "cause": t.cause,
            }
            for t in verdict.troubles
        ],
        "what_if": None
        if what_if is None
        else {
            "S": what_if.slowdown,
            "by_rank": what_if.by_rank,
            "by_dp": what_if.by_dp,
            "by_stage": what_if.by_stage,
            "by_kind": what_if.by_op,
            "worst_workers_share": what_if.worst_workers_share,
            "last_stage_share": what_if.last_stage_share,
        },
        "notes": list(verdict.notes),
    }
