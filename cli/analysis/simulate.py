"""`pacekeeper simulate`: simulate one job with one history of failures under several policies."""

import json
from pathlib import Path
from typing import Any

import click

from pacekeeper.cli.common.options import json_option
from pacekeeper.cli.common.paths import PathType


@click.command()
@click.argument("scenario", type=PathType(path_type=Path))
@click.option(
    "--seeds", type=click.IntRange(1), help="Number of seeds [default: that of the scenario]."
)
@click.option(
    "--report",
    type=PathType(path_type=Path),
    help="Also write an HTML report to this file.",
)
@json_option()
def command(scenario: Path, seeds: int | None, report: Path | None, as_json: bool) -> None:
    """Simulate SCENARIO, a TOML file (docs/simulator.md; examples/simulate_*.toml).

    All policies see the same failures, loads and random numbers; the policy `pacekeeper` runs the
    controller's planner.
    """
    from pacekeeper.simulator.engine.statistics import summarize
    from pacekeeper.simulator.scenario.loader import read_scenario, run_scenario

    known = read_scenario(scenario)
    if report is not None:
        from pacekeeper.cli.analysis.simulate_report import check_path

        check_path(report)  # before the simulation, which takes long
    found = run_scenario(known, seeds=seeds)
    rows = summarize(found)
    if report is not None:
        from pacekeeper.cli.analysis.simulate_report import write_report

        write_report(report, known, found, rows)
    if as_json:
        click.echo(json.dumps(simulation_document(known, found, rows), allow_nan=False))
    else:
        from pacekeeper.cli.analysis.simulate_text import print_table

        print_table(known, found, rows)


def simulation_document(known: Any, found: Any, rows: Any) -> dict[str, Any]:
    """Return the results as JSON values."""
    outcomes = next(iter(found.values()))
    return {
        "scenario": known.name,
        "seeds": [outcome.seed for outcome in outcomes],
        "duration_s": outcomes[0].duration_s,
        "notes": list(known.recorded.notes) if known.recorded is not None else [],
        "policies": [
            {
                "policy": row.policy,
                "samples": row.samples,
                "samples_per_s": row.samples_per_s,
                "samples_per_s_95": row.samples_per_s_95,
                "ratio": row.ratio,
                "ratio_95": row.ratio_95,
                "fluid": row.fluid,
                "fluid_95": row.fluid_95,
                "restarts": row.restarts,
                "needless_restarts": row.needless_restarts,
                "reconfigurations": row.reconfigurations,
                "copied_bytes": row.copied_bytes,
                "spent": {str(use): part for use, part in row.spent.items()},
                "answers": [
                    {
                        "at_s": decision.at_s,
                        "cause": str(decision.cause),
                        "nodes": decision.num_nodes,
                        "reason": decision.reason,
                    }
                    for decision in found[row.policy][0].decisions
                ],
            }
            for row in rows
        ],
    }
