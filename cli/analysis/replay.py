"""`pacekeeper replay`: what a recorded run says - who was slow, what was uneven, what it cost."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pacekeeper.simulator.readers.formats import Format


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
@click.option("--run", type=int, help="Which run of a file or directory that holds several.")
@click.option(
    "--replicate",
    "replicates",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Other runs of the same recipe, to compare step times with; may be said again.",
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
    that `pacekeeper agent --record` keeps, and those of other tools. Of a file with several runs
    each is judged, or the one of --run.
    """
    from pacekeeper.predictor.offline.analyze import judge
    from pacekeeper.simulator.readers.registry import one_of, open_runs

    wanted = None if form == "auto" else Format(form)
    runs = open_runs(path, wanted)
    if run is not None or report is not None:
        runs = (one_of(runs, path, run),)
    others = [other for place in replicates for other in open_runs(place, wanted)]
    verdicts = [(trace, judge(trace, others)) for trace in runs]
    if report is not None:
        from pacekeeper.cli.analysis.replay_report import write_report

        write_report(report, *verdicts[0])
    if as_json:
        click.echo(json.dumps(document(verdicts), allow_nan=False))
    else:
        from pacekeeper.cli.analysis.replay_text import print_verdicts

        print_verdicts(verdicts)


def document(verdicts: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The verdicts as plain JSON values; what is not finite is null.

    Of several runs S and what_if are null, each finding names its run, and `runs` has the rest.
    """
    if len(verdicts) == 1:
        ((_, verdict),) = verdicts
        told = {
            "S": None if verdict.what_if is None else verdict.what_if.slowdown,
            "findings": _findings(verdict),
            "what_if": _what_if(verdict.what_if),
            "notes": list(verdict.notes),
        }
        return _finite(told)  # type: ignore[no-any-return]
    told = {
        "S": None,
        "findings": [
            finding | {"run": trace.name}
            for trace, verdict in verdicts
            for finding in _findings(verdict)
        ],
        "what_if": None,
        "runs": [
            {
                "run": trace.name,
                "S": None if verdict.what_if is None else verdict.what_if.slowdown,
                "num_findings": len(verdict.troubles),
                "what_if": _what_if(verdict.what_if),
                "notes": list(verdict.notes),
            }
            for trace, verdict in verdicts
        ],
        "notes": [f"{len(verdicts)} runs, each judged by itself; --run N judges one"],
    }
    return _finite(told)  # type: ignore[no-any-return]


def _findings(verdict: Any) -> list[dict[str, Any]]:
    return [
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
    ]


def _what_if(what_if: Any) -> dict[str, Any] | None:
    if what_if is None:
        return None
    return {
        "S": what_if.slowdown,
        "by_rank": what_if.by_rank,
        "by_dp": what_if.by_dp,
        "by_stage": what_if.by_stage,
        "by_kind": what_if.by_op,
        "share_by_rank": what_if.shares(what_if.by_rank),
        "share_by_stage": what_if.shares(what_if.by_stage),
        "share_by_kind": what_if.shares(what_if.by_op),
        "worst_workers_share": what_if.worst_workers_share,
        "last_stage_share": what_if.last_stage_share,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
