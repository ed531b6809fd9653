"""`pacekeeper cordon`, `uncordon`, `pause`, `resume`, `dry-run`: give an order or cancel it.

Each command is one call of the operator service. Orders outlive the controller; `status` lists
them.
"""

import json
from typing import Any

import click

from pacekeeper.cli.common.client import NotFoundError, call, open_channel
from pacekeeper.cli.common.options import (
    by_option,
    json_option,
    reason_option,
    with_controller_options,
)
from pacekeeper.cli.observe.operator_text import order_line
from pacekeeper.cli.operate.proposals import current_user
from pacekeeper.core.config.client import ClientConfig
from pacekeeper.core.incidents.operator_orders import OrderKind, parse_rank_subject
from pacekeeper.protos.convert.plain import message_to_dict


def set_order(
    client: ClientConfig,
    kind: OrderKind,
    subject: str,
    *,
    is_on: bool,
    operator: str,
    reason: str = "",
) -> Any:
    """Give an order or cancel it.

    Args:
        client: settings of the controller and the credentials.
        kind: what is ordered.
        subject: node, JOB/RANK or job; empty for a dry run.
        is_on: False cancels the order.
        operator: name for the audit log; empty: the user of this process.
        reason: shown wherever the order is listed.

    Returns:
        The order in force, or the one that was cancelled.

    Raises:
        PacekeeperError: as `open_channel`.
    """
    from pacekeeper.protos import operator_pb2, operator_pb2_grpc

    with open_channel(client) as channel:
        stub: Any = operator_pb2_grpc.OperatorServiceStub(channel)
        request = operator_pb2.GiveOrderRequest(
            kind=f"ORDER_KIND_{kind.name}",
            subject=subject,
            is_on=is_on,
            operator=operator or current_user(),
            reason=reason,
        )
        return call(stub.GiveOrder, request).order


def set_cordon(
    client: ClientConfig, subject: str, *, is_on: bool, operator: str, reason: str = ""
) -> Any:
    """Cordon or uncordon: JOB/RANK is a rank of a known job, else the name of a node."""

    def cordon(kind: OrderKind) -> Any:
        return set_order(client, kind, subject, is_on=is_on, operator=operator, reason=reason)

    if parse_rank_subject(subject) is None:
        return cordon(OrderKind.CORDON_NODE)
    try:
        return cordon(OrderKind.CORDON_RANK)
    except NotFoundError as of_rank:
        try:
            return cordon(OrderKind.CORDON_NODE)
        except NotFoundError:
            raise of_rank from None


def order_text(order: Any, *, is_on: bool) -> str:
    """Return one line on an order in force or on a cancelled one."""
    return order_line(order) if is_on else f"cancelled: {order_line(order)}"


def print_order(order: Any, *, is_on: bool, as_json: bool) -> None:
    """Print the order as one line or as JSON."""
    if as_json:
        click.echo(json.dumps({"is_on": is_on, **message_to_dict(order)}))
    else:
        click.echo(order_text(order, is_on=is_on))


@click.command()
@with_controller_options
@click.argument("subject", metavar="NODE|JOB/RANK")
@reason_option
@by_option
@json_option()
def cordon_command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Remove the work from a node, or from one rank of a job.

    No new plan assigns work to it; the next plan that the policy allows moves its work to other
    ranks. Training continues. `pacekeeper uncordon` cancels the order.
    """
    order = set_cordon(client, subject, is_on=True, operator=by, reason=reason)
    print_order(order, is_on=True, as_json=as_json)


@click.command()
@with_controller_options
@click.argument("subject", metavar="NODE|JOB/RANK")
@by_option
@json_option()
def uncordon_command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Cancel the cordon of a node, or of one rank of a job."""
    order = set_cordon(client, subject, is_on=False, operator=by)
    print_order(order, is_on=False, as_json=as_json)


@click.command()
@with_controller_options
@click.argument("state", type=click.Choice(["on", "off"]))
@reason_option
@by_option
@json_option()
def dry_run_command(client: ClientConfig, state: str, reason: str, by: str, as_json: bool) -> None:
    """Switch the dry run on or off: plans are made and logged, but not offered to any job."""
    is_on = state == "on"
    order = set_order(client, OrderKind.DRY_RUN, "", is_on=is_on, operator=by, reason=reason)
    print_order(order, is_on=is_on, as_json=as_json)


@click.command()
@with_controller_options
@click.argument("subject", metavar="JOB")
@reason_option
@by_option
@json_option()
def pause_command(client: ClientConfig, subject: str, reason: str, by: str, as_json: bool) -> None:
    """Stop planning for a job until `pacekeeper resume`.

    An offered plan is withdrawn. Detection, root-cause analysis and probes continue.
    """
    order = set_order(client, OrderKind.PAUSE, subject, is_on=True, operator=by, reason=reason)
    print_order(order, is_on=True, as_json=as_json)


@click.command()
@with_controller_options
@click.argument("subject", metavar="JOB")
@by_option
@json_option()
def resume_command(client: ClientConfig, subject: str, by: str, as_json: bool) -> None:
    """Plan again for a paused job."""
    order = set_order(client, OrderKind.PAUSE, subject, is_on=False, operator=by)
    print_order(order, is_on=False, as_json=as_json)
