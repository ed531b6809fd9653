"""`pacekeeper incidents`: what was found, why, and what was done about it."""

import json
import time
from typing import Any

import click

from pacekeeper.cli.common.options import asks_controller
from pacekeeper.core.config.client import ClientConfig


@click.command()
@asks_controller
@click.option("--job", default="", help="Only of this job.")
@click.option("--open", "open_only", is_flag=True, help="Only open ones.")
@click.option("--last", type=click.IntRange(min=1), help="Only the newest so many.")
@click.option("--watch", is_flag=True, help="All known ones, then each change, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document (per line, if watched).")
def command(
    client: ClientConfig, job: str, open_only: bool, last: int | None, watch: bool, as_json: bool
) -> None:
    """Ask the controller for incidents: what was found, why, and what was done."""
    from pacekeeper.cli.common.client import ask, status_stub
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.json import message_to_dict

    with status_stub(client) as stub:
        # Also before a watch: it has a deadline, and says so where the job is misspelt.
        listing = status_pb2.ListIncidentsRequest(job=job, open_only=open_only)
        incidents = list(ask(stub.ListIncidents, listing).incidents)
        if last is not None and watch:
            raise click.UsageError("--last is of a list; --watch begins with all")
        incidents = incidents[-last:] if last is not None else incidents
        if watch:
            _watch(stub, job, open_only, as_json)
        elif as_json:
            click.echo(json.dumps([message_to_dict(incident) for incident in incidents]))
        elif not incidents:
            click.echo("no open incidents" if open_only else "no incidents")
        else:
            for incident in incidents:
                _print(incident)


def _watch(stub: Any, job: str, open_only: bool, as_json: bool) -> None:
    """Until Ctrl-C. With `open_only` an incident's closing is told too, if its life was shown."""
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.json import message_to_dict

    shown: set[int] = set()
    try:
        for message in stub.WatchIncidents(status_pb2.WatchIncidentsRequest(job=job)):
            incident = message.incident
            is_closed = incident.HasField("closed_unix_s")
            if open_only and is_closed and incident.incident_id not in shown:
                continue
            shown.add(incident.incident_id)
            if as_json:
                click.echo(json.dumps(message_to_dict(incident)))
            else:
                _print(incident)
    except KeyboardInterrupt:
        return


def _print(incident: Any) -> None:
    from rich.console import Console
    from rich.markup import escape

    from pacekeeper.cli.observe.incident_text import subject

    console = Console(highlight=False, soft_wrap=True)
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.opened_unix_s))
    is_open = not incident.HasField("closed_unix_s")
    state = "[bold red]open[/]" if is_open else f"[green]closed at step {incident.closed_step}[/]"
    slow = "" if incident.kind == "death" else f" x{incident.slowdown:.2f}"
    where = escape(subject(incident))
    if incident.kind.endswith("_imbalance"):
        where, slow = "costs", f" {1.0 - 1.0 / incident.slowdown:.1%} of a step"
    console.print(
        f"#{incident.incident_id} {opened} {escape(incident.job)} [bold]{escape(incident.kind)}[/] "
        f"{where}{slow} {escape(incident.tier)} "
        f"{state}"
    )
    console.print(f"    {escape(incident.reason)}")
    if incident.cause:
        told, _, _ = incident.cause.partition("; not told:")  # all of it: `explain`
        console.print(f"    cause: {escape(told)}")
    if incident.probe:
        console.print(f"    {escape(incident.probe)}")
    for action in incident.actions:
        console.print(f"    -> {escape(action)}")
