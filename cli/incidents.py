"""`pacekeeper incidents`: what was found, why, and what was done about it."""

import json
import time
from typing import Any

import click

from pacekeeper.core.config import AgentConfig


@click.command()
@click.option("--controller", default=AgentConfig().controller, show_default=True)
@click.option("--job", default="", help="Only of this job.")
@click.option("--open", "open_only", is_flag=True, help="Only open ones.")
@click.option("--watch", is_flag=True, help="All known ones, then each change, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document (per line, if watched).")
def command(controller: str, job: str, open_only: bool, watch: bool, as_json: bool) -> None:
    """Ask the controller for incidents: what was found, why, and what was done."""
    from pacekeeper.cli.client import as_dict, ask, status_stub
    from pacekeeper.protos import status_pb2

    with status_stub(controller) as stub:
        if watch:
            request = status_pb2.WatchIncidentsRequest(job=job)
            try:
                for message in stub.WatchIncidents(request):
                    if as_json:
                        click.echo(json.dumps(as_dict(message.incident)))
                    elif not open_only or not message.incident.HasField("closed_unix_s"):
                        _print(message.incident)
            except KeyboardInterrupt:
                return
        listing = status_pb2.ListIncidentsRequest(job=job, open_only=open_only)
        incidents = list(ask(stub.ListIncidents, listing).incidents)
    if as_json:
        click.echo(json.dumps([as_dict(incident) for incident in incidents]))
    elif not incidents:
        click.echo("no incidents")
    else:
        for incident in incidents:
            _print(incident)


def _print(incident: Any) -> None:
    from rich.console import Console

    console = Console()
    opened = time.strftime("%H:%M:%S", time.localtime(incident.opened_unix_s))
    is_open = not incident.HasField("closed_unix_s")
    state = "[bold red]open[/]" if is_open else f"[green]closed at step {incident.closed_step}[/]"
    console.print(
        f"#{incident.incident_id} {opened} {incident.job} [bold]{incident.kind}[/] "
        f"rank {incident.rank} on {incident.node or '?'} {incident.tier} {state}",
        highlight=False,
    )
    console.print(f"    {incident.reason}", highlight=False, soft_wrap=True)
    for action in incident.actions:
        console.print(f"    -> {action}", highlight=False, soft_wrap=True)
