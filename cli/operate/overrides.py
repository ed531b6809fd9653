"""What the commands that give orders share: one call, and one line about what stands now."""

import json
import time
from typing import Any

import click

from pacekeeper.cli.common.client import NotFoundError, ask, connected
from pacekeeper.cli.common.options import asks_controller
from pacekeeper.cli.operate.proposals import who
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents.operator_orders import OrderKind, parse_rank_subject
from pacekeeper.protos.convert.json import message_to_dict

_WORDS = {
    "cordon_node": "node {} is cordoned",
    "cordon_rank": "rank {} is cordoned",
    "pause": "job {} is paused",
    "dry_run": "plans are made and told, none is offered",
}


def order(
    client: ClientConfig,
    kind: OrderKind,
    subject: str,
    *,
    is_on: bool,
    said_by: str,
    reason: str = "",
) -> Any:
    """Give an order, or take it back; it as it stands, or stood. Raises as `connected` says."""
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc

    with connected(client) as channel:
        stub: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.GiveOrderRequest(
            kind=f"ORDER_KIND_{kind.name}",
            subject=subject,
            is_on=is_on,
            said_by=said_by or who(),
            reason=reason,
        )
        return ask(stub.GiveOrder, request).order


def cordon(
    client: ClientConfig, subject: str, *, is_on: bool, said_by: str, reason: str = ""
) -> Any:
    """The same of a rank, where the subject names one of a job that is known, else of a node."""
    if parse_rank_subject(subject) is not None:
        try:
            return order(
                client,
                OrderKind.CORDON_RANK,
                subject,
                is_on=is_on,
                said_by=said_by,
                reason=reason,
            )
        except NotFoundError as of_rank:
            try:
                return order(
                    client,
                    OrderKind.CORDON_NODE,
                    subject,
                    is_on=is_on,
                    said_by=said_by,
                    reason=reason,
                )
            except NotFoundError:
                raise of_rank from None
    return order(
        client, OrderKind.CORDON_NODE, subject, is_on=is_on, said_by=said_by, reason=reason
    )


def order_line(given: Any) -> str:
    """An order that stands, in one line."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(given.since_unix_s))
    why = f": {given.reason}" if given.reason else ""
    words = _WORDS.get(given.kind, "{} " + given.kind).format(given.subject)
    return f"{words} since {since} by {given.said_by}{why}"


def show(given: Any, *, is_on: bool, as_json: bool) -> None:
    """For people or for programs."""
    if as_json:
        click.echo(json.dumps({"is_on": is_on, **message_to_dict(given)}))
    elif is_on:
        click.echo(order_line(given))
    else:
        click.echo(f"taken back: {order_line(given)}")


@click.command()
@asks_controller
@click.argument("subject", metavar="NODE|JOB/RANK")
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def cordon_command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Take the work from a node, or from one rank of a job.

    No plan gives it more, and as soon as the policy may it is left out; it comes back with
    `pacekeeper uncordon`. Training goes on all the while.
    """
    given = cordon(client, subject, is_on=True, said_by=by, reason=reason)
    show(given, is_on=True, as_json=as_json)


@click.command()
@asks_controller
@click.argument("subject", metavar="NODE|JOB/RANK")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def uncordon_command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Take the cordon of a node, or of one rank of a job, back."""
    show(cordon(client, subject, is_on=False, said_by=by), is_on=False, as_json=as_json)


@click.command()
@asks_controller
@click.argument("state", type=click.Choice(["on", "off"]))
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def dry_run_command(client: ClientConfig, state: str, reason: str, by: str, as_json: bool) -> None:
    """Make plans and tell them, and offer none, until it is switched off."""
    from pacekeeper.core.incidents.operator_orders import OrderKind

    is_on = state == "on"
    given = order(client, OrderKind.DRY_RUN, "", is_on=is_on, said_by=by, reason=reason)
    show(given, is_on=is_on, as_json=as_json)


@click.command()
@asks_controller
@click.argument("subject", metavar="JOB")
@click.option("--reason", default="", help="Why; it is shown wherever the order is.")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def pause_command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Make no plans for a job until `pacekeeper resume`; what is on its way is taken back.

    Findings, causes and probes that are under way go on.
    """
    from pacekeeper.core.incidents.operator_orders import OrderKind

    given = order(client, OrderKind.PAUSE, subject, is_on=True, said_by=by, reason=reason)
    show(given, is_on=True, as_json=as_json)


@click.command()
@asks_controller
@click.argument("subject", metavar="JOB")
@click.option("--by", default="", help="Who says so; by default you, as the system knows you.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def resume_command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Make plans for a paused job again."""
    from pacekeeper.core.incidents.operator_orders import OrderKind

    given = order(client, OrderKind.PAUSE, subject, is_on=False, said_by=by)
    show(given, is_on=False, as_json=as_json)
