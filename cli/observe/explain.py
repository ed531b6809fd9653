"""`pacekeeper explain INCIDENT`: all that is known of one incident, in words and as a plot."""

import json
from pathlib import Path

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.argument("incident", type=click.IntRange(min=1), metavar="INCIDENT")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture (PNG) there."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(client: ClientConfig, incident: int, plot: Path | None, as_json: bool) -> None:
    """Say all that is known of an incident: what was measured, why, what was planned and passed
    over, and what came of it.
    """
    from pacekeeper.cli.common.client import ask, status_stub
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.json import message_to_dict

    with status_stub(client) as stub:
        request = status_pb2.GetExplanationRequest(incident_id=incident)
        explanation = ask(stub.GetExplanation, request).explanation
    if plot is not None:
        from pacekeeper.cli.observe.explain_plot import write_plot

        write_plot(plot, explanation)
    if as_json:
        click.echo(json.dumps(message_to_dict(explanation)))
        return
    from rich.console import Console

    from pacekeeper.cli.observe.explain_text import explain

    console = Console(highlight=False, soft_wrap=True)
    for line in explain(explanation):
        console.print(line)
