"""`pacekeeper incidents`: list or watch incidents with reason, cause and actions."""

import json
import time
from typing import Any

import click

from pacekeeper.cli.common.options import json_option, with_controller_options
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents.findings import ADVISORY_KINDS, describe_cause


@click.command()
@with_controller_options
@click.option("--job", default="", help="Show incidents of this job only.")
@click.option("--open", "open_only", is_flag=True, help="Show open incidents only.")
@click.option(
    "--last", type=click.IntRange(min=1), help="Show the N newest incidents only.", metavar="N"
)
@click.option(
    "--watch", is_flag=True, help="List all incidents, then print each change until Ctrl-C."
)
@json_option("Print one JSON document (with --watch one per line).")
def command(
    client: ClientConfig, job: str, open_only: bool, last: int | None, watch: bool, as_json: bool
) -> None:
    """List incidents: what was detected, the cause, and the actions taken."""
    from pacekeeper.cli.common.client import call, status_stub
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.plain import message_to_dict

    with status_stub(client) as stub:
        # Also before a watch: this call has a deadline and rejects an unknown job.
        listing = status_pb2.ListIncidentsRequest(job=job, open_only=open_only)
        incidents = list(call(stub.ListIncidents, listing).incidents)
        if last is not None and watch:
            raise click.UsageError("--last applies to a list: leave it out with --watch")
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
    """Print changes until Ctrl-C; with `open_only` also the closing of an incident shown before."""
    from pacekeeper.protos import status_pb2
    from pacekeeper.protos.convert.plain import message_to_dict

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

    from pacekeeper.cli.observe.incident_text import ranks_text

    console = Console(highlight=False, soft_wrap=True)
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident.opened_unix_s))
    is_open = not incident.HasField("closed_unix_s")
    state = "[bold red]open[/]" if is_open else f"[green]closed at step {incident.closed_step}[/]"
    slow = "" if incident.kind in ("death", "hang") else f" x{incident.slowdown:.2f}"
    where = escape(ranks_text(incident))
    if incident.kind in ADVISORY_KINDS:
        where, slow = "costs", f" {1.0 - 1.0 / incident.slowdown:.1%} of a step"
    console.print(
        f"#{incident.incident_id} {opened} {escape(incident.job)} [bold]{escape(incident.kind)}[/] "
        f"{where}{slow} {escape(incident.tier)} "
        f"{state}"
    )
    console.print(f"    {escape(incident.reason)}")
    if incident.cause:
        # `explain` also prints the missing signals.
        cause = describe_cause(incident.cause, incident.normal_signals, ())
        console.print(f"    cause: {escape(cause)}")
    if incident.probe:
        console.print(f"    {escape(incident.probe)}")
    for action in incident.actions:
        console.print(f"    -> {escape(action)}")
