"""`pacekeeper explain INCIDENT`: measurements, cause, decisions and results of one incident."""

import json
from pathlib import Path

import click

from pacekeeper.cli.common.options import RECORD_ID, json_option, with_controller_options
from pacekeeper.cli.common.paths import PathType
from pacekeeper.core.config.client import ClientConfig


@click.command()
@with_controller_options
@click.argument("incident", type=RECORD_ID, metavar="INCIDENT")
@click.option(
    "--plot",
    type=PathType(dir_okay=False, path_type=Path),
    help="Also write a plot to this PNG file.",
)
@json_option()
def command(client: ClientConfig, incident: int, plot: Path | None, as_json: bool) -> None:
    """Explain one incident: measurements, cause, plans considered, and their effect."""
    from pacekeeper.cli.common.client import call, status_stub
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.plain import message_to_dict

    with status_stub(client) as stub:
        request = status_pb2.GetExplanationRequest(incident_id=incident)
        explanation = call(stub.GetExplanation, request).explanation
    if plot is not None:
        from pacekeeper.cli.observe.explain_plot import write_plot

        write_plot(plot, explanation)
    if as_json:
        click.echo(json.dumps(message_to_dict(explanation)))
        return
    from rich.console import Console

    from pacekeeper.cli.observe.explain_text import explanation_lines

    console = Console(highlight=False, soft_wrap=True)
    for line in explanation_lines(explanation):
        console.print(line)
