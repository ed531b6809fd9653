"""`pacekeeper replay`: find slow ranks and imbalance in a recorded run, and their cost."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType
from pacekeeper.simulator.readers.formats import Format


@click.command()
@click.argument("path", type=PathType(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", *(form.value for form in Format)]),
    default="auto",
    show_default=True,
    help="Format of the files; auto: detect it.",
)
@click.option("--run", type=int, help="Number of the run to judge, if there are several.")
@click.option(
    "--replicate",
    "replicates",
    type=PathType(path_type=Path),
    multiple=True,
    help="Another run of the same configuration, to compare step times; repeatable.",
)
@click.option(
    "--report",
    type=PathType(path_type=Path),
    help="Also write an HTML report to this file.",
)
@json_option()
def command(
    path: Path,
    form: str,
    run: int | None,
    replicates: tuple[Path, ...],
    report: Path | None,
    as_json: bool,
) -> None:
    """Judge a recorded run with the detector of live runs.

    PATH is a file, or a directory with the files of one run (one per node or rank), written by
    `pacekeeper agent --record` or by another tool. If a file holds several runs, each is judged, or
    only the one of --run.
    """
    from pacekeeper.predictor.recorded.analyze import analyze
    from pacekeeper.simulator.readers.registry import one_of, open_runs

    wanted = None if form == "auto" else Format(form)
    runs = open_runs(path, wanted)
    if run is not None or report is not None:
        runs = (one_of(runs, path, run),)
    others = [other for place in replicates for other in open_runs(place, wanted)]
    verdicts = [(trace, analyze(trace, others)) for trace in runs]
    if report is not None:
        from pacekeeper.cli.analysis.replay_report import write_report

        write_report(report, *verdicts[0])
    if as_json:
        click.echo(json.dumps(verdicts_document(verdicts), allow_nan=False))
    else:
        from pacekeeper.cli.analysis.replay_text import print_verdicts

        print_verdicts(verdicts)


def verdicts_document(verdicts: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the verdicts as JSON values; values that are not finite become null.

    For several runs, S and what_if are null, each finding names its run, and `runs` lists the runs.
    """
    if len(verdicts) == 1:
        ((_, verdict),) = verdicts
        found = {
            "S": None if verdict.what_if is None else verdict.what_if.slowdown,
            "findings": _findings(verdict),
            "what_if": _what_if(verdict.what_if),
            "notes": list(verdict.notes),
        }
        return _finite(found)  # type: ignore[no-any-return]
    found = {
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
                "num_findings": len(verdict.anomalies),
                "what_if": _what_if(verdict.what_if),
                "notes": list(verdict.notes),
            }
            for trace, verdict in verdicts
        ],
        "notes": [f"{len(verdicts)} runs, judged separately; --run N judges one"],
    }
    return _finite(found)  # type: ignore[no-any-return]


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
        for t in verdict.anomalies
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
